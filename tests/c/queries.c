// Queries of plans and communicators, and custom kernels.
#include "support.h"

static uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }

// Most blocks of 128 rows for so many rows in so many groups.
static uint64_t blocks_of(uint64_t rows, uint64_t groups) {
    uint64_t begun = least(rows, groups);
    return begun + (rows - begun) / 128;
}

// Rows of tokens that name no expert twice. With 4 of 8 experts and 4 ranks or more there are fewer.
void test_plan(ferry_group *group) {
    enum { MANY = 200, NAMED = 4 };
    ferry_config config = small_config();
    config.top_k = NAMED;
    config.max_tokens_per_rank = MANY;
    config.format = FERRY_FORMAT_MXFP8_TILED;
    for (uint32_t shared = 0; shared < 2; shared++) {
        ferry_plan *plan = NULL;
        ferry_plan_info info = FERRY_PLAN_INFO_INIT, earlier = FERRY_PLAN_INFO_INIT;
        ferry_capacity capacity = FERRY_CAPACITY_INIT;
        ferry_dispatch_output output = FERRY_DISPATCH_OUTPUT_INIT;
        uint32_t ranks;
        config.shared_expert = shared;
        config.max_sms = 5 * shared;
        OK(ferry_group_ranks(group, &ranks));
        OK(ferry_plan_new(group, &config, &plan));
        OK(ferry_plan_query(plan, &info));
        uint64_t local = EXPERTS / ranks, own = shared ? MANY : 0;
        uint64_t tokens = (uint64_t)ranks * MANY;
        uint64_t all = tokens * NAMED, distinct = tokens * least(NAMED, local);
        HOLDS(info.ranks == ranks && info.local_experts == local && info.groups == local + shared);
        HOLDS(info.max_sms == config.max_sms); // No GPU is shared.
        HOLDS(info.max_rows == all + own && info.max_rows_distinct == distinct + own);
        HOLDS(info.max_scale_blocks == blocks_of(all, local) + blocks_of(own, 1));
        HOLDS(info.max_scale_blocks_distinct == blocks_of(distinct, local) + blocks_of(own, 1));
        capacity.rows = info.max_rows_distinct;
        capacity.scale_blocks = info.max_scale_blocks_distinct;
        OK(ferry_plan_dispatch_layout(plan, &capacity, &output));
        HOLDS(output.tokens.dims[0] == info.max_rows_distinct);
        HOLDS(output.scales.dims[0] == info.max_scale_blocks_distinct);
        // A program compiled before the last fields were added.
        earlier.size = offsetof(ferry_plan_info, max_rows_distinct);
        earlier.max_rows_distinct = 7;
        OK(ferry_plan_query(plan, &earlier));
        HOLDS(earlier.max_rows == info.max_rows && earlier.max_rows_distinct == 7);
        OK(ferry_plan_free(&plan));
    }
}

// Checks the device addresses and the sizes of rows. modes.c reads from the addresses.
static void compare_pointers(const team *of, const rank_state *rank, int spans_nodes) {
    ferry_device_pointers at = FERRY_DEVICE_POINTERS_INIT;
    ferry_plan_info info = FERRY_PLAN_INFO_INIT;
    OK(ferry_plan_query(of->plan, &info));
    OK(ferry_communicator_device_pointers(rank->communicator, &at));
    HOLDS((at.dispatch_send != 0) == spans_nodes && (at.combine_send != 0) == spans_nodes);
    HOLDS(at.dispatch_receive % 128 == 0 && at.combine_receive % 128 == 0);
    HOLDS(at.dispatch_row_bytes > 2 * HIDDEN && at.combine_row_bytes == 2 * HIDDEN);
    HOLDS(at.dispatch_row_stride >= at.dispatch_row_bytes && at.dispatch_row_stride % 128 == 0);
    HOLDS(at.combine_row_stride >= at.combine_row_bytes && at.combine_row_stride % 128 == 0);
    HOLDS(at.combine_slots == least(of->ranks, TOP_K) && at.combine_items >= TOKENS);
    HOLDS(at.counter_count > 0 && at.counter_stride % 8 == 0);
    HOLDS(at.counter_count * at.counter_stride <= info.workspace_bytes);
    uint64_t parts[5] = {
        at.dispatch_receive, at.dispatch_counts, at.combine_receive, at.combine_flags, at.counters,
    };
    uint64_t bytes[5] = {
        of->ranks * TOKENS * at.dispatch_row_stride,
        of->ranks * (info.local_experts + 1) * 8,
        TOKENS * at.combine_slots * at.combine_row_stride,
        at.combine_items * at.combine_slots * 8,
        at.counter_count * at.counter_stride,
    };
    for (int one = 0; one < 5; one++) {
        char *copy = (char *)malloc(bytes[one]);
        HOLDS(parts[one] != 0 && copy != NULL);
        OK(ferry_device_download(rank->device, copy, parts[one], bytes[one]));
        free(copy);
        for (int other = 0; other < 5; other++)
            HOLDS(one == other || parts[one] + bytes[one] <= parts[other] || parts[other] < parts[one]);
    }
}

