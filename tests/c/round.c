// A C program that uses Ferry: rounds whose experts return their input, compared with the expected results.
//
//   round                                     4 simulated ranks in this process
//   round --group local --ranks N             N GPUs of this process
//   round --group node --rank R --ranks N (--tcp HOST:PORT [--key FILE] | --dir FOLDER) [--device D]
//   round --group nvshmem ...                 the same over NVSHMEM
//
// With --ptx FILE the groups of GPUs load the kernels in FILE. With --key FILE the bytes in FILE are the key.
// One process for each rank, with one GPU each (device R unless --device says another). With --dir the
// processes exchange bytes through files in FOLDER, as an example of a custom all-gather; FOLDER is empty at
// first.
#define _POSIX_C_SOURCE 200809L
#include "support.h"
#include <time.h>

team make_team(ferry_group *group, const ferry_config *config) {
    team made;
    uint32_t ranks[MOST_RANKS];
    ferry_communicator *communicators[MOST_RANKS];
    memset(&made, 0, sizeof made);
    made.group = group;
    OK(ferry_group_ranks(group, &made.ranks));
    OK(ferry_group_local_ranks(group, ranks, MOST_RANKS, &made.count));
    OK(ferry_plan_new(group, config, &made.plan));
    OK(ferry_communicators_new(group, made.plan, communicators, made.count));
    for (size_t i = 0; i < made.count; i++) {
        rank_state *rank = &made.local[i];
        rank->communicator = communicators[i];
        OK(ferry_communicator_rank(rank->communicator, &rank->rank));
        HOLDS(rank->rank == ranks[i]);
        OK(ferry_group_device(group, rank->rank, &rank->device));
        OK(ferry_device_stream(rank->device, &rank->stream));
    }
    return made;
}

void close_team(team *of) {
    for (size_t i = 0; i < of->count; i++) {
        OK(ferry_communicator_close(&of->local[i].communicator));
        OK(ferry_device_free(&of->local[i].device));
        HOLDS(of->local[i].communicator == NULL && of->local[i].device == NULL);
    }
    OK(ferry_plan_free(&of->plan));
}

ferry_config small_config(void) {
    ferry_config config = FERRY_CONFIG_INIT;
    config.experts = EXPERTS;
    config.top_k = TOP_K;
    config.hidden = HIDDEN;
    config.max_tokens_per_rank = TOKENS;
    return config;
}

uint64_t device_memory(const rank_state *rank, const void *from, size_t bytes) {
    uint64_t address;
    OK(ferry_device_alloc(rank->device, bytes, &address));
    if (from != NULL) OK(ferry_device_upload(rank->device, address, from, bytes));
    return address;
}

void release_memory(const rank_state *rank, uint64_t *addresses, size_t count) {
    for (size_t i = 0; i < count; i++) {
        OK(ferry_device_release(rank->device, addresses[i]));
        addresses[i] = 0;
    }
}

// Token `bad_token` (-1: none) names an expert that does not exist, in slot 0.
round_input make_input(const rank_state *rank, int bad_token) {
    uint16_t x[TOKENS][HIDDEN + 8];
    int32_t ids[TOKENS][TOP_K];
    float weights[TOKENS][TOP_K];
    round_input made;
    ferry_dispatch_input input = FERRY_DISPATCH_INPUT_INIT;
    memset(x, 0xff, sizeof x);
    for (int token = 0; token < TOKENS; token++) {
        for (int column = 0; column < HIDDEN; column++)
            x[token][column] = bf16_of(element_of(rank->rank, token, column));
        for (int slot = 0; slot < TOP_K; slot++) {
            ids[token][slot] = expert_of(rank->rank, token, slot);
            weights[token][slot] = weight_of(slot);
        }
        if (token == bad_token) ids[token][0] = 99;
    }
    made.memory[0] = device_memory(rank, x, sizeof x);
    made.memory[1] = device_memory(rank, ids, sizeof ids);
    made.memory[2] = device_memory(rank, weights, sizeof weights);
    input.x = ferry_tensor_2d(made.memory[0], FERRY_BF16, TOKENS, HIDDEN);
    // The rows have gaps between them.
    input.x.bytes = sizeof x;
    input.x.strides[0] = HIDDEN + 8;
    input.x.strides[1] = 1;
    input.topk_ids = ferry_tensor_2d(made.memory[1], FERRY_I32, TOKENS, TOP_K);
    input.topk_weights = ferry_tensor_2d(made.memory[2], FERRY_F32, TOKENS, TOP_K);
    made.input = input;
    return made;
}

