// Aligned rows by expert, with all their tables: a round whose experts return their input.
#include "support.h"

enum { ALIGNMENT = 8 };

// Requires the tensors that a plan with these options has, and returns its number of rows.
static size_t require_tables(const team *of, const ferry_dispatch_output *rows) {
    ferry_plan_info info = FERRY_PLAN_INFO_INIT;
    uint64_t groups = EXPERTS / of->ranks;
    OK(ferry_plan_query(of->plan, &info));
    HOLDS(info.row_alignment == ALIGNMENT && info.max_rows % ALIGNMENT == 0);
    HOLDS(rows->src_info.dims[0] == info.max_rows && rows->src_info.dims[1] == 3);
    HOLDS(rows->weights.type == FERRY_F32 && rows->weights.ndim == 2 && rows->weights.dims[1] == 1);
    HOLDS(rows->expert_counts.type == FERRY_I32 && rows->expert_counts.dims[0] == groups);
    HOLDS(rows->row_ends.type == FERRY_U32 && rows->row_ends.dims[0] == groups);
    HOLDS(rows->m_indices.type == FERRY_I32 && rows->m_indices.dims[0] == info.max_rows);
    return (size_t)info.max_rows;
}

// Outputs of a dispatch on the host.
typedef struct contents {
    uint16_t *tokens;
    float *weights;
    int32_t *info, *m_indices;
    int32_t counts[EXPERTS];
    uint32_t offsets[EXPERTS + 1], ends[EXPERTS];
} contents;

static void *copy(const rank_state *rank, const ferry_tensor *from) {
    void *made = malloc((size_t)from->bytes);
    HOLDS(made != NULL);
    OK(ferry_device_download(rank->device, made, from->address, (size_t)from->bytes));
    return made;
}

static contents download(const team *of, const rank_state *rank, const ferry_dispatch_output *rows) {
    size_t groups = EXPERTS / of->ranks;
    contents made;
    made.tokens = (uint16_t *)copy(rank, &rows->tokens);
    made.weights = (float *)copy(rank, &rows->weights);
    made.info = (int32_t *)copy(rank, &rows->src_info);
    made.m_indices = (int32_t *)copy(rank, &rows->m_indices);
    OK(ferry_device_download(rank->device, made.counts, rows->expert_counts.address, 4 * groups));
    OK(ferry_device_download(rank->device, made.ends, rows->row_ends.address, 4 * groups));
    OK(ferry_device_download(rank->device, made.offsets, rows->row_offsets.address, 4 * (groups + 1)));
    return made;
}

// Compares a row that pads a group, or, past the last group, its entries alone.
static void compare_absent(const contents *came, size_t row, int pads) {
    HOLDS(came->m_indices[row] == -1 && came->weights[row] == 0.0f);
    for (size_t column = 0; column < 3; column++) HOLDS(came->info[3 * row + column] == -1);
    for (size_t column = 0; column < HIDDEN; column++)
        HOLDS(came->tokens[row * HIDDEN + column] == (pads ? 0 : 0xa5a5));
}

static void compare_row(const contents *came, size_t row, uint32_t source, int token, int slot, int32_t group) {
    HOLDS(came->info[3 * row] == (int32_t)source && came->info[3 * row + 1] == token);
    HOLDS(came->info[3 * row + 2] == slot && came->m_indices[row] == group);
    HOLDS(came->weights[row] == weight_of(slot));
    for (int column = 0; column < HIDDEN; column++)
        HOLDS(of_bf16(came->tokens[row * HIDDEN + (size_t)column]) == element_of(source, token, column));
}

// Compares the outputs of a dispatch with the expected ones.
static void compare(const team *of, const rank_state *rank, const ferry_dispatch_output *rows, size_t capacity) {
    contents came = download(of, rank, rows);
    int32_t groups = EXPERTS / (int32_t)of->ranks;
    size_t row = 0;
    for (int32_t group = 0; group < groups; group++) {
        size_t first = row;
        HOLDS(came.offsets[group] == row && row % ALIGNMENT == 0);
        for (uint32_t source = 0; source < of->ranks; source++)
            for (int token = 0; token < TOKENS; token++)
                for (int slot = 0; slot < TOP_K; slot++)
                    if (expert_of(source, token, slot) == (int32_t)rank->rank * groups + group)
                        compare_row(&came, row++, source, token, slot, group);
        HOLDS(came.ends[group] == row && came.counts[group] == (int32_t)(row - first));
        while (row % ALIGNMENT != 0) compare_absent(&came, row++, 1);
    }
    HOLDS(came.offsets[groups] == row);
    while (row < capacity) compare_absent(&came, row++, 0);
    free(came.tokens);
    free(came.weights);
    free(came.info);
    free(came.m_indices);
}

