// Tokens that are encoded already: blockwise FP8 with scales row by row, transposed and packed.
#include "support.h"

enum { WIDE = 512, GROUPS = WIDE / 128 };

// Code `column` of a token, and its scale of group `group` as an exponent with bias 127.
static uint8_t code_of(uint32_t rank, int token, int column) {
    return column < 4 ? 0xff : (uint8_t)((int)rank * 31 + token * 7 + column);
}

// The code that arrives: of four codes of all ones the first loses its sign.
static uint8_t arrived_code(uint32_t rank, int token, int column) {
    return column == 0 ? 0x7f : code_of(rank, token, column);
}

static uint8_t exponent_of(uint32_t rank, int token, int group) {
    return (uint8_t)(100 + (int)rank * 3 + token * 5 + group);
}

static float scale_of(uint32_t rank, int token, int group) {
    uint32_t bits = (uint32_t)exponent_of(rank, token, group) << 23;
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return scale;
}

// A rank's tensors for a round.
typedef struct encoded_round {
    round_input in;
    ferry_dispatch_buffers *buffers;
    ferry_dispatch_output rows;
    // Codes; scales row by row, transposed, packed.
    uint64_t memory[4];
} encoded_round;

static encoded_round prepare(const team *of, const rank_state *rank) {
    encoded_round made;
    uint8_t codes[TOKENS][WIDE], packed[TOKENS][GROUPS];
    float scales[TOKENS][GROUPS], transposed[GROUPS][TOKENS];
    ferry_dispatch_output rows = FERRY_DISPATCH_OUTPUT_INIT;
    for (int token = 0; token < TOKENS; token++) {
        for (int column = 0; column < WIDE; column++) codes[token][column] = code_of(rank->rank, token, column);
        for (int group = 0; group < GROUPS; group++) {
            packed[token][group] = exponent_of(rank->rank, token, group);
            scales[token][group] = transposed[group][token] = scale_of(rank->rank, token, group);
        }
    }
    made.in = make_input(rank, -1);
    made.memory[0] = device_memory(rank, codes, sizeof codes);
    made.memory[1] = device_memory(rank, scales, sizeof scales);
    made.memory[2] = device_memory(rank, transposed, sizeof transposed);
    made.memory[3] = device_memory(rank, packed, sizeof packed);
    made.in.input.x = ferry_tensor_2d(made.memory[0], FERRY_E4M3, TOKENS, WIDE);
    OK(ferry_dispatch_buffers_new(rank->device, of->plan, NULL, &made.buffers));
    OK(ferry_dispatch_buffers_output(made.buffers, &rows));
    HOLDS(rows.tokens.type == FERRY_E4M3 && rows.scales.dims[1] == GROUPS);
    made.rows = rows;
    return made;
}

// Scales in each of their forms.
static ferry_tensor scales_in(const encoded_round *round, int form) {
    ferry_tensor scales = ferry_tensor_2d(round->memory[1], FERRY_F32, TOKENS, GROUPS);
    if (form == 1) {
        scales.address = round->memory[2];
        scales.strides[0] = 1;
        scales.strides[1] = TOKENS;
    }
    if (form == 2) scales = ferry_tensor_2d(round->memory[3], FERRY_I32, TOKENS, GROUPS / 4);
    return scales;
}

// Compares each row with the token that its source says.
static void compare(const team *of, const rank_state *rank, const encoded_round *round) {
    size_t capacity = (size_t)round->rows.src_info.dims[0], seen = 0;
    uint8_t codes[WIDE];
    float scales[GROUPS];
    int32_t info[2];
    HOLDS(capacity == (size_t)of->ranks * TOKENS);
    for (size_t row = 0; row < capacity; row++) {
        OK(ferry_device_download(rank->device, info, round->rows.src_info.address + row * sizeof info, sizeof info));
        if (info[0] < 0) continue;
        seen++;
        OK(ferry_device_download(rank->device, codes, round->rows.tokens.address + row * sizeof codes, sizeof codes));
        OK(ferry_device_download(rank->device, scales, round->rows.scales.address + row * sizeof scales,
                                 sizeof scales));
        for (int column = 0; column < WIDE; column++)
            HOLDS(codes[column] == arrived_code((uint32_t)info[0], info[1], column));
        for (int group = 0; group < GROUPS; group++)
            HOLDS(scales[group] == scale_of((uint32_t)info[0], info[1], group));
    }
    HOLDS(seen > 0);
}

