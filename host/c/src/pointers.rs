//! Where a rank's memory lies on its device, for whoever looks from outside.

use ferry::device::DevicePointers;

use crate::communicator::{ferry_communicator, look_at};
use crate::status::{ferry_status, guard};
use crate::structs::{sized, write};

/// Device addresses of what a rank's kernels work in: to look at, in a debugger or a tool that
/// copies device memory. Nothing of it may be written. What stands there changes while kernels of
/// this rank or of a peer run. The addresses are good until the communicator is closed or dropped.
/// `ranks` and `local_experts` are those of the plan; with skip_a2a `ranks` is 1 here.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ferry_device_pointers {
    /// sizeof(ferry_device_pointers).
    pub size: usize,
    /// [max_tokens_per_rank] rows that are sent to other nodes; 0 where all ranks are on one node,
    /// as rows go straight into the peers' windows then.
    pub dispatch_send: u64,
    /// [ranks, max_tokens_per_rank] rows that came, by source. Rows of small batches come in other
    /// places.
    pub dispatch_receive: u64,
    /// [ranks, local_experts + 1] words of 8 bytes, by source: how many assignments it sends to
    /// each local expert, and last how many tokens it has. The low half of a word is the number,
    /// the high half that of the round, the first one 1.
    pub dispatch_counts: u64,
    /// Rows that are sent to other nodes: in reduced mode [ranks, max_tokens_per_rank], by target,
    /// in exact mode [max_rows] without the shared expert's. 0 where all ranks are on one node.
    pub combine_send: u64,
    /// [max_tokens_per_rank, combine_slots] rows that came. Rows of small batches come in other
    /// places.
    pub combine_receive: u64,
    /// [combine_items, combine_slots] words of 8 bytes: the round in which a part of a row came.
    pub combine_flags: u64,
    /// What the kernels of this rank count for each other: [counter_count] words of 8 bytes.
    pub counters: u64,
    /// Counters.
    pub counter_count: u64,
    /// Bytes from one counter to the next.
    pub counter_stride: u64,
    /// Bytes of a row of a dispatch.
    pub dispatch_row_bytes: u64,
    /// Bytes from one to the next.
    pub dispatch_row_stride: u64,
    /// Bytes of a row of a combine.
    pub combine_row_bytes: u64,
    /// Bytes from one to the next.
    pub combine_row_stride: u64,
    /// Rows of a combine that one token can get.
    pub combine_slots: u64,
    /// Parts of rows of a combine that a rank can get in one slot.
    pub combine_items: u64,
}
sized!(ferry_device_pointers, 128);

/// Bytes that a row's stride is a multiple of.
const ROW_ALIGNMENT: u64 = 128;

/// Fills `pointers`, whose size is set. Reads no device memory. Not collective. Does not
/// synchronise.
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
                let combine_row_bytes = u64::from(shape.combine_row_bytes());
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