void test_pointers_of_device(ferry_group *group, int simulated) {
    // All ranks on one node; in the simulator also each on its own.
    for (int spans_nodes = 0; spans_nodes <= simulated; spans_nodes++) {
        ferry_config config = small_config();
        ferry_device_pointers at = FERRY_DEVICE_POINTERS_INIT;
        config.p2p_world_size = (uint64_t)spans_nodes;
        team of = make_team(group, &config);
        for (size_t i = 0; i < of.count; i++)
            compare_pointers(&of, &of.local[i], spans_nodes && of.ranks > 1);
        EXPECT(FERRY_NULL, ferry_communicator_device_pointers(of.local[0].communicator, NULL));
        at.size = 8;
        EXPECT(FERRY_STRUCT_SIZE, ferry_communicator_device_pointers(of.local[0].communicator, &at));
        close_team(&of);
    }
}

// Invalid kernels and options. round.c loads valid kernels.
void test_kernels(void) {
    static const char program[] = "int main() {}", latin[] = "// caf\xe9";
    int built = strstr(ferry_features(), "cuda") != NULL;
    ferry_kernels *kernels = NULL;
    ferry_group *group = NULL;
    ferry_group_options options = FERRY_GROUP_OPTIONS_INIT;
    ferry_bootstrap bootstrap = FERRY_BOOTSTRAP_INIT;
    ferry_plan *no_kernels = NULL;
    int32_t device = 0, none = -1;
    ferry_status refused = built ? FERRY_INVALID_ARGUMENT : FERRY_NOT_BUILT;
    EXPECT(FERRY_NULL, ferry_kernels_from_ptx(program, sizeof program - 1, NULL));
    EXPECT(refused, ferry_kernels_from_ptx(program, sizeof program - 1, &kernels));
    if (built) HOLDS(strstr(ferry_last_error(), ".version") != NULL);
    EXPECT(refused, ferry_kernels_from_ptx(latin, sizeof latin - 1, &kernels));
    EXPECT(refused, ferry_kernels_from_ptx(NULL, 0, &kernels));
    if (built) EXPECT(FERRY_NULL, ferry_kernels_from_ptx(NULL, 7, &kernels));
    EXPECT(FERRY_NULL, ferry_kernels_free(&kernels));
    HOLDS(kernels == NULL);
    EXPECT(FERRY_INVALID_ARGUMENT, ferry_group_local_with(&none, 1, &options, &group));
    options.size = 8;
    EXPECT(FERRY_STRUCT_SIZE, ferry_group_local_with(&device, 1, &options, &group));
    EXPECT(FERRY_STRUCT_SIZE, ferry_group_node_with(&bootstrap, 0, &options, &group));
    EXPECT(FERRY_STRUCT_SIZE, ferry_group_nvshmem_with(&bootstrap, 0, NULL, &options, &group));
    options.size = sizeof options;
    options.share_gpus = 2;
    EXPECT(FERRY_INVALID_ARGUMENT, ferry_group_local_with(&device, 1, &options, &group));
    HOLDS(strstr(ferry_last_error(), "options->share_gpus is 2") != NULL);
    options.share_gpus = 1;
    options.check_links = 3;
    EXPECT(FERRY_INVALID_ARGUMENT, ferry_group_local_with(&device, 1, &options, &group));
    HOLDS(strstr(ferry_last_error(), "options->check_links is 3") != NULL);
    options.check_links = 0;
    options.kernels = (const ferry_kernels *)(const void *)&no_kernels;
    EXPECT(FERRY_BAD_HANDLE, ferry_group_local_with(&device, 1, &options, &group));
    HOLDS(strstr(ferry_last_error(), "options->kernels") != NULL && group == NULL);
}