// A round's outputs on a rank: those of the dispatch are allocated here from the plan's layout, those of the
// combine by Ferry.
typedef struct round_output {
    ferry_dispatch_output rows;
    uint64_t memory[4];
    ferry_combine_buffers *buffers;
    ferry_combine_output sums;
} round_output;

static round_output make_output(const team *of, const rank_state *rank) {
    round_output made;
    ferry_dispatch_output rows = FERRY_DISPATCH_OUTPUT_INIT;
    ferry_combine_output sums = FERRY_COMBINE_OUTPUT_INIT;
    OK(ferry_plan_dispatch_layout(of->plan, NULL, &rows));
    HOLDS(rows.scales.ndim == 0 && rows.row_scales.ndim == 0);
    made.memory[0] = rows.tokens.address = device_memory(rank, NULL, rows.tokens.bytes);
    made.memory[1] = rows.row_offsets.address = device_memory(rank, NULL, rows.row_offsets.bytes);
    made.memory[2] = rows.expert_ids.address = device_memory(rank, NULL, rows.expert_ids.bytes);
    made.memory[3] = rows.src_info.address = device_memory(rank, NULL, rows.src_info.bytes);
    made.rows = rows;
    OK(ferry_combine_buffers_new(rank->device, of->plan, FERRY_BF16, 0, &made.buffers));
    OK(ferry_combine_buffers_fill(made.buffers, 0xff));
    OK(ferry_combine_buffers_output(made.buffers, TOKENS, &sums));
    made.sums = sums;
    return made;
}

// Compares the rows of a dispatch with the expected ones: by expert, then source rank, then token.
static void compare_rows(const team *of, const rank_state *rank, const round_output *output) {
    uint32_t per_rank = EXPERTS / of->ranks, offsets[EXPERTS + 1], row = 0;
    size_t rows = (size_t)output->rows.tokens.dims[0];
    uint16_t *tokens = (uint16_t *)malloc(rows * HIDDEN * sizeof *tokens);
    int32_t *sources = (int32_t *)malloc(rows * 2 * sizeof *sources);
    HOLDS(tokens != NULL && sources != NULL);
    OK(ferry_device_download(rank->device, offsets, output->memory[1], (per_rank + 1) * sizeof *offsets));
    OK(ferry_device_download(rank->device, tokens, output->memory[0], rows * HIDDEN * sizeof *tokens));
    OK(ferry_device_download(rank->device, sources, output->memory[3], rows * 2 * sizeof *sources));
    for (uint32_t local = 0; local < per_rank; local++) {
        HOLDS(offsets[local] == row);
        for (uint32_t source = 0; source < of->ranks; source++)
            for (int token = 0; token < TOKENS; token++)
                for (int slot = 0; slot < TOP_K; slot++) {
                    if (expert_of(source, token, slot) != (int32_t)(rank->rank * per_rank + local)) continue;
                    HOLDS(sources[2 * row] == token && sources[2 * row + 1] == slot);
                    for (int column = 0; column < HIDDEN; column++) {
                        float came = of_bf16(tokens[row * HIDDEN + (uint32_t)column]);
                        HOLDS(came == element_of(source, token, column));
                    }
                    row++;
                }
    }
    HOLDS(offsets[per_rank] == row);
    free(tokens);
    free(sources);
}

// Compares the sums if experts return their input; `bad_token` lost its first expert.
static void compare_sums(const rank_state *rank, const ferry_tensor *combined, int bad_token) {
    uint16_t sums[TOKENS][HIDDEN];
    OK(ferry_device_download(rank->device, sums, combined->address, sizeof sums));
    for (int token = 0; token < TOKENS; token++) {
        float weight = weight_of(1) + (token == bad_token ? 0.0f : weight_of(0));
        for (int column = 0; column < HIDDEN; column++)
            HOLDS(of_bf16(sums[token][column]) == weight * element_of(rank->rank, token, column));
    }
}

// A rank's tensors for a round.
typedef struct round_tensors {
    round_input in;
    round_output out;
} round_tensors;