// A rank's tensors for a round.
typedef struct aligned_round {
    round_input in;
    ferry_dispatch_buffers *row_buffers;
    ferry_dispatch_output rows;
    ferry_combine_buffers *sum_buffers;
    ferry_combine_output sums;
    size_t capacity;
} aligned_round;

static aligned_round prepare(const team *of, const rank_state *rank) {
    aligned_round made;
    ferry_dispatch_output rows = FERRY_DISPATCH_OUTPUT_INIT;
    ferry_combine_output sums = FERRY_COMBINE_OUTPUT_INIT;
    made.in = make_input(rank, -1);
    OK(ferry_dispatch_buffers_new(rank->device, of->plan, NULL, &made.row_buffers));
    OK(ferry_dispatch_buffers_fill(made.row_buffers, 0xa5));
    OK(ferry_dispatch_buffers_output(made.row_buffers, &rows));
    made.capacity = require_tables(of, &rows);
    OK(ferry_combine_buffers_new(rank->device, of->plan, FERRY_BF16, 0, &made.sum_buffers));
    OK(ferry_combine_buffers_output(made.sum_buffers, TOKENS, &sums));
    made.rows = rows;
    made.sums = sums;
    return made;
}

// Compares the sums, and frees the tensors.
static void finish(const rank_state *rank, aligned_round *round) {
    uint16_t sums[TOKENS][HIDDEN];
    OK(ferry_device_download(rank->device, sums, round->sums.combined.address, sizeof sums));
    for (int token = 0; token < TOKENS; token++)
        for (int column = 0; column < HIDDEN; column++) {
            float sum = (weight_of(0) + weight_of(1)) * element_of(rank->rank, token, column);
            HOLDS(of_bf16(sums[token][column]) == sum);
        }
    OK(ferry_dispatch_buffers_free(&round->row_buffers));
    OK(ferry_combine_buffers_free(&round->sum_buffers));
    release_memory(rank, round->in.memory, 3);
}

static void refuse(ferry_group *group) {
    ferry_config config = small_config();
    ferry_plan *plan = NULL;
    config.expert_alignment = 24;
    REFUSED(FERRY_INVALID_CONFIG, "expert_alignment is 24, but it must be a power of two, 1 to 256",
            ferry_plan_new(group, &config, &plan));
    config.expert_alignment = ALIGNMENT;
    config.receive = FERRY_RECEIVE_COMPACT;
    REFUSED(FERRY_INVALID_CONFIG, "expert_alignment is 8, but receive is compact",
            ferry_plan_new(group, &config, &plan));
    config.receive = FERRY_RECEIVE_BY_EXPERT;
    config.m_indices = 2;
    REFUSED(FERRY_INVALID_ARGUMENT, "config->m_indices is 2", ferry_plan_new(group, &config, &plan));
}

void test_aligned(ferry_group *group) {
    ferry_config config = small_config();
    aligned_round rounds[MOST_RANKS];
    refuse(group);
    config.expert_alignment = ALIGNMENT;
    config.clear_padding = 1;
    config.row_sources = 1;
    config.m_indices = 1;
    team of = make_team(group, &config);
    for (size_t i = 0; i < of.count; i++) rounds[i] = prepare(&of, &of.local[i]);
    for (size_t i = 0; i < of.count; i++) {
        const rank_state *rank = &of.local[i];
        OK(ferry_dispatch(rank->communicator, rank->stream, &rounds[i].in.input, &rounds[i].rows));
    }
    for (size_t i = 0; i < of.count; i++) {
        const rank_state *rank = &of.local[i];
        ferry_combine_input input = FERRY_COMBINE_INPUT_INIT;
        OK(ferry_synchronize(rank->communicator, rank->stream, NULL));
        compare(&of, rank, &rounds[i].rows, rounds[i].capacity);
        input.expert_rows = rounds[i].rows.tokens;
        OK(ferry_combine(rank->communicator, rank->stream, &input, &rounds[i].sums));
    }
    for (size_t i = 0; i < of.count; i++) {
        OK(ferry_synchronize(of.local[i].communicator, of.local[i].stream, NULL));
        finish(&of.local[i], &rounds[i]);
    }
    close_team(&of);
}
