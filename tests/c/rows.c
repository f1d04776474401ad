// Rows that stay as they came: rounds with compact rows and with a view, whose experts return their input.
#include "support.h"

// A rank's tensors for a round.
typedef struct rows_round {
    round_input in;
    ferry_dispatch_buffers *row_buffers;
    ferry_dispatch_output rows;
    ferry_combine_buffers *sum_buffers;
    ferry_combine_output sums;
    // Ids of 64 bits, answers of the experts, tensor with which sums begin.
    uint64_t memory[3];
    size_t capacity;
} rows_round;

static rows_round prepare(const team *of, const rank_state *rank) {
    rows_round made;
    ferry_capacity capacity = FERRY_CAPACITY_INIT;
    ferry_dispatch_output rows = FERRY_DISPATCH_OUTPUT_INIT;
    ferry_combine_output sums = FERRY_COMBINE_OUTPUT_INIT;
    int64_t ids[TOKENS][TOP_K];
    uint16_t ones[TOKENS][HIDDEN];
    made.in = make_input(rank, -1);
    for (int token = 0; token < TOKENS; token++) {
        for (int slot = 0; slot < TOP_K; slot++) ids[token][slot] = expert_of(rank->rank, token, slot);
        for (int column = 0; column < HIDDEN; column++) ones[token][column] = bf16_of(1.0f);
    }
    made.memory[0] = device_memory(rank, ids, sizeof ids);
    made.in.input.topk_ids = ferry_tensor_2d(made.memory[0], FERRY_I64, TOKENS, TOP_K);
    capacity.wide_ids = 1;
    OK(ferry_dispatch_buffers_new(rank->device, of->plan, &capacity, &made.row_buffers));
    OK(ferry_dispatch_buffers_fill(made.row_buffers, 0xa5));
    OK(ferry_dispatch_buffers_output(made.row_buffers, &rows));
    HOLDS(rows.row_offsets.ndim == 0 && rows.expert_ids.ndim == 0 && rows.ids.type == FERRY_I64);
    made.capacity = (size_t)rows.src_info.dims[0];
    HOLDS(made.capacity == (size_t)of->ranks * TOKENS);
    OK(ferry_combine_buffers_new(rank->device, of->plan, FERRY_BF16, 0, &made.sum_buffers));
    OK(ferry_combine_buffers_fill(made.sum_buffers, 0xff));
    OK(ferry_combine_buffers_output(made.sum_buffers, TOKENS, &sums));
    HOLDS(sums.weights.type == FERRY_F32 && sums.weights.dims[0] == TOKENS && sums.weights.dims[1] == TOP_K);
    made.memory[1] = device_memory(rank, NULL, made.capacity * HIDDEN * sizeof(uint16_t));
    made.memory[2] = device_memory(rank, ones, sizeof ones);
    made.rows = rows;
    made.sums = sums;
    return made;
}

static void release(const rank_state *rank, rows_round *of) {
    OK(ferry_dispatch_buffers_free(&of->row_buffers));
    OK(ferry_combine_buffers_free(&of->sum_buffers));
    release_memory(rank, of->in.memory, 3);
    release_memory(rank, of->memory, 3);
}

// Copies a tensor of `bytes` bytes a row, with `stride` bytes from one row to the next; to be freed.
static void *copy_rows(const rank_state *rank, const ferry_tensor *from, size_t bytes, size_t stride) {
    size_t rows = (size_t)from->dims[0];
    char *all = (char *)malloc(rows * bytes);
    HOLDS(all != NULL);
    for (size_t row = 0; row < rows; row++)
        OK(ferry_device_download(rank->device, all + row * bytes, from->address + row * stride, bytes));
    return all;
}

// Local expert of a slot, or -1.
static int64_t id_of(const team *of, const rank_state *rank, uint32_t source, int token, int slot) {
    int64_t per_rank = EXPERTS / of->ranks;
    int64_t local = expert_of(source, token, slot) - (int64_t)rank->rank * per_rank;
    return local >= 0 && local < per_rank ? local : -1;
}

// The outputs of a dispatch on the host. Its views are read through the window.
typedef struct contents {
    uint16_t *tokens;
    int32_t *info, *sources, *experts;
    int64_t *ids;
    float *weights;
} contents;

