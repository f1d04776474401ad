// Options of a round, the fused SiLU, and graphs.
#include "support.h"

#include <math.h>

// A rank's tensors for a round with all options that can be combined.
typedef struct optional_round {
    round_input in;
    ferry_dispatch_buffers *rows;
    ferry_combine_buffers *sums;
    ferry_dispatch_output output;
    ferry_combine_output combined;
    ferry_combine_input experts;
    uint64_t memory[5];
} optional_round;

enum { COUNTED = TOKENS - 1 };

static optional_round make_optional(const team *of, const rank_state *rank) {
    optional_round made;
    ferry_dispatch_output output = FERRY_DISPATCH_OUTPUT_INIT;
    ferry_combine_output combined = FERRY_COMBINE_OUTPUT_INIT;
    ferry_combine_input experts = FERRY_COMBINE_INPUT_INIT;
    uint32_t counted = COUNTED;
    float row_scales[TOKENS], *row_weights;
    uint16_t bias[HIDDEN], residual[TOKENS][HIDDEN];
    OK(ferry_dispatch_buffers_new(rank->device, of->plan, NULL, &made.rows));
    OK(ferry_combine_buffers_new(rank->device, of->plan, FERRY_F32, 0, &made.sums));
    OK(ferry_combine_buffers_fill(made.sums, 0));
    OK(ferry_dispatch_buffers_output(made.rows, &output));
    OK(ferry_combine_buffers_output(made.sums, TOKENS, &combined));
    HOLDS(combined.combined.type == FERRY_F32);
    uint64_t capacity = output.tokens.dims[0];
    row_weights = (float *)malloc(capacity * sizeof *row_weights);
    HOLDS(row_weights != NULL);
    for (uint64_t row = 0; row < capacity; row++) row_weights[row] = 3.0f;
    for (int token = 0; token < TOKENS; token++) {
        row_scales[token] = (float)(token + 1);
        for (int column = 0; column < HIDDEN; column++) residual[token][column] = bf16_of(0.125f);
    }
    for (int column = 0; column < HIDDEN; column++) bias[column] = bf16_of(1.5f);
    made.in = make_input(rank, -1);
    made.memory[0] = device_memory(rank, &counted, sizeof counted);
    made.memory[1] = device_memory(rank, row_weights, capacity * sizeof *row_weights);
    made.memory[2] = device_memory(rank, row_scales, sizeof row_scales);
    made.memory[3] = device_memory(rank, bias, sizeof bias);
    made.memory[4] = device_memory(rank, residual, sizeof residual);
    free(row_weights);
    made.in.input.tokens_on_device = ferry_tensor_1d(made.memory[0], FERRY_U32, 1);
    experts.expert_rows = output.tokens;
    experts.row_weights = ferry_tensor_1d(made.memory[1], FERRY_F32, capacity);
    experts.row_scales = ferry_tensor_1d(made.memory[2], FERRY_F32, TOKENS);
    experts.bias_0 = experts.bias_1 = ferry_tensor_1d(made.memory[3], FERRY_BF16, HIDDEN);
    experts.residual = ferry_tensor_2d(made.memory[4], FERRY_BF16, TOKENS, HIDDEN);
    made.output = output;
    made.combined = combined;
    made.experts = experts;
    return made;
}

// Late weights, steps on the sums, sums in f32, and fewer tokens than x has rows.
void test_options(ferry_group *group) {
    ferry_config config = small_config();
    optional_round rounds[MOST_RANKS];
    config.options = 1;
    team of = make_team(group, &config);
    for (size_t i = 0; i < of.count; i++) {
        const rank_state *rank = &of.local[i];
        rounds[i] = make_optional(&of, rank);
        OK(ferry_dispatch(rank->communicator, rank->stream, &rounds[i].in.input, &rounds[i].output));
        OK(ferry_combine(rank->communicator, rank->stream, &rounds[i].experts, &rounds[i].combined));
    }
    for (size_t i = 0; i < of.count; i++) {
        const rank_state *rank = &of.local[i];
        float sums[TOKENS][HIDDEN];
        OK(ferry_synchronize(rank->communicator, rank->stream, NULL));
        OK(ferry_device_download(rank->device, sums, rounds[i].combined.combined.address, sizeof sums));
        for (int token = 0; token < TOKENS; token++)
            for (int column = 0; column < HIDDEN; column++) {
                float sum = 2 * 3.0f * element_of(rank->rank, token, column);
                float wanted = sum * (float)(token + 1) + 1.5f + 1.5f + 0.125f;
                HOLDS(sums[token][column] == (token < COUNTED ? wanted : 0.0f));
            }
        OK(ferry_dispatch_buffers_free(&rounds[i].rows));
        OK(ferry_combine_buffers_free(&rounds[i].sums));
        release_memory(rank, rounds[i].in.memory, 3);
        release_memory(rank, rounds[i].memory, 5);
    }
    close_team(&of);
}

enum { ROWS = 4, COLUMNS = 32 };

