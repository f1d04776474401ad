// Rounds of every mode, with a different factor for each expert: outputs that hold too few rows, a shared
// expert, skip_a2a, and rows that are not summed; by single calls, and by one call for all ranks of this
// process.
#include "support.h"

// Kind of a round.
typedef struct mode {
    int shared, skip, exact, apart;
    // Split in halves; by one call for all ranks of this process.
    int split, together;
    // Number of arriving rows for which the last rank has no room.
    uint32_t missing;
} mode;

enum { MOST_ROWS = MOST_RANKS * TOKENS * TOP_K + TOKENS, SHARED = -1 };

// An expected row, for a slot of a token or for the shared expert.
typedef struct placed {
    uint32_t source;
    int token, slot;
} placed;

// A rank's tensors for a round. `memory` has the experts' rows, the sums and the weights.
typedef struct mode_round {
    round_input in;
    ferry_dispatch_buffers *buffers;
    ferry_dispatch_output whole, rows;
    ferry_combine_input experts;
    ferry_combine_output sums;
    uint64_t memory[3];
} mode_round;

// Factor of an expert, or of the shared one. Sums of their rows are exact in BF16.
static float factor_of(uint32_t source, const placed *row) {
    return row->slot == SHARED ? -3.0f : (float)(1 + expert_of(source, row->token, row->slot) % 5);
}

// The rank whose tokens a rank brings: with skip_a2a all ranks bring the same ones.
static uint32_t brought_by(const mode *of, uint32_t rank) { return of->skip ? 0 : rank; }

static uint32_t home_of(const team *of, uint32_t source, int token, int slot) {
    return (uint32_t)expert_of(source, token, slot) / (EXPERTS / of->ranks);
}

// Computes the rows expected on a rank, in order, and the first row of each group.
static uint32_t place_rows(const team *of, const mode *mode, uint32_t rank, placed *rows, uint32_t *offsets) {
    uint32_t per_rank = EXPERTS / of->ranks, count = 0, group = 0;
    if (mode->shared) {
        uint64_t start, tokens;
        OK(ferry_plan_shared_tokens(of->plan, rank, TOKENS, &start, &tokens));
        offsets[group++] = 0;
        for (uint64_t token = start; token < start + tokens; token++) {
            placed row = {brought_by(mode, rank), (int)token, SHARED};
            rows[count++] = row;
        }
    }
    for (uint32_t local = 0; local < per_rank; local++) {
        offsets[group++] = count;
        for (uint32_t source = 0; source < (mode->skip ? 1 : of->ranks); source++)
            for (int token = 0; token < TOKENS; token++)
                for (int slot = 0; slot < TOP_K; slot++) {
                    placed row = {source, token, slot};
                    if (expert_of(source, token, slot) != (int32_t)(rank * per_rank + local)) continue;
                    rows[count++] = row;
                }
    }
    offsets[group] = count;
    return count;
}

// Number of rows for which a rank has room, of so many that arrive.
static uint32_t room_for(const team *of, const mode *mode, uint32_t rank, uint32_t rows) {
    return rank == of->ranks - 1 ? rows - mode->missing : rows;
}

static int has_room(const team *of, const mode *mode, uint32_t source, int token, int slot) {
    placed rows[MOST_ROWS];
    uint32_t offsets[EXPERTS + 2], home = home_of(of, source, token, slot);
    uint32_t room = room_for(of, mode, home, place_rows(of, mode, home, rows, offsets));
    for (uint32_t row = 0; row < room; row++)
        if (rows[row].source == source && rows[row].token == token && rows[row].slot == slot) return 1;
    return 0;
}