static void combine_rank(const rank_state *rank, const round_tensors *of, int split) {
    ferry_combine_input experts = FERRY_COMBINE_INPUT_INIT;
    experts.expert_rows = of->out.rows.tokens;
    if (split)
        OK(ferry_combine_async(rank->communicator, rank->stream, &experts, &of->out.sums));
    else
        OK(ferry_combine(rank->communicator, rank->stream, &experts, &of->out.sums));
}

// Compares the counts that come with those of the inputs.
static void compare_counts(const team *of, const rank_state *rank) {
    ferry_received_counts counts = FERRY_RECEIVED_COUNTS_INIT;
    uint32_t per_rank = EXPERTS / of->ranks, sources[MOST_RANKS], experts[EXPERTS], rows = 0;
    counts.source_counts = sources;
    counts.sources = of->ranks;
    while (!counts.is_here) OK(ferry_received(rank->communicator, &counts));
    counts.expert_counts = experts;
    counts.experts = per_rank - 1;
    REFUSED(FERRY_INVALID_ARGUMENT, "expert_counts has", ferry_received(rank->communicator, &counts));
    counts.experts = per_rank;
    OK(ferry_received(rank->communicator, &counts));
    for (uint32_t source = 0; source < of->ranks; source++) {
        uint32_t wanted = 0;
        for (int token = 0; token < TOKENS; token++)
            for (int slot = 0; slot < TOP_K; slot++)
                wanted += (uint32_t)expert_of(source, token, slot) / per_rank == rank->rank;
        HOLDS(sources[source] == wanted);
        rows += wanted;
    }
    HOLDS(counts.rows == rows);
    for (uint32_t local = 0; local < per_rank; local++) rows -= experts[local];
    HOLDS(rows == 0);
}

// Makes every call that is out of order at `round`: each is refused, with a text that names the next call.
static void refuse_order(team *of, const round_tensors *tensors, ferry_round round) {
    static const char *const next_calls[] = {
        "no round is open; ferry_dispatch or ferry_dispatch_async comes next",
        "ferry_dispatch_async was not waited for; ferry_dispatch_wait comes next",
        "the dispatch was not combined; ferry_combine, ferry_combine_async or ferry_give_up comes next",
        "ferry_combine_async was not waited for; ferry_combine_wait comes next",
    };
    const char *next = next_calls[round];
    for (size_t i = 0; i < of->count; i++) {
        const round_tensors *own = &tensors[i];
        ferry_communicator *rank = of->local[i].communicator;
        void *stream = of->local[i].stream;
        ferry_combine_input experts = FERRY_COMBINE_INPUT_INIT;
        uint32_t found = 77;
        OK(ferry_communicator_round(rank, &found));
        HOLDS(found == (uint32_t)round);
        experts.expert_rows = own->out.rows.tokens;
        if (round != FERRY_ROUND_IDLE) {
            REFUSED(FERRY_WRONG_ORDER, next, ferry_dispatch(rank, stream, &own->in.input, &own->out.rows));
            REFUSED(FERRY_WRONG_ORDER, next, ferry_dispatch_async(rank, stream, &own->in.input));
            REFUSED(FERRY_WRONG_ORDER, next, ferry_communicator_close(&of->local[i].communicator));
            HOLDS(strstr(ferry_last_error(), "cannot be closed") != NULL);
            HOLDS(of->local[i].communicator == rank);
        }
        if (round != FERRY_ROUND_SENT) {
            REFUSED(FERRY_WRONG_ORDER, next, ferry_dispatch_wait(rank, stream, &own->out.rows));
            REFUSED(FERRY_WRONG_ORDER, next, ferry_dispatch_counts(rank, stream));
        }
        if (round != FERRY_ROUND_DISPATCHED) {
            REFUSED(FERRY_WRONG_ORDER, next, ferry_combine(rank, stream, &experts, &own->out.sums));
            REFUSED(FERRY_WRONG_ORDER, next, ferry_combine_async(rank, stream, &experts, &own->out.sums));
            REFUSED(FERRY_WRONG_ORDER, next, ferry_give_up(rank, stream));
        }
        if (round != FERRY_ROUND_RETURNED)
            REFUSED(FERRY_WRONG_ORDER, next, ferry_combine_wait(rank, stream));
    }
}

