// Mistakes of callers: each has a status and a text, nothing is launched, and rounds go on.
#include "support.h"

static void test_pointers(team *of, ferry_group *group) {
    rank_state *rank = &of->local[0];
    ferry_dispatch_input input = FERRY_DISPATCH_INPUT_INIT;
    ferry_dispatch_output output = FERRY_DISPATCH_OUTPUT_INIT;
    ferry_group *no_group = NULL;
    ferry_plan *plan = NULL;
    ferry_config config = small_config();
    uint32_t ranks;
    EXPECT(FERRY_NULL, ferry_dispatch(NULL, rank->stream, &input, &output));
    EXPECT(FERRY_NULL, ferry_dispatch(rank->communicator, rank->stream, NULL, &output));
    EXPECT(FERRY_NULL, ferry_group_ranks(group, NULL));
    EXPECT(FERRY_NULL, ferry_plan_new(group, &config, NULL));
    EXPECT(FERRY_NULL, ferry_plan_new(group, NULL, &plan));
    EXPECT(FERRY_NULL, ferry_plan_free(&plan));
    EXPECT(FERRY_NULL, ferry_group_close(&no_group));
    EXPECT(FERRY_NULL, ferry_group_close(NULL));
    EXPECT(FERRY_BAD_HANDLE, ferry_group_ranks((const ferry_group *)(const void *)of->plan, &ranks));
    ferry_communicator *wrong = (ferry_communicator *)(void *)rank->device;
    EXPECT(FERRY_BAD_HANDLE, ferry_dispatch(wrong, rank->stream, &input, &output));
    EXPECT(FERRY_NULL, ferry_device_upload(rank->device, 16, NULL, 4));
    EXPECT(FERRY_INVALID_ARGUMENT, ferry_device_upload(rank->device, 0, &ranks, 4));
}

// Invalid sizes of a struct, and a struct of a later version.
static void test_sizes(ferry_group *group) {
    struct {
        ferry_config known;
        uint64_t later;
    } longer = {FERRY_CONFIG_INIT, 0};
    ferry_plan *plan = NULL;
    longer.known = small_config();
    longer.known.size = 0;
    EXPECT(FERRY_STRUCT_SIZE, ferry_plan_new(group, &longer.known, &plan));
    // The first version ends with options.
    longer.known.size = offsetof(ferry_config, receive) - 8;
    EXPECT(FERRY_STRUCT_SIZE, ferry_plan_new(group, &longer.known, &plan));
    HOLDS(strstr(ferry_last_error(), "config->size") != NULL);
    longer.known.size = offsetof(ferry_config, receive);
    longer.known.receive = 77;
    OK(ferry_plan_new(group, &longer.known, &plan));
    OK(ferry_plan_free(&plan));
    longer.known.receive = FERRY_RECEIVE_BY_EXPERT;
    longer.known.size = (size_t)-1;
    EXPECT(FERRY_STRUCT_SIZE, ferry_plan_new(group, &longer.known, &plan));
    longer.known.size = sizeof longer;
    longer.later = 1;
    EXPECT(FERRY_STRUCT_SIZE, ferry_plan_new(group, &longer.known, &plan));
    HOLDS(plan == NULL);
    longer.later = 0;
    OK(ferry_plan_new(group, &longer.known, &plan));
    OK(ferry_plan_free(&plan));
}

static void test_values(ferry_group *group) {
    ferry_plan *plan = NULL;
    ferry_config config = small_config();
    config.format = 10;
    EXPECT(FERRY_INVALID_ARGUMENT, ferry_plan_new(group, &config, &plan));
    HOLDS(strstr(ferry_last_error(), "config->format is 10") != NULL);
    config = small_config();
    config.combine = 2;
    EXPECT(FERRY_INVALID_ARGUMENT, ferry_plan_new(group, &config, &plan));
    config = small_config();
    config.shared_expert = 2;
    EXPECT(FERRY_INVALID_ARGUMENT, ferry_plan_new(group, &config, &plan));
    config = small_config();
    config.top_k = 0;
    config.hidden = 7;
    EXPECT(FERRY_INVALID_CONFIG, ferry_plan_new(group, &config, &plan));
    HOLDS(strstr(ferry_last_error(), "top_k") != NULL && strstr(ferry_last_error(), "hidden") != NULL);
}