static mode_round make_round(const team *of, const mode *mode, const rank_state *rank) {
    mode_round made;
    placed placed_rows[MOST_ROWS];
    uint32_t offsets[EXPERTS + 2];
    ferry_dispatch_output rows = FERRY_DISPATCH_OUTPUT_INIT;
    ferry_combine_output sums = FERRY_COMBINE_OUTPUT_INIT;
    ferry_combine_input experts = FERRY_COMBINE_INPUT_INIT;
    ferry_tensor none = FERRY_TENSOR_INIT;
    rank_state brings = *rank;
    brings.rank = brought_by(mode, rank->rank);
    made.in = make_input(&brings, -1);
    OK(ferry_dispatch_buffers_new(rank->device, of->plan, NULL, &made.buffers));
    OK(ferry_dispatch_buffers_fill(made.buffers, 0xff));
    OK(ferry_dispatch_buffers_output(made.buffers, &rows));
    made.whole = made.rows = rows;
    if (mode->missing > 0 && rank->rank == of->ranks - 1) {
        uint64_t room = place_rows(of, mode, rank->rank, placed_rows, offsets) - mode->missing;
        made.rows.tokens = ferry_tensor_2d(rows.tokens.address, FERRY_BF16, room, HIDDEN);
        made.rows.src_info = ferry_tensor_2d(rows.src_info.address, FERRY_I32, room, 2);
    }
    OK(ferry_plan_combine_layout(of->plan, TOKENS, FERRY_BF16, (uint32_t)mode->apart, &sums));
    made.memory[0] = device_memory(rank, NULL, made.rows.tokens.bytes);
    made.memory[1] = sums.combined.address = device_memory(rank, NULL, sums.combined.bytes);
    made.memory[2] = 0;
    OK(ferry_device_fill(rank->device, made.memory[0], 0xff, made.rows.tokens.bytes));
    OK(ferry_device_fill(rank->device, made.memory[1], 0xff, sums.combined.bytes));
    experts.expert_rows = made.rows.tokens;
    experts.expert_rows.address = made.memory[0];
    if (mode->exact) {
        if (!mode->apart) experts.topk_weights = made.in.input.topk_weights;
        made.in.input.topk_weights = none;
    }
    made.experts = experts;
    made.sums = sums;
    return made;
}

static void free_round(const rank_state *rank, mode_round *of) {
    OK(ferry_dispatch_buffers_free(&of->buffers));
    release_memory(rank, of->in.memory, 3);
    release_memory(rank, of->memory, 3);
}

// Compares the rows of a dispatch with the expected ones, and runs the experts.
static void answer(const team *of, const mode *mode, const rank_state *rank, const mode_round *round) {
    placed rows[MOST_ROWS];
    uint32_t offsets[EXPERTS + 2], given[EXPERTS + 2];
    uint32_t groups = EXPERTS / of->ranks + (mode->shared ? 1 : 0);
    uint32_t room = room_for(of, mode, rank->rank, place_rows(of, mode, rank->rank, rows, offsets));
    uint32_t capacity = (uint32_t)round->whole.tokens.dims[0];
    uint16_t *tokens = (uint16_t *)malloc(capacity * HIDDEN * sizeof *tokens);
    int32_t *sources = (int32_t *)malloc(capacity * 2 * sizeof *sources);
    HOLDS(tokens != NULL && sources != NULL && room <= capacity);
    const ferry_dispatch_output *output = &round->whole;
    OK(ferry_device_download(rank->device, given, output->row_offsets.address, (groups + 1) * sizeof *given));
    for (uint32_t group = 0; group <= groups; group++)
        HOLDS(given[group] == (offsets[group] < room ? offsets[group] : room));
    OK(ferry_device_download(rank->device, tokens, output->tokens.address, output->tokens.bytes));
    OK(ferry_device_download(rank->device, sources, output->src_info.address, output->src_info.bytes));
    for (uint32_t row = 0; row < capacity; row++) {
        int has_source = row < room && rows[row].slot != SHARED;
        HOLDS(sources[2 * row] == (has_source ? rows[row].token : -1));
        HOLDS(sources[2 * row + 1] == (has_source ? rows[row].slot : -1));
        for (int column = 0; column < HIDDEN; column++) {
            uint16_t *element = &tokens[row * HIDDEN + (uint32_t)column];
            float sent;
            // Memory after the last row is unchanged.
            if (row >= room) {
                HOLDS(*element == 0xffff);
                continue;
            }
            sent = element_of(rows[row].source, rows[row].token, column);
            HOLDS(of_bf16(*element) == sent);
            *element = bf16_of(sent * factor_of(rows[row].source, &rows[row]));
        }
    }
    OK(ferry_device_upload(rank->device, round->memory[0], tokens, room * HIDDEN * sizeof *tokens));
    free(tokens);
    free(sources);
}