// A round of all ranks, in fused calls or in halves. Rank 0's token `bad_token` names an expert that does not
// exist.
static void run_round(team *of, int split, int bad_token) {
    round_tensors tensors[MOST_RANKS];
    for (size_t i = 0; i < of->count; i++) {
        const rank_state *rank = &of->local[i];
        tensors[i].in = make_input(rank, rank->rank == 0 ? bad_token : -1);
        tensors[i].out = make_output(of, rank);
    }
    refuse_order(of, tensors, FERRY_ROUND_IDLE);
    for (size_t i = 0; i < of->count; i++) {
        const rank_state *rank = &of->local[i];
        if (split) OK(ferry_dispatch_async(rank->communicator, rank->stream, &tensors[i].in.input));
        else OK(ferry_dispatch(rank->communicator, rank->stream, &tensors[i].in.input, &tensors[i].out.rows));
    }
    if (split) refuse_order(of, tensors, FERRY_ROUND_SENT);
    for (size_t i = 0; split && i < of->count; i++) {
        ferry_received_counts counts = FERRY_RECEIVED_COUNTS_INIT;
        REFUSED(FERRY_WRONG_ORDER, "no counts were asked for",
                ferry_received(of->local[i].communicator, &counts));
        OK(ferry_dispatch_counts(of->local[i].communicator, of->local[i].stream));
    }
    for (size_t i = 0; split && i < of->count; i++) compare_counts(of, &of->local[i]);
    for (size_t i = 0; split && i < of->count; i++)
        OK(ferry_dispatch_wait(of->local[i].communicator, of->local[i].stream, &tensors[i].out.rows));
    refuse_order(of, tensors, FERRY_ROUND_DISPATCHED);
    for (size_t i = 0; i < of->count; i++) combine_rank(&of->local[i], &tensors[i], split);
    if (split) refuse_order(of, tensors, FERRY_ROUND_RETURNED);
    for (size_t i = 0; split && i < of->count; i++)
        OK(ferry_combine_wait(of->local[i].communicator, of->local[i].stream));
    for (size_t i = 0; i < of->count; i++) {
        rank_state *rank = &of->local[i];
        ferry_fault fault = FERRY_FAULT_INIT;
        int bad_here = rank->rank == 0 && bad_token >= 0;
        ferry_status wanted = bad_here ? FERRY_INPUT_FAULT : FERRY_OK;
        EXPECT(wanted, ferry_synchronize(rank->communicator, rank->stream, &fault));
        HOLDS(fault.kind == (uint32_t)(bad_here ? FERRY_FAULT_INVALID_EXPERT : FERRY_FAULT_NONE));
        if (bad_here) HOLDS(fault.rank == 0 && fault.index == (uint64_t)bad_token && fault.saw == 99);
        OK(ferry_check(rank->communicator, NULL));
        if (bad_token < 0) compare_rows(of, rank, &tensors[i].out);
        compare_sums(rank, &tensors[i].out.sums.combined, bad_here ? bad_token : -1);
        release_memory(rank, tensors[i].in.memory, 3);
        release_memory(rank, tensors[i].out.memory, 4);
        OK(ferry_combine_buffers_free(&tensors[i].out.buffers));
    }
}

// A round that is given up, by a call for all ranks of this process or by one for each.
static void give_up_round(team *of, int together) {
    round_tensors tensors[MOST_RANKS];
    ferry_communicator *communicators[MOST_RANKS];
    void *streams[MOST_RANKS];
    const ferry_call give_up = {sizeof give_up, FERRY_CALL_GIVE_UP, 0, NULL, NULL, NULL, NULL}, *calls[MOST_RANKS];
    for (size_t i = 0; i < of->count; i++) {
        const rank_state *rank = &of->local[i];
        communicators[i] = rank->communicator;
        streams[i] = rank->stream;
        calls[i] = &give_up;
        tensors[i].in = make_input(rank, -1);
        tensors[i].out = make_output(of, rank);
        OK(ferry_dispatch(rank->communicator, rank->stream, &tensors[i].in.input, &tensors[i].out.rows));
    }
    if (together) OK(ferry_together(communicators, streams, calls, of->count));
    for (size_t i = 0; !together && i < of->count; i++) OK(ferry_give_up(communicators[i], streams[i]));
    refuse_order(of, tensors, FERRY_ROUND_IDLE);
    for (size_t i = 0; i < of->count; i++) {
        const rank_state *rank = &of->local[i];
        OK(ferry_synchronize(rank->communicator, rank->stream, NULL));
        compare_rows(of, rank, &tensors[i].out);
        release_memory(rank, tensors[i].in.memory, 3);
        release_memory(rank, tensors[i].out.memory, 4);
        OK(ferry_combine_buffers_free(&tensors[i].out.buffers));
    }
}

