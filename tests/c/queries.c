// What plans say of themselves.
#include "support.h"

static uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }

// Most blocks of 128 rows that so many rows of so many groups can take.
static uint64_t blocks_of(uint64_t rows, uint64_t groups) {
    uint64_t begun = least(rows, groups);
    return begun + (rows - begun) / 128;
}

// Rows of tokens that name no expert twice. With 4 of 8 experts they are fewer from 4 ranks on.
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
        OK(ferry_group_ranks(group, &ranks));
        OK(ferry_plan_new(group, &config, &plan));
        OK(ferry_plan_query(plan, &info));
        uint64_t local = EXPERTS / ranks, own = shared ? MANY : 0;
        uint64_t tokens = (uint64_t)ranks * MANY, all = tokens * NAMED, distinct = tokens * least(NAMED, local);
        HOLDS(info.ranks == ranks && info.local_experts == local && info.groups == local + shared);
        HOLDS(info.max_rows == all + own && info.max_rows_distinct == distinct + own);
        HOLDS(info.max_scale_blocks == blocks_of(all, local) + blocks_of(own, 1));
        HOLDS(info.max_scale_blocks_distinct == blocks_of(distinct, local) + blocks_of(own, 1));
        capacity.rows = info.max_rows_distinct;
        capacity.scale_blocks = info.max_scale_blocks_distinct;
        OK(ferry_plan_dispatch_layout(plan, &capacity, &output));
        HOLDS(output.tokens.dims[0] == info.max_rows_distinct);
        HOLDS(output.scales.dims[0] == info.max_scale_blocks_distinct);
        // A program that was compiled before there were the last fields.
        earlier.size = offsetof(ferry_plan_info, max_rows_distinct);
        earlier.max_rows_distinct = 7;
        OK(ferry_plan_query(plan, &earlier));
        HOLDS(earlier.max_rows == info.max_rows && earlier.max_rows_distinct == 7);
        OK(ferry_plan_free(&plan));
    }
}