// Invalid tensors. Each is refused, and no round begins.
static void test_tensors(team *of) {
    rank_state *rank = &of->local[0];
    round_input made = make_input(rank, -1);
    ferry_dispatch_buffers *buffers = NULL;
    ferry_dispatch_output output = FERRY_DISPATCH_OUTPUT_INIT, wrong;
    ferry_dispatch_input input = made.input;
    uint32_t round = 77;
    OK(ferry_dispatch_buffers_new(rank->device, of->plan, NULL, &buffers));
    OK(ferry_dispatch_buffers_output(buffers, &output));
    input.x.dims[0] = TOKENS + 1;
    EXPECT(FERRY_INVALID_ARGUMENT, ferry_dispatch(rank->communicator, rank->stream, &input, &output));
    input = made.input;
    input.x.ndim = 3;
    EXPECT(FERRY_INVALID_TENSOR, ferry_dispatch(rank->communicator, rank->stream, &input, &output));
    input = made.input;
    input.x.type = 99;
    EXPECT(FERRY_INVALID_ARGUMENT, ferry_dispatch(rank->communicator, rank->stream, &input, &output));
    input = made.input;
    input.x.type = FERRY_F16;
    EXPECT(FERRY_INVALID_TENSOR, ferry_dispatch(rank->communicator, rank->stream, &input, &output));
    input = made.input;
    input.x.address = 0;
    EXPECT(FERRY_INVALID_TENSOR, ferry_dispatch(rank->communicator, rank->stream, &input, &output));
    input = made.input;
    input.topk_ids.bytes = 4;
    EXPECT(FERRY_INVALID_TENSOR, ferry_dispatch(rank->communicator, rank->stream, &input, &output));
    HOLDS(strstr(ferry_last_error(), "topk_ids") != NULL);
    wrong = output;
    wrong.scales = output.tokens;
    EXPECT(FERRY_INVALID_ARGUMENT, ferry_dispatch(rank->communicator, rank->stream, &made.input, &wrong));
    wrong = output;
    memset(&wrong.src_info, 0, sizeof wrong.src_info);
    EXPECT(FERRY_INVALID_TENSOR, ferry_dispatch(rank->communicator, rank->stream, &made.input, &wrong));
    OK(ferry_communicator_round(rank->communicator, &round));
    HOLDS(round == FERRY_ROUND_IDLE);
    OK(ferry_dispatch_buffers_free(&buffers));
    release_memory(rank, made.memory, 3);
}


static int never_gather(void *context, const void *mine, size_t bytes, void *all) {
    (void)context, (void)mine, (void)bytes, (void)all;
    return 1;
}

// Keys that are empty or unused.
static void test_keys(void) {
    int built = strstr(ferry_features(), "cuda") != NULL;
    ferry_status refused = built ? FERRY_INVALID_ARGUMENT : FERRY_NOT_BUILT;
    ferry_group *group = NULL;
    ferry_bootstrap bootstrap = FERRY_BOOTSTRAP_INIT;
    bootstrap.ranks = 1;
    bootstrap.address = "127.0.0.1:0";
    bootstrap.key = "key";
    EXPECT(refused, ferry_group_node(&bootstrap, 0, &group));
    if (built) HOLDS(strstr(ferry_last_error(), "bootstrap->key_bytes is 0") != NULL);
    bootstrap.key = NULL;
    bootstrap.key_bytes = 3;
    EXPECT(built ? FERRY_NULL : FERRY_NOT_BUILT, ferry_group_node(&bootstrap, 0, &group));
    bootstrap.key = "key";
    bootstrap.address = NULL;
    bootstrap.all_gather = never_gather;
    EXPECT(refused, ferry_group_node(&bootstrap, 0, &group));
    if (built) HOLDS(strstr(ferry_last_error(), "bootstrap->key needs bootstrap->address") != NULL);
    HOLDS(group == NULL);
}

// Groups that this build or this machine cannot make.
static void test_groups(void) {
    ferry_group *group = NULL;
    ferry_simulator nobody = FERRY_SIMULATOR_INIT;
    ferry_bootstrap bootstrap = FERRY_BOOTSTRAP_INIT;
    int32_t device = -1;
    EXPECT(FERRY_INVALID_ARGUMENT, ferry_group_simulated(&nobody, &group));
    nobody.ranks = UINT32_MAX;
    EXPECT(FERRY_INVALID_ARGUMENT, ferry_group_simulated(&nobody, &group));
    nobody.ranks = 2;
    nobody.reserved = 7;
    EXPECT(FERRY_INVALID_ARGUMENT, ferry_group_simulated(&nobody, &group));
    EXPECT(FERRY_INVALID_ARGUMENT, ferry_group_local(&device, 1, &group));
    bootstrap.ranks = 1;
    if (strstr(ferry_features(), "cuda") == NULL) {
        device = 0;
        EXPECT(FERRY_NOT_BUILT, ferry_group_local(&device, 1, &group));
        EXPECT(FERRY_NOT_BUILT, ferry_group_node(&bootstrap, 0, &group));
        HOLDS(strstr(ferry_last_error(), "without the feature cuda") != NULL);
    } else {
        EXPECT(FERRY_INVALID_ARGUMENT, ferry_group_node(&bootstrap, 0, &group));
    }
    if (strstr(ferry_features(), "nvshmem") == NULL)
        EXPECT(FERRY_NOT_BUILT, ferry_group_nvshmem(&bootstrap, 0, NULL, &group));
    HOLDS(group == NULL);
}

void test_bad_input(ferry_group *group, int simulated) {
    ferry_config config = small_config();
    team of = make_team(group, &config);
    HOLDS(strncmp(ferry_status_string(FERRY_BUSY), "FERRY_BUSY", 10) == 0);
    HOLDS(strcmp(ferry_status_string(1234), "not a ferry_status") == 0);
    test_pointers(&of, group);
    test_sizes(group);
    test_values(group);
    test_tensors(&of);
    REFUSED(FERRY_IN_USE, "the group cannot be closed", ferry_group_close(&group));
    HOLDS(group != NULL);
    if (simulated) {
        test_groups();
        test_keys();
    }
    close_team(&of);
}