// Ranks that do not come: the other one faults by its call's deadline, and can be closed. Simulated only.
static void test_lost_rank(ferry_group *group) {
    ferry_config config = small_config();
    ferry_fault fault = FERRY_FAULT_INIT;
    time_t begin = time(NULL);
    team of = make_team(group, &config);
    rank_state *rank = &of.local[0];
    round_tensors tensors = {make_input(rank, -1), make_output(&of, rank)};
    OK(ferry_communicator_set_deadline(rank->communicator, 20 * 1000 * 1000));
    OK(ferry_dispatch(rank->communicator, rank->stream, &tensors.in.input, &tensors.out.rows));
    EXPECT(FERRY_FAULT, ferry_synchronize(rank->communicator, rank->stream, &fault));
    HOLDS(fault.kind == FERRY_FAULT_PEER_TIMEOUT && fault.rank == 0 && fault.culprit != 0);
    HOLDS(time(NULL) - begin < 8); // The plan's is 10 s.
    EXPECT(FERRY_POISONED, ferry_check(rank->communicator, &fault));
    HOLDS(fault.kind == FERRY_FAULT_PEER_TIMEOUT);
    // The culprit, which has nothing enqueued, learns that rank 0 gave up on it.
    uint32_t late = fault.culprit;
    HOLDS(late > 0 && late < of.count);
    EXPECT(FERRY_POISONED, ferry_synchronize(of.local[late].communicator, of.local[late].stream, &fault));
    HOLDS(fault.kind == FERRY_FAULT_PEER_TIMEOUT && fault.peer == 0);
    HOLDS(fault.rank == late && fault.culprit == late);
    release_memory(rank, tensors.in.memory, 3);
    release_memory(rank, tensors.out.memory, 4);
    OK(ferry_combine_buffers_free(&tensors.out.buffers));
    close_team(&of);
}

// A custom all-gather, through files.
typedef struct file_gather {
    const char *folder;
    uint32_t rank, ranks;
    unsigned calls;
} file_gather;

static int gather_files(void *context, const void *mine, size_t bytes, void *all) {
    file_gather *of = (file_gather *)context;
    struct timespec pause = {0, 1000 * 1000};
    char path[512], ready[528];
    FILE *file;
    snprintf(path, sizeof path, "%s/%u-%u", of->folder, of->calls, of->rank);
    snprintf(ready, sizeof ready, "%s.ready", path);
    if ((file = fopen(path, "wb")) == NULL) return 1;
    if (fwrite(mine, 1, bytes, file) != bytes || fclose(file) != 0) return 2;
    if (rename(path, ready) != 0) return 3;
    for (uint32_t rank = 0; rank < of->ranks; rank++) {
        int tries = 60 * 1000;
        snprintf(ready, sizeof ready, "%s/%u-%u.ready", of->folder, of->calls, rank);
        while ((file = fopen(ready, "rb")) == NULL && tries-- > 0) nanosleep(&pause, NULL);
        if (file == NULL) return 4;
        size_t got = fread((char *)all + rank * bytes, 1, bytes, file);
        fclose(file);
        if (got != bytes) return 5;
    }
    of->calls++;
    return 0;
}

// Options of the command line.
typedef struct options {
    const char *group, *address, *key, *ptx;
    file_gather gather;
    uint32_t ranks;
    int device;
} options;

static options read_options(int count, char **arguments) {
    options read = {"simulated", NULL, NULL, NULL, {NULL, 0, 0, 0}, 4, -1};
    for (int i = 1; i + 1 < count; i += 2) {
        const char *name = arguments[i], *value = arguments[i + 1];
        if (strcmp(name, "--group") == 0) read.group = value;
        else if (strcmp(name, "--tcp") == 0) read.address = value;
        else if (strcmp(name, "--key") == 0) read.key = value;
        else if (strcmp(name, "--dir") == 0) read.gather.folder = value;
        else if (strcmp(name, "--ptx") == 0) read.ptx = value;
        else if (strcmp(name, "--rank") == 0) read.gather.rank = (uint32_t)atoi(value);
        else if (strcmp(name, "--ranks") == 0) read.ranks = (uint32_t)atoi(value);
        else if (strcmp(name, "--device") == 0) read.device = atoi(value);
        else count = 0;
    }
    if (count % 2 == 0 || read.ranks < 1 || read.ranks > MOST_RANKS || EXPERTS % read.ranks != 0) {
        fprintf(stderr, "see the top of round.c for the arguments\n");
        exit(2);
    }
    read.gather.ranks = read.ranks;
    if (read.device < 0) read.device = (int)read.gather.rank;
    return read;
}