static contents download(const rank_state *rank, const rows_round *round, int is_view) {
    const ferry_dispatch_output *rows = &round->rows;
    size_t row = HIDDEN * sizeof(uint16_t);
    contents made;
    if (is_view) {
        ferry_view view = FERRY_VIEW_INIT;
        OK(ferry_communicator_view(rank->communicator, &view));
        HOLDS(rows->tokens.ndim == 0 && view.tokens.dims[0] == round->capacity && view.scales.ndim == 0);
        HOLDS(view.tokens.strides[0] * sizeof(uint16_t) == view.row_stride && view.row_stride % 128 == 0);
        made.tokens = (uint16_t *)copy_rows(rank, &view.tokens, row, (size_t)view.row_stride);
    } else {
        made.tokens = (uint16_t *)copy_rows(rank, &rows->tokens, row, row);
    }
    made.info = (int32_t *)copy_rows(rank, &rows->src_info, 8, 8);
    made.ids = (int64_t *)copy_rows(rank, &rows->ids, 8 * TOP_K, 8 * TOP_K);
    made.weights = (float *)copy_rows(rank, &rows->weights, 4 * TOP_K, 4 * TOP_K);
    made.sources = (int32_t *)copy_rows(rank, &rows->source_counts, 4, 4);
    made.experts = (int32_t *)copy_rows(rank, &rows->expert_counts, 4, 4);
    return made;
}

static void free_contents(contents *of) {
    free(of->tokens);
    free(of->info);
    free(of->ids);
    free(of->weights);
    free(of->sources);
    free(of->experts);
}

// Compares one row, and makes the experts' answer: the token times its weights here.
static void answer_row(const contents *of, size_t row, uint32_t source, int token, const int64_t *wanted,
                       uint16_t *answers) {
    float here = 0.0f;
    HOLDS(of->info[2 * row] == (int32_t)source && of->info[2 * row + 1] == token);
    for (int slot = 0; slot < TOP_K; slot++) {
        float weight = wanted[slot] < 0 ? 0.0f : weight_of(slot);
        HOLDS(of->ids[row * TOP_K + (size_t)slot] == wanted[slot]);
        HOLDS(of->weights[row * TOP_K + (size_t)slot] == weight);
        here += weight;
    }
    for (size_t column = 0; column < HIDDEN; column++) {
        float came = of_bf16(of->tokens[row * HIDDEN + column]);
        HOLDS(came == element_of(source, token, (int)column));
        answers[row * HIDDEN + column] = bf16_of(came * here);
    }
}

// Compares the outputs of a dispatch with the expected ones, and uploads the experts' answers.
static void answer(const team *of, const rank_state *rank, rows_round *round, int is_view) {
    contents came = download(rank, round, is_view);
    size_t bytes = round->capacity * HIDDEN * sizeof(uint16_t), next = 0;
    int32_t experts[EXPERTS] = {0};
    uint16_t *answers = (uint16_t *)malloc(bytes);
    HOLDS(answers != NULL);
    // Combine does not read rows without a token: they stay NaNs.
    memset(answers, 0xff, bytes);
    for (uint32_t source = 0; source < of->ranks; source++) {
        size_t first = next;
        for (int token = 0; token < TOKENS; token++) {
            int64_t wanted[TOP_K];
            int is_here = 0;
            size_t row = is_view ? (size_t)source * TOKENS + (size_t)token : next;
            for (int slot = 0; slot < TOP_K; slot++) {
                wanted[slot] = id_of(of, rank, source, token, slot);
                if (wanted[slot] < 0) continue;
                is_here = 1;
                experts[wanted[slot]]++;
            }
            if (is_here) {
                answer_row(&came, row, source, token, wanted, answers);
                next++;
            } else if (is_view) {
                HOLDS(came.info[2 * row] == -1 && came.ids[row * TOP_K] == -1);
            }
        }
        HOLDS(came.sources[source] == (int32_t)(next - first));
    }
    for (size_t row = next; !is_view && row < round->capacity; row++)
        HOLDS(came.info[2 * row] == -1 && came.ids[row * TOP_K] == -1 && came.weights[row * TOP_K] == 0.0f);
    for (uint32_t local = 0; local < EXPERTS / of->ranks; local++) HOLDS(came.experts[local] == experts[local]);
    OK(ferry_device_upload(rank->device, round->memory[1], answers, bytes));
    free(answers);
    free_contents(&came);
}

static ferry_combine_input answers_of(const rows_round *round) {
    ferry_combine_input input = FERRY_COMBINE_INPUT_INIT;
    input.expert_rows = ferry_tensor_2d(round->memory[1], FERRY_BF16, round->capacity, HIDDEN);
    input.initial_0 = ferry_tensor_2d(round->memory[2], FERRY_BF16, TOKENS, HIDDEN);
    // The weights that came go back.
    input.received_weights = round->rows.weights;
    return input;
}