// Compares the activation with the host's exp.
void test_silu(ferry_group *group) {
    uint32_t ranks[MOST_RANKS], offsets[2] = {0, ROWS - 1};
    size_t count;
    uint16_t input[ROWS][2 * COLUMNS], output[ROWS][COLUMNS];
    uint64_t memory[3];
    rank_state rank;
    ferry_silu silu = FERRY_SILU_INIT;
    OK(ferry_group_local_ranks(group, ranks, MOST_RANKS, &count));
    memset(&rank, 0, sizeof rank);
    OK(ferry_group_device(group, ranks[0], &rank.device));
    for (int row = 0; row < ROWS; row++)
        for (int column = 0; column < 2 * COLUMNS; column++)
            input[row][column] = bf16_of((float)((row + column) % 9 - 4) * 0.5f);
    memset(output, 0, sizeof output);
    memory[0] = device_memory(&rank, input, sizeof input);
    memory[1] = device_memory(&rank, offsets, sizeof offsets);
    memory[2] = device_memory(&rank, output, sizeof output);
    silu.input = ferry_tensor_2d(memory[0], FERRY_BF16, ROWS, 2 * COLUMNS);
    silu.row_offsets = ferry_tensor_1d(memory[1], FERRY_U32, 2);
    silu.output = ferry_tensor_2d(memory[2], FERRY_BF16, ROWS, COLUMNS);
    silu.activation = 7;
    EXPECT(FERRY_INVALID_ARGUMENT, ferry_fused_silu(rank.device, NULL, &silu));
    silu.activation = FERRY_SILU;
    OK(ferry_fused_silu(rank.device, NULL, &silu));
    OK(ferry_device_synchronize(rank.device, NULL));
    OK(ferry_device_download(rank.device, output, memory[2], sizeof output));
    for (int row = 0; row < ROWS; row++)
        for (int column = 0; column < COLUMNS; column++) {
            float gate = of_bf16(input[row][column]), up = of_bf16(input[row][COLUMNS + column]);
            double wanted = row < ROWS - 1 ? (double)gate / (1.0 + exp(-(double)gate)) * (double)up : 0.0;
            HOLDS(fabs((double)of_bf16(output[row][column]) - wanted) <= fabs(wanted) / 128.0);
        }
    release_memory(&rank, memory, 3);
    OK(ferry_device_free(&rank.device));
}

// A round to be captured in a graph.
typedef struct captured {
    const rank_state *rank;
    const optional_round *round;
} captured;

static int enqueue_round(void *context) {
    const captured *of = (const captured *)context;
    ferry_status status = ferry_dispatch(of->rank->communicator, of->rank->stream, &of->round->in.input,
                                         &of->round->output);
    if (status != FERRY_OK) return (int)status;
    return (int)ferry_combine(of->rank->communicator, of->rank->stream, &of->round->experts,
                              &of->round->combined);
}

static int refuse(void *context) {
    (void)context;
    return 9;
}

// Rounds replayed from a graph, on GPUs; the simulator has none.
void test_graph(ferry_group *group, int simulated) {
    ferry_config config = small_config();
    ferry_graph *graphs[MOST_RANKS];
    optional_round rounds[MOST_RANKS];
    config.options = 1;
    team of = make_team(group, &config);
    for (size_t i = 0; i < of.count; i++) {
        const rank_state *rank = &of.local[i];
        captured work = {rank, &rounds[i]};
        rounds[i] = make_optional(&of, rank);
        graphs[i] = NULL;
        if (simulated) {
            int built = strstr(ferry_features(), "cuda") != NULL;
            ferry_status wanted = built ? FERRY_INVALID_ARGUMENT : FERRY_NOT_BUILT;
            EXPECT(wanted, ferry_graph_capture(rank->device, rank->stream, refuse, NULL, &graphs[i]));
            HOLDS(graphs[i] == NULL);
            continue;
        }
        HOLDS(ferry_graph_capture(rank->device, rank->stream, refuse, NULL, &graphs[i]) != FERRY_OK);
        OK(ferry_graph_capture(rank->device, rank->stream, enqueue_round, &work, &graphs[i]));
    }
    for (int replay = 0; !simulated && replay < 2; replay++)
        for (size_t i = 0; i < of.count; i++) OK(ferry_graph_launch(graphs[i], of.local[i].stream));
    for (size_t i = 0; i < of.count; i++) {
        rank_state *rank = &of.local[i];
        OK(ferry_synchronize(rank->communicator, rank->stream, NULL));
        if (!simulated) {
            float first;
            uint64_t sums = rounds[i].combined.combined.address;
            OK(ferry_device_download(rank->device, &first, sums, sizeof first));
            HOLDS(first == 6.0f * element_of(rank->rank, 0, 0) + 3.125f);
            REFUSED(FERRY_IN_USE, "cannot be closed", ferry_communicator_close(&rank->communicator));
            OK(ferry_graph_free(&graphs[i]));
        }
        OK(ferry_dispatch_buffers_free(&rounds[i].rows));
        OK(ferry_combine_buffers_free(&rounds[i].sums));
        release_memory(rank, rounds[i].in.memory, 3);
        release_memory(rank, rounds[i].memory, 5);
    }
    close_team(&of);
}