// Expected element of the row that comes back for a slot of this rank's token, or from the shared expert.
static float returned(const team *of, const mode *mode, uint32_t rank, const placed *row, int column) {
    uint32_t source = brought_by(mode, rank);
    if (row->slot == SHARED) {
        uint64_t start, tokens;
        OK(ferry_plan_shared_tokens(of->plan, rank, TOKENS, &start, &tokens));
        if ((uint64_t)row->token < start || (uint64_t)row->token >= start + tokens) return 0.0f;
    } else {
        if (mode->skip && home_of(of, source, row->token, row->slot) != rank) return 0.0f;
        if (mode->missing > 0 && !has_room(of, mode, source, row->token, row->slot)) return 0.0f;
    }
    return factor_of(source, row) * element_of(source, row->token, column);
}

static void compare_combined(const team *of, const mode *mode, const rank_state *rank,
                             const mode_round *round) {
    uint16_t combined[TOKENS][TOP_K][HIDDEN], *sums = &combined[0][0][0];
    const ferry_tensor *output = &round->sums.combined;
    HOLDS(output->bytes <= sizeof combined);
    OK(ferry_device_download(rank->device, combined, output->address, output->bytes));
    for (int token = 0; token < TOKENS; token++)
        for (int column = 0; column < HIDDEN; column++) {
            float sum = 0.0f;
            for (int slot = mode->shared ? SHARED : 0; slot < TOP_K; slot++) {
                placed row = {0, token, slot};
                float back = returned(of, mode, rank->rank, &row, column);
                if (mode->apart) HOLDS(of_bf16(combined[token][slot][column]) == back);
                sum += back * (slot == SHARED ? 1.0f : weight_of(slot));
            }
            if (!mode->apart) HOLDS(of_bf16(sums[token * HIDDEN + column]) == sum);
        }
}

// Compares the counts in the window, found with ferry_device_pointers: each source's assignments and tokens.
static void compare_counts(const team *of, const rank_state *rank, uint32_t number) {
    uint32_t per_rank = EXPERTS / of->ranks;
    uint64_t counts[MOST_RANKS * (EXPERTS + 1)], *next = counts;
    ferry_device_pointers at = FERRY_DEVICE_POINTERS_INIT;
    OK(ferry_communicator_device_pointers(rank->communicator, &at));
    size_t bytes = of->ranks * (per_rank + 1) * sizeof *counts;
    OK(ferry_device_download(rank->device, counts, at.dispatch_counts, bytes));
    for (uint32_t source = 0; source < of->ranks; source++) {
        for (uint32_t local = 0; local < per_rank; local++) {
            uint32_t sent = 0;
            for (int token = 0; token < TOKENS; token++)
                for (int slot = 0; slot < TOP_K; slot++)
                    sent += expert_of(source, token, slot) == (int32_t)(rank->rank * per_rank + local);
            HOLDS(*next++ == ((uint64_t)number << 32 | sent));
        }
        HOLDS(*next++ == ((uint64_t)number << 32 | TOKENS));
    }
}

// Arguments of calls for all ranks of this process.
typedef struct arguments {
    ferry_communicator *communicators[MOST_RANKS];
    void *streams[MOST_RANKS];
    const ferry_dispatch_input *inputs[MOST_RANKS];
    const ferry_dispatch_output *rows[MOST_RANKS];
    const ferry_combine_input *experts[MOST_RANKS];
    const ferry_combine_output *sums[MOST_RANKS];
} arguments;

