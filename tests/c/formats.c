// Every token format: the plan's layout matches Ferry's buffers, and a round accepts both.
#include "support.h"

// A rank's tensors for a round whose experts return zeros.
typedef struct format_round {
    round_input in;
    ferry_dispatch_buffers *rows;
    ferry_combine_buffers *sums;
    uint64_t memory[1];
} format_round;

static void compare_tensors(const ferry_tensor *planned, const ferry_tensor *given) {
    HOLDS(planned->ndim == given->ndim && planned->type == given->type && planned->bytes == given->bytes);
    HOLDS(memcmp(planned->dims, given->dims, sizeof planned->dims) == 0);
    HOLDS(planned->address == 0 && (given->ndim == 0) == (given->address == 0));
}

static void compare_layout(const team *of, const ferry_dispatch_output *given) {
    ferry_dispatch_output planned = FERRY_DISPATCH_OUTPUT_INIT;
    OK(ferry_plan_dispatch_layout(of->plan, NULL, &planned));
    compare_tensors(&planned.tokens, &given->tokens);
    compare_tensors(&planned.scales, &given->scales);
    compare_tensors(&planned.scale_offsets, &given->scale_offsets);
    compare_tensors(&planned.row_scales, &given->row_scales);
    compare_tensors(&planned.row_offsets, &given->row_offsets);
    compare_tensors(&planned.expert_ids, &given->expert_ids);
    compare_tensors(&planned.src_info, &given->src_info);
}

static format_round start_round(const team *of, const rank_state *rank) {
    format_round made;
    ferry_dispatch_output rows = FERRY_DISPATCH_OUTPUT_INIT;
    ferry_combine_output sums = FERRY_COMBINE_OUTPUT_INIT;
    ferry_combine_input experts = FERRY_COMBINE_INPUT_INIT;
    made.in = make_input(rank, -1);
    OK(ferry_dispatch_buffers_new(rank->device, of->plan, NULL, &made.rows));
    OK(ferry_dispatch_buffers_fill(made.rows, 0));
    OK(ferry_dispatch_buffers_output(made.rows, &rows));
    compare_layout(of, &rows);
    OK(ferry_combine_buffers_new(rank->device, of->plan, FERRY_BF16, 0, &made.sums));
    OK(ferry_combine_buffers_fill(made.sums, 0xff));
    OK(ferry_combine_buffers_output(made.sums, TOKENS, &sums));
    experts.expert_rows = ferry_tensor_2d(0, FERRY_BF16, rows.tokens.dims[0], HIDDEN);
    made.memory[0] = experts.expert_rows.address = device_memory(rank, NULL, experts.expert_rows.bytes);
    OK(ferry_device_fill(rank->device, made.memory[0], 0, experts.expert_rows.bytes));
    OK(ferry_dispatch(rank->communicator, rank->stream, &made.in.input, &rows));
    OK(ferry_combine(rank->communicator, rank->stream, &experts, &sums));
    return made;
}

void test_formats(ferry_group *group) {
    for (uint32_t format = FERRY_FORMAT_BF16; format <= FERRY_FORMAT_NVFP4_ROW_SCALED_ROW_MAJOR; format++) {
        ferry_config config = small_config();
        format_round rounds[MOST_RANKS];
        config.format = format;
        team of = make_team(group, &config);
        for (size_t i = 0; i < of.count; i++) rounds[i] = start_round(&of, &of.local[i]);
        for (size_t i = 0; i < of.count; i++) {
            const rank_state *rank = &of.local[i];
            uint16_t sums[TOKENS][HIDDEN];
            ferry_combine_output output = FERRY_COMBINE_OUTPUT_INIT;
            OK(ferry_synchronize(rank->communicator, rank->stream, NULL));
            OK(ferry_combine_buffers_output(rounds[i].sums, TOKENS, &output));
            OK(ferry_device_download(rank->device, sums, output.combined.address, sizeof sums));
            for (int token = 0; token < TOKENS; token++)
                for (int column = 0; column < HIDDEN; column++) HOLDS(sums[token][column] == 0);
            OK(ferry_dispatch_buffers_free(&rounds[i].rows));
            OK(ferry_combine_buffers_free(&rounds[i].sums));
            release_memory(rank, rounds[i].in.memory, 3);
            release_memory(rank, rounds[i].memory, 1);
        }
        close_team(&of);
    }
}
