// Sizes and offsets of the structs that callers fill. An offset never changes, because programs were compiled
// with it. A size grows if fields are appended; the first version's is frozen in host/c/src as well.
#include <ferry.h>

#define SIZE(type, bytes) _Static_assert(sizeof(type) == (bytes), "the size of " #type)
#define FIELD(type, field, at) \
    _Static_assert(offsetof(type, field) == (at), "the offset of " #type "." #field)

SIZE(ferry_capacity, 32);
FIELD(ferry_capacity, size, 0);
FIELD(ferry_capacity, rows, 8);
FIELD(ferry_capacity, scale_blocks, 16);
FIELD(ferry_capacity, wide_ids, 24);
FIELD(ferry_capacity, reserved, 28);

SIZE(ferry_tensor, 104);
FIELD(ferry_tensor, address, 0);
FIELD(ferry_tensor, bytes, 8);
FIELD(ferry_tensor, dims, 16);
FIELD(ferry_tensor, strides, 56);
FIELD(ferry_tensor, ndim, 96);
FIELD(ferry_tensor, type, 100);

SIZE(ferry_dispatch_output, 1464);
FIELD(ferry_dispatch_output, size, 0);
FIELD(ferry_dispatch_output, tokens, 8);
FIELD(ferry_dispatch_output, scales, 112);
FIELD(ferry_dispatch_output, scale_offsets, 216);
FIELD(ferry_dispatch_output, row_scales, 320);
FIELD(ferry_dispatch_output, row_offsets, 424);
FIELD(ferry_dispatch_output, expert_ids, 528);
FIELD(ferry_dispatch_output, src_info, 632);
FIELD(ferry_dispatch_output, ids, 736);
FIELD(ferry_dispatch_output, weights, 840);
FIELD(ferry_dispatch_output, source_counts, 944);
FIELD(ferry_dispatch_output, expert_counts, 1048);
FIELD(ferry_dispatch_output, row_ends, 1152);
FIELD(ferry_dispatch_output, m_indices, 1256);
FIELD(ferry_dispatch_output, source_ranges, 1360);

SIZE(ferry_combine_output, 216);
FIELD(ferry_combine_output, size, 0);
FIELD(ferry_combine_output, combined, 8);
FIELD(ferry_combine_output, weights, 112);

SIZE(ferry_view, 328);
FIELD(ferry_view, size, 0);
FIELD(ferry_view, tokens, 8);
FIELD(ferry_view, scales, 112);
FIELD(ferry_view, row_scales, 216);
FIELD(ferry_view, row_stride, 320);

SIZE(ferry_call, 48);
FIELD(ferry_call, size, 0);
FIELD(ferry_call, kind, 8);
FIELD(ferry_call, reserved, 12);
FIELD(ferry_call, dispatch_input, 16);
FIELD(ferry_call, dispatch_output, 24);
FIELD(ferry_call, combine_input, 32);
FIELD(ferry_call, combine_output, 40);

SIZE(ferry_received_counts, 64);
FIELD(ferry_received_counts, size, 0);
FIELD(ferry_received_counts, source_counts, 8);
FIELD(ferry_received_counts, expert_counts, 16);
FIELD(ferry_received_counts, sources, 24);
FIELD(ferry_received_counts, experts, 32);
FIELD(ferry_received_counts, rows, 40);
FIELD(ferry_received_counts, scale_blocks, 48);
FIELD(ferry_received_counts, is_here, 56);
FIELD(ferry_received_counts, reserved, 60);

SIZE(ferry_fault, 64);
FIELD(ferry_fault, size, 0);
FIELD(ferry_fault, index, 8);
FIELD(ferry_fault, wanted, 16);
FIELD(ferry_fault, saw, 24);
FIELD(ferry_fault, epoch, 32);
FIELD(ferry_fault, kind, 40);
FIELD(ferry_fault, kernel, 44);
FIELD(ferry_fault, rank, 48);
FIELD(ferry_fault, peer, 52);
FIELD(ferry_fault, culprit, 56);
FIELD(ferry_fault, region, 60);

SIZE(ferry_simulator, 32);
FIELD(ferry_simulator, size, 0);
FIELD(ferry_simulator, seed, 8);
FIELD(ferry_simulator, patience_ns, 16);
FIELD(ferry_simulator, ranks, 24);
FIELD(ferry_simulator, reserved, 28);

SIZE(ferry_bootstrap, 64);
FIELD(ferry_bootstrap, size, 0);
FIELD(ferry_bootstrap, rank, 8);
FIELD(ferry_bootstrap, ranks, 12);
FIELD(ferry_bootstrap, address, 16);
FIELD(ferry_bootstrap, timeout_ns, 24);
FIELD(ferry_bootstrap, all_gather, 32);
FIELD(ferry_bootstrap, context, 40);
FIELD(ferry_bootstrap, key, 48);
FIELD(ferry_bootstrap, key_bytes, 56);

SIZE(ferry_config, 120);
FIELD(ferry_config, size, 0);
FIELD(ferry_config, experts, 8);
FIELD(ferry_config, top_k, 16);
FIELD(ferry_config, hidden, 24);
FIELD(ferry_config, max_tokens_per_rank, 32);
FIELD(ferry_config, p2p_world_size, 40);
FIELD(ferry_config, deadline_ns, 48);
FIELD(ferry_config, format, 56);
FIELD(ferry_config, combine, 60);
FIELD(ferry_config, max_sms, 64);
FIELD(ferry_config, shared_expert, 68);
FIELD(ferry_config, debug_checks, 72);
FIELD(ferry_config, skip_a2a, 76);
FIELD(ferry_config, specialise, 80);
FIELD(ferry_config, options, 84);
FIELD(ferry_config, receive, 88);
FIELD(ferry_config, transposed_scales, 92);
FIELD(ferry_config, clear_absent, 96);
FIELD(ferry_config, combine_weights, 100);
FIELD(ferry_config, expert_alignment, 104);
FIELD(ferry_config, clear_padding, 108);
FIELD(ferry_config, row_sources, 112);
FIELD(ferry_config, m_indices, 116);

SIZE(ferry_plan_info, 104);
FIELD(ferry_plan_info, size, 0);
FIELD(ferry_plan_info, ranks, 8);
FIELD(ferry_plan_info, local_experts, 16);
FIELD(ferry_plan_info, groups, 24);
FIELD(ferry_plan_info, max_rows, 32);
FIELD(ferry_plan_info, max_scale_blocks, 40);
FIELD(ferry_plan_info, window_bytes, 48);
FIELD(ferry_plan_info, workspace_bytes, 56);
FIELD(ferry_plan_info, max_rows_distinct, 64);
FIELD(ferry_plan_info, max_scale_blocks_distinct, 72);
FIELD(ferry_plan_info, max_sms, 80);
FIELD(ferry_plan_info, view_row_stride, 88);
FIELD(ferry_plan_info, row_alignment, 96);

SIZE(ferry_dispatch_input, 632);
FIELD(ferry_dispatch_input, size, 0);
FIELD(ferry_dispatch_input, x, 8);
FIELD(ferry_dispatch_input, topk_ids, 112);
FIELD(ferry_dispatch_input, topk_weights, 216);
FIELD(ferry_dispatch_input, input_scale, 320);
FIELD(ferry_dispatch_input, tokens_on_device, 424);
FIELD(ferry_dispatch_input, x_scales, 528);

SIZE(ferry_combine_input, 1048);
FIELD(ferry_combine_input, size, 0);
FIELD(ferry_combine_input, expert_rows, 8);
FIELD(ferry_combine_input, topk_weights, 112);
FIELD(ferry_combine_input, row_weights, 216);
FIELD(ferry_combine_input, row_scales, 320);
FIELD(ferry_combine_input, bias_0, 424);
FIELD(ferry_combine_input, bias_1, 528);
FIELD(ferry_combine_input, residual, 632);
FIELD(ferry_combine_input, initial_0, 736);
FIELD(ferry_combine_input, initial_1, 840);
FIELD(ferry_combine_input, received_weights, 944);

SIZE(ferry_silu, 656);
FIELD(ferry_silu, size, 0);
FIELD(ferry_silu, input, 8);
FIELD(ferry_silu, row_offsets, 112);
FIELD(ferry_silu, input_scales, 216);
FIELD(ferry_silu, output, 320);
FIELD(ferry_silu, scales, 424);
FIELD(ferry_silu, scale_offsets, 528);
FIELD(ferry_silu, format, 632);
FIELD(ferry_silu, activation, 636);
FIELD(ferry_silu, alpha, 640);
FIELD(ferry_silu, limit, 644);
FIELD(ferry_silu, interleaved, 648);
FIELD(ferry_silu, max_sms, 652);

SIZE(ferry_device_pointers, 128);
FIELD(ferry_device_pointers, size, 0);
FIELD(ferry_device_pointers, dispatch_send, 8);
FIELD(ferry_device_pointers, dispatch_receive, 16);
FIELD(ferry_device_pointers, dispatch_counts, 24);
FIELD(ferry_device_pointers, combine_send, 32);
FIELD(ferry_device_pointers, combine_receive, 40);
FIELD(ferry_device_pointers, combine_flags, 48);
FIELD(ferry_device_pointers, counters, 56);
FIELD(ferry_device_pointers, counter_count, 64);
FIELD(ferry_device_pointers, counter_stride, 72);
FIELD(ferry_device_pointers, dispatch_row_bytes, 80);
FIELD(ferry_device_pointers, dispatch_row_stride, 88);
FIELD(ferry_device_pointers, combine_row_bytes, 96);
FIELD(ferry_device_pointers, combine_row_stride, 104);
FIELD(ferry_device_pointers, combine_slots, 112);
FIELD(ferry_device_pointers, combine_items, 120);

SIZE(ferry_group_options, 24);
FIELD(ferry_group_options, size, 0);
FIELD(ferry_group_options, kernels, 8);
FIELD(ferry_group_options, share_gpus, 16);
FIELD(ferry_group_options, check_links, 20);