static arguments all_of(const team *of, const mode_round *rounds) {
    arguments all;
    memset(&all, 0, sizeof all);
    for (size_t i = 0; i < of->count; i++) {
        all.communicators[i] = of->local[i].communicator;
        all.streams[i] = of->local[i].stream;
        all.inputs[i] = &rounds[i].in.input;
        all.rows[i] = &rounds[i].rows;
        all.experts[i] = &rounds[i].experts;
        all.sums[i] = &rounds[i].sums;
    }
    return all;
}

// Calls of a kind on all ranks, until the next use.
static const ferry_call *const *calls_of(const arguments *all, uint32_t kind) {
    static ferry_call calls[MOST_RANKS];
    static const ferry_call *each[MOST_RANKS];
    int sends = kind == FERRY_CALL_DISPATCH || kind == FERRY_CALL_DISPATCH_ASYNC;
    int receives = kind == FERRY_CALL_DISPATCH || kind == FERRY_CALL_DISPATCH_WAIT;
    int returns = kind == FERRY_CALL_COMBINE || kind == FERRY_CALL_COMBINE_ASYNC;
    for (size_t i = 0; i < MOST_RANKS; i++) {
        calls[i].size = sizeof(ferry_call);
        calls[i].kind = kind;
        calls[i].dispatch_input = sends ? all->inputs[i] : NULL;
        calls[i].dispatch_output = receives ? all->rows[i] : NULL;
        calls[i].combine_input = returns ? all->experts[i] : NULL;
        calls[i].combine_output = returns ? all->sums[i] : NULL;
        each[i] = &calls[i];
    }
    return each;
}

#define TOGETHER(all, kind, count) \
    ferry_together((all)->communicators, (all)->streams, calls_of((all), (kind)), (count))

static void dispatch(const team *of, const mode *mode, const arguments *all) {
    if (mode->together && mode->split) {
        OK(TOGETHER(all, FERRY_CALL_DISPATCH_ASYNC, of->count));
        OK(TOGETHER(all, FERRY_CALL_DISPATCH_COUNTS, of->count));
        OK(TOGETHER(all, FERRY_CALL_DISPATCH_WAIT, of->count));
    } else if (mode->together) {
        OK(TOGETHER(all, FERRY_CALL_DISPATCH, of->count));
    }
    if (mode->together) return;
    for (size_t i = 0; i < of->count; i++) {
        ferry_communicator *rank = all->communicators[i];
        void *stream = all->streams[i];
        if (mode->skip)
            REFUSED(FERRY_WRONG_ORDER, "skip_a2a is 1", ferry_dispatch_async(rank, stream, all->inputs[i]));
        if (mode->split) OK(ferry_dispatch_async(rank, stream, all->inputs[i]));
        else OK(ferry_dispatch(rank, stream, all->inputs[i], all->rows[i]));
    }
    for (size_t i = 0; mode->split && i < of->count; i++)
        OK(ferry_dispatch_wait(all->communicators[i], all->streams[i], all->rows[i]));
}

static void combine(const team *of, const mode *mode, const arguments *all) {
    if (mode->together && mode->split) {
        OK(TOGETHER(all, FERRY_CALL_COMBINE_ASYNC, of->count));
        OK(TOGETHER(all, FERRY_CALL_COMBINE_WAIT, of->count));
    } else if (mode->together) {
        OK(TOGETHER(all, FERRY_CALL_COMBINE, of->count));
    }
    if (mode->together) return;
    for (size_t i = 0; i < of->count; i++) {
        ferry_communicator *rank = all->communicators[i];
        void *stream = all->streams[i];
        if (mode->skip)
            REFUSED(FERRY_WRONG_ORDER, "skip_a2a is 1",
                    ferry_combine_async(rank, stream, all->experts[i], all->sums[i]));
        if (mode->split) OK(ferry_combine_async(rank, stream, all->experts[i], all->sums[i]));
        else OK(ferry_combine(rank, stream, all->experts[i], all->sums[i]));
    }
    for (size_t i = 0; mode->split && i < of->count; i++)
        OK(ferry_combine_wait(all->communicators[i], all->streams[i]));
}

