//! Counts of a dispatch on the host.

use std::ffi::c_void;

use crate::communicator::{ferry_communicator, look_at, with_rank};
use crate::device::stream_of;
use crate::status::{Failure, ferry_status, guard};
use crate::structs::{read, sized, write};

/// Numbers of the rows that a dispatch brings to a rank. Begin with FERRY_RECEIVED_COUNTS_INIT.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ferry_received_counts {
    /// sizeof(ferry_received_counts).
    pub size: usize,
    /// Filled with the rows of each source rank, unless NULL. By expert its assignments to this rank's
    /// experts, else its tokens that have one here.
    pub source_counts: *mut u32,
    /// Filled with the assignments to each local expert, unless NULL.
    pub expert_counts: *mut u32,
    /// Elements of source_counts, at least the group's ranks.
    pub sources: u64,
    /// Elements of expert_counts, at least the local experts.
    pub experts: u64,
    /// Written: rows that the outputs need, as in ferry_capacity, where 0 means max_rows: at least
    /// row_alignment, also if none come.
    pub rows: u64,
    /// Written: blocks of tiled scales that the outputs need.
    pub scale_blocks: u64,
    /// Written: 1 if the counts have come and everything here is written, else 0.
    pub is_here: u32,
    /// Zero.
    pub reserved: u32,
}
sized!(ferry_received_counts, 64);

/// Tells the host how many rows the open dispatch brings, before they are received: between
/// ferry_dispatch_async and ferry_dispatch_wait. ferry_received reads the counts. The kernel has one block,
/// and waits for the counts of all ranks' dispatches. Only enqueues. Not with skip_a2a, and not in a capture.
/// Not collective. Does not synchronise. On failure (FERRY_WRONG_ORDER unless ferry_dispatch_wait comes next,
/// or in a capture) nothing was enqueued.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_dispatch_counts(
    communicator: *mut ferry_communicator,
    stream: *mut c_void,
) -> ferry_status {
    guard("ferry_dispatch_counts", || {
        // SAFETY: the rules of handles and streams.
        unsafe {
            with_rank(communicator, |rank| {
                Ok(rank.dispatch_counts(stream_of(stream))?)
            })
        }
    })
}

/// Fills `counts` with what ferry_dispatch_counts was enqueued for last, once its kernel has written it;
/// until then only is_here, 0. FERRY_FAULT or FERRY_POISONED once this rank has given up, so that a loop
/// ends. FERRY_WRONG_ORDER if no counts were asked for, or after ferry_dispatch_wait. Not collective. Does
/// not synchronise, except in a simulated group, where it waits for the rank's kernels.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_received(
    communicator: *const ferry_communicator,
    counts: *mut ferry_received_counts,
) -> ferry_status {
    guard("ferry_received", || {
        // SAFETY: the rules of handles and pointers.
        unsafe {
            look_at(communicator, |rank| {
                let mut given = read(counts, "counts")?;
                given.is_here = 0;
                if let Some(found) = rank.received()? {
                    fill(
                        "source_counts",
                        given.source_counts,
                        given.sources,
                        &found.source_counts,
                    )?;
                    fill(
                        "expert_counts",
                        given.expert_counts,
                        given.experts,
                        &found.expert_counts,
                    )?;
                    let least = rank.plan().row_alignment().into();
                    given.rows = (found.capacity.rows as u64).max(least);
                    given.scale_blocks = found.capacity.scale_blocks as u64;
                    given.is_here = 1;
                }
                write(counts, "counts", given)
            })
        }
    })
}

/// Copies counts to the caller's array, if there is one.
///
/// # Safety
/// The rule of pointers: `to` is NULL or has `room` elements.
unsafe fn fill(name: &str, to: *mut u32, room: u64, counts: &[u32]) -> Result<(), Failure> {
    if to.is_null() {
        return Ok(());
    }
    if room < counts.len() as u64 {
        let text = format!(
            "counts->{name} has {room} elements, and needs {}",
            counts.len()
        );
        return Err(Failure::new(ferry_status::FERRY_INVALID_ARGUMENT, text));
    }
    // SAFETY: the rule of pointers; the array has as many elements, and is the caller's alone.
    unsafe { std::ptr::copy_nonoverlapping(counts.as_ptr(), to, counts.len()) };
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::ptr;
    use std::sync::RwLock;

    use ferry::{Capacity, Communicator, Config, DataType, DevicePtr, DispatchInput, Group, Plan};
    use ferry::{Stream, Tensor, TokenFormat};

    use super::*;
    use crate::handle::put;
    use crate::plan::ferry_capacity;

    /// An idle rank must not allocate the most that could ever come.
    #[test]
    fn rows_that_do_not_come_are_no_capacity_of_all() {
        let group = Group::simulated(1, 1).unwrap();
        let config = Config {
            format: TokenFormat::BlockwiseFp8,
            ..Config::new(4, 2, 128, 1000)
        };
        let plan = Plan::new(&group, config).unwrap();
        let mut rank = Communicator::new(&group, &plan).unwrap().remove(0);
        let none =
            |data_type, columns| Tensor::contiguous(DevicePtr::NULL, data_type, [0, columns]);
        let input = DispatchInput::new(none(DataType::Bf16, 128), none(DataType::I32, 2));
        rank.dispatch_async(Stream::DEFAULT, &input).unwrap();
        rank.dispatch_counts(Stream::DEFAULT).unwrap();
        let mut handle = ptr::null_mut();
        // SAFETY: `handle` lives.
        unsafe { put(&mut handle, RwLock::new(Some(rank))) };
        let mut counts = ferry_received_counts {
            size: size_of::<ferry_received_counts>(),
            source_counts: ptr::null_mut(),
            expert_counts: ptr::null_mut(),
            sources: 0,
            experts: 0,
            rows: 0,
            scale_blocks: 0,
            is_here: 0,
            reserved: 0,
        };
        // SAFETY: the handle lives, and so does `counts`.
        let status = unsafe { ferry_received(handle, &mut counts) };
        assert_eq!((status, counts.is_here), (ferry_status::FERRY_OK, 1));
        let capacity = ferry_capacity {
            size: size_of::<ferry_capacity>(),
            rows: counts.rows,
            scale_blocks: counts.scale_blocks,
            wide_ids: 0,
            reserved: 0,
        };
        // SAFETY: `capacity` lives.
        let capacity = unsafe { ferry_capacity::get(&capacity, &plan) }.ok();
        assert_eq!(capacity, Some(Capacity::of_rows(&plan, 4)));
    }
}
