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
    /// Written: rows that the outputs need, as in ferry_capacity.
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
                    given.rows = found.capacity.rows as u64;
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