// Expects a fault with both numbers on the rank whose outputs are too small, and none elsewhere.
static void expect_fault(const team *of, const mode *mode, const rank_state *rank) {
    placed rows[MOST_ROWS];
    uint32_t offsets[EXPERTS + 2], come = place_rows(of, mode, rank->rank, rows, offsets);
    ferry_fault fault = FERRY_FAULT_INIT;
    if (room_for(of, mode, rank->rank, come) == come) {
        OK(ferry_synchronize(rank->communicator, rank->stream, &fault));
        HOLDS(fault.kind == FERRY_FAULT_NONE);
        return;
    }
    EXPECT(FERRY_INPUT_FAULT, ferry_synchronize(rank->communicator, rank->stream, &fault));
    HOLDS(fault.kind == FERRY_FAULT_OUTPUT_TOO_SMALL && fault.region == FERRY_REGION_OUTPUT);
    HOLDS(fault.rank == rank->rank && fault.peer == rank->rank);
    HOLDS(fault.saw == come && fault.wanted == come - mode->missing);
}

// Round `number` of a team, from 1.
static void run_mode(const team *of, const mode *mode, uint32_t number) {
    mode_round rounds[MOST_RANKS];
    for (size_t i = 0; i < of->count; i++) rounds[i] = make_round(of, mode, &of->local[i]);
    arguments all = all_of(of, rounds);
    dispatch(of, mode, &all);
    for (size_t i = 0; i < of->count; i++) {
        expect_fault(of, mode, &of->local[i]);
        answer(of, mode, &of->local[i], &rounds[i]);
        if (!mode->skip) compare_counts(of, &of->local[i], number);
    }
    combine(of, mode, &all);
    for (size_t i = 0; i < of->count; i++) {
        OK(ferry_synchronize(of->local[i].communicator, of->local[i].stream, NULL));
        compare_combined(of, mode, &of->local[i], &rounds[i]);
        free_round(&of->local[i], &rounds[i]);
    }
}

// Checks that with skip_a2a each of the shared expert's tokens is one rank's.
static void compare_shares(const team *of) {
    uint64_t end = 0, start, count, many = (UINT64_C(1) << 32) + 5;
    for (uint32_t rank = 0; rank < of->ranks; rank++) {
        OK(ferry_plan_shared_tokens(of->plan, rank, TOKENS, &start, &count));
        HOLDS(start == end && count <= (TOKENS + of->ranks - 1) / of->ranks);
        end += count;
    }
    HOLDS(end == TOKENS);
    REFUSED(FERRY_INVALID_ARGUMENT, "tokens is 4294967301: the plan's max_tokens_per_rank",
            ferry_plan_shared_tokens(of->plan, 0, many, &start, &count));
}

void test_modes(ferry_group *group) {
    // shared, skip, exact, apart, split, together, missing
    static const mode modes[] = {
        {0, 0, 0, 0, 0, 0, 2}, {0, 0, 1, 0, 0, 0, 2}, {0, 0, 1, 1, 0, 1, 2}, {1, 0, 0, 0, 0, 0, 3},
        {1, 0, 1, 0, 0, 1, 0}, {0, 1, 0, 0, 0, 0, 0}, {1, 1, 0, 0, 0, 1, 0}, {1, 1, 1, 0, 0, 0, 0},
    };
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++) {
        mode mode = modes[i];
        ferry_config config = small_config();
        config.shared_expert = (uint32_t)mode.shared;
        config.skip_a2a = (uint32_t)mode.skip;
        config.combine = mode.exact ? FERRY_COMBINE_EXACT : FERRY_COMBINE_REDUCED;
        team of = make_team(group, &config);
        if (mode.shared && mode.skip) compare_shares(&of);
        run_mode(&of, &mode, 1);
        // The next rounds are complete, whatever the first one lacked.
        mode.missing = 0;
        mode.split = !mode.skip;
        run_mode(&of, &mode, 2);
        mode.together = !mode.together;
        run_mode(&of, &mode, 3);
        close_team(&of);
    }
}