// Reads a file into memory, to be freed.
static char *read_file(const char *path, size_t *bytes) {
    FILE *file = fopen(path, "rb");
    long length;
    char *text;
    HOLDS(file != NULL && fseek(file, 0, SEEK_END) == 0 && (length = ftell(file)) > 0);
    rewind(file);
    *bytes = (size_t)length;
    text = (char *)malloc(*bytes);
    HOLDS(text != NULL && fread(text, 1, *bytes, file) == *bytes);
    fclose(file);
    return text;
}

// Reads the kernels in a file.
static ferry_kernels *read_kernels(const char *path) {
    ferry_kernels *kernels = NULL;
    size_t bytes;
    char *text = read_file(path, &bytes);
    OK(ferry_kernels_from_ptx(text, bytes, &kernels));
    free(text);
    return kernels;
}

static ferry_group *make_group(options *of) {
    ferry_group *group = NULL;
    ferry_group_options with = FERRY_GROUP_OPTIONS_INIT;
    ferry_kernels *kernels = of->ptx == NULL ? NULL : read_kernels(of->ptx);
    ferry_simulator simulator = FERRY_SIMULATOR_INIT;
    ferry_bootstrap bootstrap = FERRY_BOOTSTRAP_INIT;
    int32_t devices[MOST_RANKS] = {0, 1, 2, 3, 4, 5, 6, 7};
    with.kernels = kernels;
    simulator.ranks = of->ranks;
    simulator.seed = 7;
    bootstrap.rank = of->gather.rank;
    bootstrap.ranks = of->ranks;
    bootstrap.address = of->address;
    char *key = of->key == NULL ? NULL : read_file(of->key, &bootstrap.key_bytes);
    bootstrap.key = key;
    if (of->gather.folder != NULL) {
        bootstrap.all_gather = gather_files;
        bootstrap.context = &of->gather;
    }
    if (strcmp(of->group, "simulated") == 0) OK(ferry_group_simulated(&simulator, &group));
    else if (strcmp(of->group, "local") == 0)
        OK(kernels != NULL ? ferry_group_local_with(devices, of->ranks, &with, &group)
                           : ferry_group_local(devices, of->ranks, &group));
    else if (strcmp(of->group, "node") == 0)
        OK(kernels != NULL ? ferry_group_node_with(&bootstrap, of->device, &with, &group)
                           : ferry_group_node(&bootstrap, of->device, &group));
    else
        OK(kernels != NULL ? ferry_group_nvshmem_with(&bootstrap, of->device, NULL, &with, &group)
                           : ferry_group_nvshmem(&bootstrap, of->device, NULL, &group));
    free(key);
    if (kernels != NULL) OK(ferry_kernels_free(&kernels));
    return group;
}

int main(int count, char **arguments) {
    options given = read_options(count, arguments);
    int simulated = strcmp(given.group, "simulated") == 0;
    ferry_group *group = make_group(&given);
    ferry_config config = small_config();
    team of = make_team(group, &config);
    HOLDS(ferry_version_number() == FERRY_VERSION_NUMBER && strcmp(ferry_version(), FERRY_VERSION) == 0);
    run_round(&of, 0, -1);
    give_up_round(&of, 0);
    run_round(&of, 1, -1);
    give_up_round(&of, 1);
    run_round(&of, 0, 2);
    run_round(&of, 0, -1);
    close_team(&of);
    test_bad_input(group, simulated);
    test_formats(group);
    test_rows(group);
    test_encoded(group);
    test_aligned(group);
    test_options(group);
    test_silu(group);
    test_graph(group, simulated);
    test_modes(group);
    test_together(group);
    test_plan(group);
    test_pointers_of_device(group, simulated);
    if (simulated) test_kernels();
    if (simulated && given.ranks > 1) test_lost_rank(group);
    OK(ferry_group_close(&group));
    HOLDS(group == NULL);
    printf("rank %u of %u, %s: rounds, faults, options, refusals are right\n", given.gather.rank, given.ranks,
           given.group);
    return 0;
}