// Compares sums that begin with ones, and the weights that came back.
static void compare(const rank_state *rank, const rows_round *round) {
    uint16_t sums[TOKENS][HIDDEN];
    float weights[TOKENS][TOP_K];
    OK(ferry_device_download(rank->device, sums, round->sums.combined.address, sizeof sums));
    OK(ferry_device_download(rank->device, weights, round->sums.weights.address, sizeof weights));
    for (int token = 0; token < TOKENS; token++) {
        for (int slot = 0; slot < TOP_K; slot++) HOLDS(weights[token][slot] == weight_of(slot));
        for (int column = 0; column < HIDDEN; column++) {
            float sum = (weight_of(0) + weight_of(1)) * element_of(rank->rank, token, column);
            HOLDS(of_bf16(sums[token][column]) == 1.0f + sum);
        }
    }
}

// Calls that a round with these rows refuses, between dispatch and combine.
static void refuse(const rank_state *rank, const rows_round *round, int is_view) {
    ferry_combine_input input = answers_of(round);
    ferry_combine_output sums = round->sums;
    ferry_view view = FERRY_VIEW_INIT;
    input.initial_1 = ferry_tensor_2d(round->memory[2], FERRY_BF16, TOKENS, 8);
    REFUSED(FERRY_INVALID_TENSOR, "tensor initial_1: wanted shape",
            ferry_combine(rank->communicator, rank->stream, &input, &sums));
    input = answers_of(round);
    input.received_weights.ndim = 0;
    input.received_weights.address = 0;
    memset(input.received_weights.dims, 0, sizeof input.received_weights.dims);
    REFUSED(FERRY_INVALID_TENSOR, "tensor received_weights: wanted a tensor, as the plan's combine_weights is true",
            ferry_combine(rank->communicator, rank->stream, &input, &sums));
    REFUSED(FERRY_INVALID_ARGUMENT, "max_sms is 5, but the communicator was made with at most 4",
            ferry_communicator_limit_sms(rank->communicator, 5));
    REFUSED(FERRY_INVALID_ARGUMENT, "deadline is 86400.000000001 s, but it must be above zero and at most",
            ferry_communicator_set_deadline(rank->communicator, 86400000000001));
    if (!is_view)
        REFUSED(FERRY_INVALID_ARGUMENT, "the plan's receive is compact, and only FERRY_RECEIVE_VIEW leaves rows",
                ferry_communicator_view(rank->communicator, &view));
}

static void run(ferry_group *group, uint32_t receive) {
    ferry_config config = small_config();
    rows_round rounds[MOST_RANKS];
    ferry_view view = FERRY_VIEW_INIT;
    int is_view = receive == FERRY_RECEIVE_VIEW;
    config.receive = receive;
    config.combine_weights = 1;
    config.max_sms = 4;
    team of = make_team(group, &config);
    for (size_t i = 0; i < of.count; i++) {
        rounds[i] = prepare(&of, &of.local[i]);
        if (is_view)
            REFUSED(FERRY_WRONG_ORDER, "ferry_dispatch or ferry_dispatch_async comes next",
                    ferry_communicator_view(of.local[i].communicator, &view));
    }
    for (size_t i = 0; i < of.count; i++) {
        const rank_state *rank = &of.local[i];
        OK(ferry_communicator_limit_sms(rank->communicator, 1 + (uint32_t)i % 4));
        OK(ferry_dispatch(rank->communicator, rank->stream, &rounds[i].in.input, &rounds[i].rows));
        OK(ferry_communicator_limit_sms(rank->communicator, 0));
    }
    for (size_t i = 0; i < of.count; i++) {
        const rank_state *rank = &of.local[i];
        OK(ferry_synchronize(rank->communicator, rank->stream, NULL));
        answer(&of, rank, &rounds[i], is_view);
        refuse(rank, &rounds[i], is_view);
    }
    for (size_t i = 0; i < of.count; i++) {
        const rank_state *rank = &of.local[i];
        ferry_combine_input input = answers_of(&rounds[i]);
        OK(ferry_combine(rank->communicator, rank->stream, &input, &rounds[i].sums));
    }
    for (size_t i = 0; i < of.count; i++) {
        const rank_state *rank = &of.local[i];
        OK(ferry_synchronize(rank->communicator, rank->stream, NULL));
        compare(rank, &rounds[i]);
        release(rank, &rounds[i]);
    }
    close_team(&of);
}

void test_rows(ferry_group *group) {
    ferry_config config = small_config();
    ferry_plan *plan = NULL;
    run(group, FERRY_RECEIVE_COMPACT);
    run(group, FERRY_RECEIVE_VIEW);
    config.receive = FERRY_RECEIVE_STRIDED;
    config.shared_expert = 1;
    REFUSED(FERRY_INVALID_CONFIG, "receive is strided, but shared_expert is true",
            ferry_plan_new(group, &config, &plan));
    config.receive = 5;
    REFUSED(FERRY_INVALID_ARGUMENT, "config->receive is 5: no ferry_receive_layout",
            ferry_plan_new(group, &config, &plan));
}