// Calls for a set of communicators that is not one of ferry_communicators_new.
static void refuse_sets(const team *of, arguments all) {
    size_t last = of->count - 1;
    arguments twice = all;
    ferry_config config = small_config();
    twice.communicators[1] = twice.communicators[0];
    REFUSED(FERRY_INVALID_ARGUMENT, "count is 0", TOGETHER(&all, FERRY_CALL_DISPATCH, 0));
    REFUSED(FERRY_INVALID_ARGUMENT, "communicators[0] is the same",
            TOGETHER(&twice, FERRY_CALL_COMBINE_WAIT, 2));
    if (last == 0) return;
    REFUSED(FERRY_INVALID_ARGUMENT, "is missing", TOGETHER(&all, FERRY_CALL_DISPATCH, last));
    team others = make_team(of->group, &config);
    all.communicators[last] = others.local[last].communicator;
    REFUSED(FERRY_INVALID_ARGUMENT, "is of another communicator",
            TOGETHER(&all, FERRY_CALL_DISPATCH, of->count));
    close_team(&others);
}

// Calls for all ranks at a time when no round is open.
static void refuse_order(const team *of, const arguments *all) {
    for (uint32_t kind = FERRY_CALL_DISPATCH_COUNTS; kind <= FERRY_CALL_GIVE_UP; kind++) {
        REFUSED(FERRY_WRONG_ORDER, "out of order: no round is open; ferry_dispatch or",
                TOGETHER(all, kind, of->count));
        HOLDS(strstr(ferry_last_error(), "nothing was launched on any rank") != NULL);
    }
}

// Values that are no calls, or two kinds of them.
static void refuse_calls(const team *of, const arguments *all) {
    size_t size = sizeof(ferry_call), last = of->count - 1;
    const char *what[] = {"dispatch_input", "dispatch_output", "combine_input", "combine_output",
                          "kind",           "kind",            "reserved"};
    const ferry_call wrong[] = {
        {size, FERRY_CALL_GIVE_UP, 0, all->inputs[last], NULL, NULL, NULL},
        {size, FERRY_CALL_DISPATCH_ASYNC, 0, all->inputs[last], all->rows[last], NULL, NULL},
        {size, FERRY_CALL_DISPATCH_WAIT, 0, NULL, all->rows[last], all->experts[last], NULL},
        {size, FERRY_CALL_DISPATCH, 0, all->inputs[last], all->rows[last], NULL, all->sums[last]},
        {size, 0, 0, all->inputs[last], NULL, NULL, NULL},
        {size, 9, 0, NULL, NULL, NULL, NULL},
        {size, FERRY_CALL_DISPATCH_ASYNC, 7, all->inputs[last], NULL, NULL, NULL},
    };
    const ferry_call *each[MOST_RANKS];
    char words[48];
    memcpy(each, calls_of(all, FERRY_CALL_DISPATCH_ASYNC), sizeof each);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        each[last] = &wrong[i];
        snprintf(words, sizeof words, "calls[%u]->%s is", (unsigned)last, what[i]);
        REFUSED(FERRY_INVALID_ARGUMENT, words,
                ferry_together(all->communicators, all->streams, each, of->count));
    }
    const ferry_call other = {size, FERRY_CALL_GIVE_UP, 0, NULL, NULL, NULL, NULL};
    each[last] = &other;
    if (last > 0)
        REFUSED(FERRY_INVALID_ARGUMENT, "is give_up, and that of the first rank is dispatch_async",
                ferry_together(all->communicators, all->streams, each, of->count));
    each[last] = NULL;
    snprintf(words, sizeof words, "calls[%u] is NULL", (unsigned)last);
    REFUSED(FERRY_NULL, words, ferry_together(all->communicators, all->streams, each, of->count));
    EXPECT(FERRY_NULL, ferry_together(all->communicators, all->streams, NULL, of->count));
    EXPECT(FERRY_NULL, ferry_together(NULL, all->streams, each, of->count));
    EXPECT(FERRY_NULL, ferry_together(all->communicators, NULL, each, of->count));
}

