//! Fingerprint of the layout that host and kernels must agree on.

use core::mem::offset_of;

use crate::launch::args::{
    CombineArgs, Common, DispatchArgs, DispatchCountsArgs, GiveUpArgs, PROTOCOL_VERSION, SiluArgs,
};
use crate::launch::encoded::EncodedInput;
use crate::launch::epilogue::Steps;
use crate::launch::group_tables::GroupTables;
use crate::launch::links::{LinkRecord, LinksArgs};
use crate::launch::options::{
    CombineOptions, CombineWith, DispatchOptions, DispatchWith, ReceivedRows, ReturnedRows,
};
use crate::memory::dispatch_row::DispatchRow;
use crate::memory::window::Window;
use crate::memory::workspace::Workspace;
use crate::plan::limits::{PIPELINE_BYTES, PIPELINE_STAGES, SMALL_BLOCK_TOKENS};
use crate::plan::shape::Shape;
use crate::round::fault::FaultPage;
use crate::round::host_counts::HostCounts;
use crate::round::kernel::Kernel;

/// The sizes of structs and the offsets of their fields: swapping two fields of one size counts, too. A field
/// that is not listed is a compile error.
macro_rules! places {
    ($($name:ident { $($field:ident),* })*) => {{
        $(const _: fn($name) = |$name { $($field: _),* }| ();)*
        [$(size_of::<$name>(), $(offset_of!($name, $field)),*),*]
    }};
}

/// Arguments of a combine with an empty epilogue: the part that all combines share.
type CombineWithAny = CombineWith<()>;

/// Fingerprint of the memory layout, by which kernels and host detect that they were built from different
/// ones: the protocol's version, all arguments field by field, and everything that follows from some shapes.
/// Kernels carry the number as the variable [`FINGERPRINT_VARIABLE`] of their PTX. FNV-1a, as
/// [`Common::fingerprint`].
pub const LAYOUT_FINGERPRINT: u64 = {
    let numbers = [
        PROTOCOL_VERSION as usize,
        // Numbers of a launch that the host sets and kernels rely on.
        PIPELINE_BYTES as usize,
        PIPELINE_STAGES as usize,
        SMALL_BLOCK_TOKENS as usize,
        Kernel::Dispatch.threads_per_block() as usize,
        Kernel::Combine.threads_per_block() as usize,
        Kernel::FusedSilu.threads_per_block() as usize,
        HostCounts::START as usize,
    ];
    // Fields of the structs that follow from a shape are covered by `SHAPES` below.
    let places = places! {
        Common {
            peers, workspace, rank, debug_checks, tokens, deadline_ns, fault_page, own_window,
            shape, window, tables, row
        }
        Shape {
            ranks, p2p_world_size, experts, top_k, hidden, max_tokens_per_rank, combine_mode,
            token_format
        }
        DispatchArgs {
            x, topk_ids, topk_weights, common, output_tokens, output_scales, row_offsets,
            expert_ids, src_info, row_capacity, x_stride, scales_offsets, block_capacity,
            row_scales, input_scale
        }
        CombineArgs { expert_rows, combined, topk_weights, common, row_capacity }
        GiveUpArgs { layout, is_local, reserved, common }
        DispatchCountsArgs { ticket, keeps_rows, tokens_on_device, common }
        LinksArgs { test, peer, flags_before, common, repeats, salt, wait_ns }
        LinkRecord { sent, received, begun, ended, reserved }
        DispatchOptions {
            tokens_on_device, shared_of, shared_index, first_expert, all_experts, wide_ids, reserved,
            rows, encoded, groups
        }
        GroupTables {
            counts, ends, weights, m_indices, ranges, clears_padding, block, scale_row, scale_stride,
            scale_block, reserved
        }
        CombineOptions {
            row_weights, shared_of, shared_index, tokens_on_device, output, has_epilogue, reserved,
            rows
        }
        ReceivedRows {
            ids, weights, of_source, of_expert, is_on, layout, clears_absent, transposes_scales
        }
        EncodedInput { scales, row_stride, word_stride, all_ones, is_packed }
        ReturnedRows { initial, second_initial, weights, combined_weights, is_on, layout }
        DispatchWith { args, options }
        CombineWithAny { args, options, epilogue }
        Steps { row_scales, biases, residual, hidden }
        SiluArgs {
            input, row_offsets, output, scales, scales_offsets, input_scales, row_capacity,
            scale_words, experts, columns, format, interleaved, clamped, alpha, limit, reserved
        }
        FaultPage {
            begun, kind, kernel, rank, peer, culprit, region, index, wanted, saw, epoch, complete,
            acknowledged
        }
    };
    let mut hash = with_numbers(0xcbf2_9ce4_8422_2325, &numbers);
    hash = with_numbers(hash, &places);
    let mut index = 0;
    while index < SHAPES.len() {
        let common: [u8; size_of::<Common>()] = bytemuck::must_cast(common(SHAPES[index]));
        hash = with_bytes(hash, &common);
        index += 1;
    }
    hash
};

/// Variable of a PTX that holds [`LAYOUT_FINGERPRINT`].
pub const FINGERPRINT_VARIABLE: &str = "ferry_layout_fingerprint";

/// Shapes whose layout counts: one node and several, few tokens and many, both modes of combine, every
/// format.
const SHAPES: [Shape; 11] = [
    shape(8, 128, 0),
    shape(8, 4096, 1),
    shape(8, 128, 2),
    shape(8, 128, 3),
    shape(8, 128, 4),
    shape(8, 128, 5),
    shape(8, 128, 6),
    shape(8, 128, 7),
    shape(8, 128, 8),
    shape(8, 128, 9),
    Shape {
        p2p_world_size: 4,
        combine_mode: 1,
        ..shape(16, 512, 2)
    },
];

const fn shape(ranks: u32, max_tokens_per_rank: u32, token_format: u32) -> Shape {
    Shape {
        ranks,
        p2p_world_size: ranks,
        experts: 256,
        top_k: 8,
        hidden: 7168,
        max_tokens_per_rank,
        combine_mode: 0,
        token_format,
    }
}

/// Arguments that follow from a shape; all others are zero.
const fn common(shape: Shape) -> Common {
    Common {
        peers: 0,
        workspace: 0,
        rank: 0,
        debug_checks: 0,
        tokens: 0,
        deadline_ns: 0,
        fault_page: 0,
        own_window: 0,
        shape,
        window: Window::of(&shape),
        tables: Workspace::of(&shape),
        row: DispatchRow::of(&shape),
    }
}

const fn with_numbers(mut hash: u64, numbers: &[usize]) -> u64 {
    let mut index = 0;
    while index < numbers.len() {
        hash = with_bytes(hash, &(numbers[index] as u64).to_le_bytes());
        index += 1;
    }
    hash
}

const fn with_bytes(mut hash: u64, bytes: &[u8]) -> u64 {
    let mut index = 0;
    while index < bytes.len() {
        hash = (hash ^ bytes[index] as u64).wrapping_mul(0x0000_0100_0000_01b3);
        index += 1;
    }
    hash
}

#[cfg(test)]
mod tests {
    use core::mem::offset_of;

    #[test]
    fn two_fields_of_one_size_that_change_places_count() {
        #[repr(C)]
        struct Before {
            first: u32,
            second: u32,
        }
        #[repr(C)]
        struct After {
            second: u32,
            first: u32,
        }
        let before = places! { Before { first, second } };
        assert_eq!(before, [8, 0, 4]);
        assert_eq!(places! { After { first, second } }, [8, 4, 0]);
    }
}