static void refuse(const rank_state *rank, const encoded_round *round) {
    ferry_dispatch_input input = round->in.input;
    REFUSED(FERRY_INVALID_TENSOR, "tensor x_scales: wanted a tensor, as x is e4m3, given none",
            ferry_dispatch(rank->communicator, rank->stream, &input, &round->rows));
    input.x_scales = ferry_tensor_2d(round->memory[1], FERRY_F32, TOKENS, GROUPS + 1);
    REFUSED(FERRY_INVALID_TENSOR, "tensor x_scales: wanted shape [6, 4], given [6, 5]",
            ferry_dispatch(rank->communicator, rank->stream, &input, &round->rows));
    input.x_scales = ferry_tensor_2d(round->memory[1], FERRY_E8M0, TOKENS, GROUPS);
    REFUSED(FERRY_INVALID_TENSOR, "tensor x_scales: wanted elements of f32, given e8m0",
            ferry_dispatch(rank->communicator, rank->stream, &input, &round->rows));
    input.x_scales = scales_in(round, 0);
    input.x_scales.strides[0] = UINT64_C(1) << 31;
    input.x_scales.strides[1] = 1;
    REFUSED(FERRY_INVALID_TENSOR, "tensor x_scales: wanted rows",
            ferry_dispatch(rank->communicator, rank->stream, &input, &round->rows));
}

// A word of scales that no row carries arrives as all ones, and is named.
static void lose(const rank_state *rank, encoded_round *round) {
    uint32_t lost = 0xfffffffe;
    uint64_t at = round->memory[1] + (2 * GROUPS + 1) * sizeof lost;
    OK(ferry_device_upload(rank->device, at, &lost, sizeof lost));
    round->in.input.x_scales = scales_in(round, 0);
    OK(ferry_dispatch(rank->communicator, rank->stream, &round->in.input, &round->rows));
    OK(ferry_give_up(rank->communicator, rank->stream));
}

void test_encoded(ferry_group *group) {
    ferry_config config = small_config();
    encoded_round rounds[MOST_RANKS];
    config.hidden = WIDE;
    config.format = FERRY_FP8;
    config.receive = FERRY_RECEIVE_COMPACT;
    team of = make_team(group, &config);
    for (size_t i = 0; i < of.count; i++) {
        rounds[i] = prepare(&of, &of.local[i]);
        refuse(&of.local[i], &rounds[i]);
    }
    for (int form = 0; form < 3; form++) {
        for (size_t i = 0; i < of.count; i++) {
            const rank_state *rank = &of.local[i];
            OK(ferry_dispatch_buffers_fill(rounds[i].buffers, 0xa5));
            rounds[i].in.input.x_scales = scales_in(&rounds[i], form);
            OK(ferry_dispatch(rank->communicator, rank->stream, &rounds[i].in.input, &rounds[i].rows));
            OK(ferry_give_up(rank->communicator, rank->stream));
        }
        for (size_t i = 0; i < of.count; i++) {
            OK(ferry_synchronize(of.local[i].communicator, of.local[i].stream, NULL));
            compare(&of, &of.local[i], &rounds[i]);
        }
    }
    for (size_t i = 0; i < of.count; i++) lose(&of.local[i], &rounds[i]);
    for (size_t i = 0; i < of.count; i++) {
        const rank_state *rank = &of.local[i];
        ferry_fault fault = FERRY_FAULT_INIT;
        EXPECT(FERRY_INPUT_FAULT, ferry_synchronize(rank->communicator, rank->stream, &fault));
        HOLDS(fault.kind == FERRY_FAULT_LOST_SCALES && fault.region == FERRY_REGION_INPUT_SCALES);
        HOLDS(fault.index == 2 && fault.wanted == 1 && fault.saw == 0xfffffffe && fault.rank == rank->rank);
        OK(ferry_dispatch_buffers_free(&rounds[i].buffers));
        release_memory(rank, rounds[i].in.memory, 3);
        release_memory(rank, rounds[i].memory, 4);
    }
    close_team(&of);
}