// Calls for all ranks that are refused for one of them: nothing is launched on any.
static void refuse_together(const team *of, const mode_round *rounds) {
    size_t last = of->count - 1;
    arguments all = all_of(of, rounds);
    ferry_dispatch_input wrong = rounds[last].in.input;
    char name[48];
    refuse_sets(of, all);
    refuse_order(of, &all);
    refuse_calls(of, &all);
    all.inputs[last] = NULL;
    snprintf(name, sizeof name, "calls[%u]->dispatch_input is NULL", (unsigned)last);
    REFUSED(FERRY_NULL, name, TOGETHER(&all, FERRY_CALL_DISPATCH, of->count));
    all.inputs[last] = &wrong;
    wrong.x.ndim = 3;
    snprintf(name, sizeof name, "calls[%u]->dispatch_input: tensor x", (unsigned)last);
    REFUSED(FERRY_INVALID_TENSOR, name, TOGETHER(&all, FERRY_CALL_DISPATCH_ASYNC, of->count));
    wrong.x.ndim = 2;
    wrong.x.type = FERRY_F16;
    REFUSED(FERRY_INVALID_TENSOR, "nothing was launched", TOGETHER(&all, FERRY_CALL_DISPATCH, of->count));
    for (size_t i = 0; i < of->count; i++) {
        uint32_t round = 77;
        OK(ferry_communicator_round(all.communicators[i], &round));
        HOLDS(round == FERRY_ROUND_IDLE);
    }
}

// Refusals, and a round of single calls and calls for all.
void test_together(ferry_group *group) {
    static const mode plain = {0, 0, 0, 0, 0, 0, 0};
    ferry_config config = small_config();
    mode_round rounds[MOST_RANKS];
    team of = make_team(group, &config);
    for (size_t i = 0; i < of.count; i++) rounds[i] = make_round(&of, &plain, &of.local[i]);
    refuse_together(&of, rounds);
    arguments all = all_of(&of, rounds);
    for (size_t i = 0; i < of.count; i++) {
        OK(ferry_dispatch(all.communicators[i], all.streams[i], all.inputs[i], all.rows[i]));
        if (i + 1 == of.count) break;
        // The others have not dispatched yet.
        REFUSED(FERRY_WRONG_ORDER, "no round is open", TOGETHER(&all, FERRY_CALL_COMBINE, of.count));
    }
    REFUSED(FERRY_WRONG_ORDER, "ferry_combine_async or ferry_give_up comes next",
            TOGETHER(&all, FERRY_CALL_DISPATCH, of.count));
    REFUSED(FERRY_WRONG_ORDER, "ferry_combine_async or ferry_give_up comes next",
            TOGETHER(&all, FERRY_CALL_DISPATCH_ASYNC, of.count));
    for (size_t i = 0; i < of.count; i++) {
        OK(ferry_synchronize(all.communicators[i], all.streams[i], NULL));
        answer(&of, &plain, &of.local[i], &rounds[i]);
    }
    OK(TOGETHER(&all, FERRY_CALL_COMBINE, of.count));
    for (size_t i = 0; i < of.count; i++) {
        OK(ferry_synchronize(all.communicators[i], all.streams[i], NULL));
        compare_combined(&of, &plain, &of.local[i], &rounds[i]);
        free_round(&of.local[i], &rounds[i]);
    }
    close_team(&of);
}
