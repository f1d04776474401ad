//! Addresses of a rank's device memory, for debuggers and other tools.

use ferry::device::DevicePointers;

use crate::communicator::{ferry_communicator, look_at};
use crate::status::{ferry_status, guard};
use crate::structs::{sized, write};

/// Device addresses of the working memory of a rank's kernels, for a debugger or a tool that copies device
/// memory. Read-only. The contents change while kernels of this rank or of a peer run. The addresses are
/// valid until the communicator is closed or dropped. In the shapes of the fields, ranks and local_experts
/// are those of the plan; with skip_a2a, ranks is 1.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ferry_device_pointers {
    /// sizeof(ferry_device_pointers).
    pub size: usize,
    /// [max_tokens_per_rank] rows to be sent to other nodes. 0 if all ranks are on one node, where rows go
    /// straight into the peers' windows.
    pub dispatch_send: u64,
    /// [ranks, max_tokens_per_rank] received rows, by source. Rows of small batches arrive elsewhere.
    pub dispatch_receive: u64,
    /// [ranks, local_experts + 1] words of 8 bytes, by source: number of assignments to each local expert,
    /// then number of tokens. The low half of a word is the number, the high half the round, from 1.
    pub dispatch_counts: u64,
    /// Rows to be sent to other nodes: [ranks, max_tokens_per_rank] in reduced mode, by target; [max_rows]
    /// less the shared expert's rows in exact mode. 0 if all ranks are on one node.
    pub combine_send: u64,
    /// [max_tokens_per_rank, combine_slots] received rows. Rows of small batches arrive elsewhere.
    pub combine_receive: u64,
    /// [combine_items, combine_slots] words of 8 bytes: the round in which a part of a row arrived.
    pub combine_flags: u64,
    /// [counter_count] words of 8 bytes: counters shared by this rank's kernels.
    pub counters: u64,
    /// Number of counters.
    pub counter_count: u64,
    /// Bytes from one counter to the next.
    pub counter_stride: u64,
    /// Bytes of a row of a dispatch.
    pub dispatch_row_bytes: u64,
    /// Bytes from one row of a dispatch to the next.
    pub dispatch_row_stride: u64,
    /// Bytes of a row of a combine.
    pub combine_row_bytes: u64,
    /// Bytes from one row of a combine to the next.
    pub combine_row_stride: u64,
    /// Most rows that one token can receive in a combine.
    pub combine_slots: u64,
    /// Most parts of rows that a rank can receive in one slot of a combine.
    pub combine_items: u64,
}
sized!(ferry_device_pointers, 128);

/// Alignment of a row's stride, in bytes.
const ROW_ALIGNMENT: u64 = 128;

/// Fills `pointers`, whose size is set. Does not read device memory. Not collective. Does not synchronise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_communicator_device_pointers(
    communicator: *const ferry_communicator,
    pointers: *mut ferry_device_pointers,
) -> ferry_status {
    guard("ferry_communicator_device_pointers", || {
        // SAFETY: the rules of handles and pointers.
        unsafe {
            look_at(communicator, |rank| {
                let shape = rank.plan().shape();
                let DevicePointers {
                    table: [dispatch, combine],
                    counters,
                    ..
                } = rank.device_pointers();
                let dispatch_row_bytes = u64::from(shape.dispatch_row_bytes());
                let combine_row_bytes = u64::from(
                    match rank.plan().config().receive.fields().combine_weights {
                        true => shape.weighted_combine_row_bytes(),
                        false => shape.combine_row_bytes(),
                    },
                );
                let found = ferry_device_pointers {
                    size: 0,
                    dispatch_send: dispatch[0],
                    dispatch_receive: dispatch[1],
                    dispatch_counts: dispatch[2],
                    combine_send: combine[0],
                    combine_receive: combine[1],
                    combine_flags: combine[2],
                    counters,
                    counter_count: DevicePointers::COUNTERS,
                    counter_stride: DevicePointers::COUNTER_STRIDE,
                    dispatch_row_bytes,
                    dispatch_row_stride: dispatch_row_bytes.next_multiple_of(ROW_ALIGNMENT),
                    combine_row_bytes,
                    combine_row_stride: combine_row_bytes.next_multiple_of(ROW_ALIGNMENT),
                    combine_slots: shape.combine_slots().into(),
                    combine_items: shape.max_items(),
                };
                write(pointers, "pointers", found)
            })
        }
    })
}
