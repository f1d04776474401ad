//! Calls of a round.

use std::ffi::c_void;

use crate::arguments::{
    ferry_combine_input, ferry_combine_output, ferry_dispatch_input, ferry_dispatch_output,
};
use crate::communicator::{ferry_communicator, with_rank};
use crate::device::stream_of;
use crate::status::{ferry_status, guard};
use crate::structs::read;

/// Sends this rank's tokens to their experts' ranks and receives those for its own experts, in one kernel. On
/// one node the kernel also waits for ranks whose combine has not yet read the previous round, at most until
/// the deadline of this rank's own previous combine. Only enqueues: inputs and outputs are in
/// use until the kernel has ended. Collective (not with skip_a2a). Does not synchronise, allocate or
/// compile, and can be captured in a graph. On failure nothing was enqueued.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_dispatch(
    communicator: *mut ferry_communicator,
    stream: *mut c_void,
    input: *const ferry_dispatch_input,
    output: *const ferry_dispatch_output,
) -> ferry_status {
    guard("ferry_dispatch", || {
        // SAFETY: the rules of handles, pointers, memory and streams.
        unsafe {
            with_rank(communicator, |rank| {
                let input = read(input, "input")?.get()?;
                let output = read(output, "output")?.get(rank.plan())?;
                Ok(rank.dispatch(stream_of(stream), &input, &output)?)
            })
        }
    })
}

/// Sends this rank's tokens, the first half of ferry_dispatch. The kernel waits for no peer, except on one
/// node for ranks whose combine has not yet read the previous round, at most until the deadline of this
/// rank's own previous combine. Only enqueues: the input is in use until the kernel has ended, or with a
/// shared expert that of ferry_dispatch_wait. Not with skip_a2a. Collective. Does not synchronise. On failure
/// nothing was enqueued.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_dispatch_async(
    communicator: *mut ferry_communicator,
    stream: *mut c_void,
    input: *const ferry_dispatch_input,
) -> ferry_status {
    guard("ferry_dispatch_async", || {
        // SAFETY: the rules of handles, pointers, memory and streams.
        unsafe {
            with_rank(communicator, |rank| {
                let input = read(input, "input")?.get()?;
                Ok(rank.dispatch_async(stream_of(stream), &input)?)
            })
        }
    })
}

/// Receives the tokens for this rank's experts, the second half of ferry_dispatch. Only enqueues; the kernel
/// must run after that of ferry_dispatch_async. Collective. Does not synchronise. On failure nothing was
/// enqueued, and it can be called again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_dispatch_wait(
    communicator: *mut ferry_communicator,
    stream: *mut c_void,
    output: *const ferry_dispatch_output,
) -> ferry_status {
    guard("ferry_dispatch_wait", || {
        // SAFETY: the rules of handles, pointers, memory and streams.
        unsafe {
            with_rank(communicator, |rank| {
                let output = read(output, "output")?.get(rank.plan())?;
                Ok(rank.dispatch_wait(stream_of(stream), &output)?)
            })
        }
    })
}

/// Sends the experts' outputs back to their tokens' ranks and sums those of this rank's tokens, in one
/// kernel. Ends the round. Only enqueues: inputs and outputs are in use until the kernel has ended.
/// Collective (not with skip_a2a). Does not synchronise, allocate or compile, and can be captured in a graph.
/// On failure nothing was enqueued, and it can be called again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_combine(
    communicator: *mut ferry_communicator,
    stream: *mut c_void,
    input: *const ferry_combine_input,
    output: *const ferry_combine_output,
) -> ferry_status {
    guard("ferry_combine", || {
        // SAFETY: the rules of handles, pointers, memory and streams.
        unsafe {
            with_rank(communicator, |rank| {
                let input = read(input, "input")?.get()?;
                let output = read(output, "output")?.get()?;
                Ok(rank.combine(stream_of(stream), &input, &output)?)
            })
        }
    })
}

/// Sends the experts' outputs, the first half of ferry_combine. The kernel waits for no peer. Only enqueues:
/// inputs and outputs are in use until the kernel of ferry_combine_wait has ended. Not with skip_a2a.
/// Collective. Does not synchronise. On failure nothing was enqueued, and it can be called again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_combine_async(
    communicator: *mut ferry_communicator,
    stream: *mut c_void,
    input: *const ferry_combine_input,
    output: *const ferry_combine_output,
) -> ferry_status {
    guard("ferry_combine_async", || {
        // SAFETY: the rules of handles, pointers, memory and streams.
        unsafe {
            with_rank(communicator, |rank| {
                let input = read(input, "input")?.get()?;
                let output = read(output, "output")?.get()?;
                Ok(rank.combine_async(stream_of(stream), &input, &output)?)
            })
        }
    })
}

/// Receives and sums into the output passed to ferry_combine_async, the second half of ferry_combine. Ends
/// the round. Only enqueues; the kernel must run after that of ferry_combine_async. Collective. Does not
/// synchronise. On failure nothing was enqueued, and it can be called again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_combine_wait(
    communicator: *mut ferry_communicator,
    stream: *mut c_void,
) -> ferry_status {
    guard("ferry_combine_wait", || {
        // SAFETY: the rules of handles and streams.
        unsafe {
            with_rank(communicator, |rank| {
                Ok(rank.combine_wait(stream_of(stream))?)
            })
        }
    })
}

/// Ends the round without a combine, after ferry_dispatch or ferry_dispatch_wait: ferry_dispatch may follow.
/// On one node the kernel waits for no peer, between nodes for all of them. Only enqueues. Collective (not
/// with skip_a2a): all ranks give up a round, or all combine it; if one combines what another gives up, both
/// end with FERRY_FAULT_PEER_TIMEOUT after their deadline, or with FERRY_POISONED, at the latest in their
/// next dispatch. In the numbers of rounds of a ferry_fault, a round that was given up counts as two. Does
/// not synchronise, allocate or compile, and can be captured in a graph. On failure (FERRY_WRONG_ORDER unless
/// a dispatch is to be combined) nothing was enqueued, and it can be called again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_give_up(
    communicator: *mut ferry_communicator,
    stream: *mut c_void,
) -> ferry_status {
    guard("ferry_give_up", || {
        // SAFETY: the rules of handles and streams.
        unsafe { with_rank(communicator, |rank| Ok(rank.give_up(stream_of(stream))?)) }
    })
}
