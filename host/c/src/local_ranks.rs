//! Calls for all ranks of a process.

use std::ffi::c_void;

use ferry::{CombineInput, CombineOutput, Communicator, DispatchInput, DispatchOutput, Stream};

use crate::arguments::{
    ferry_combine_input, ferry_combine_output, ferry_dispatch_input, ferry_dispatch_output,
};
use crate::communicator::{closed_already, ferry_communicator, write_lock};
use crate::device::stream_of;
use crate::handle::{get, values};
use crate::status::{Failure, ferry_status, guard};
use crate::structs::{Sized0, read};

/// ferry_dispatch for all ranks of this process in one call. `communicators` must be exactly those of one
/// ferry_communicators_new, in any order (FERRY_INVALID_ARGUMENT otherwise). Each array has `count` elements,
/// in the order of `communicators`. All checks of all ranks come first, then the kernels are enqueued, one
/// rank after another; no launch waits for a kernel. If a check or the first launch fails, nothing was
/// enqueued on any rank, and their rounds are unchanged. If a later launch fails, this returns
/// FERRY_POISONED, and all communicators of the call can only be closed. Calls for all ranks and for single
/// ranks may be mixed in a round. Collective with the other processes (not with skip_a2a). Does not
/// synchronise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_dispatch_all(
    communicators: *const *mut ferry_communicator,
    streams: *const *mut c_void,
    inputs: *const *const ferry_dispatch_input,
    outputs: *const *const ferry_dispatch_output,
    count: usize,
) -> ferry_status {
    guard("ferry_dispatch_all", || {
        // SAFETY: the rules of handles, pointers, memory and streams.
        unsafe {
            with_all(communicators, streams, count, |ranks, streams| {
                let inputs = dispatch_inputs(inputs, count)?;
                let outputs = dispatch_outputs(outputs, ranks, count)?;
                Ok(Communicator::dispatch_all(
                    ranks, streams, &inputs, &outputs,
                )?)
            })
        }
    })
}

/// ferry_dispatch_async for all ranks of this process; see ferry_dispatch_all. Not with skip_a2a. Collective
/// with the other processes. Does not synchronise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_dispatch_all_async(
    communicators: *const *mut ferry_communicator,
    streams: *const *mut c_void,
    inputs: *const *const ferry_dispatch_input,
    count: usize,
) -> ferry_status {
    guard("ferry_dispatch_all_async", || {
        // SAFETY: the rules of handles, pointers, memory and streams.
        unsafe {
            with_all(communicators, streams, count, |ranks, streams| {
                let inputs = dispatch_inputs(inputs, count)?;
                Ok(Communicator::dispatch_async_all(ranks, streams, &inputs)?)
            })
        }
    })
}

/// ferry_dispatch_wait for all ranks of this process; see ferry_dispatch_all. Collective with the other
/// processes. Does not synchronise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_dispatch_all_wait(
    communicators: *const *mut ferry_communicator,
    streams: *const *mut c_void,
    outputs: *const *const ferry_dispatch_output,
    count: usize,
) -> ferry_status {
    guard("ferry_dispatch_all_wait", || {
        // SAFETY: the rules of handles, pointers, memory and streams.
        unsafe {
            with_all(communicators, streams, count, |ranks, streams| {
                let outputs = dispatch_outputs(outputs, ranks, count)?;
                Ok(Communicator::dispatch_wait_all(ranks, streams, &outputs)?)
            })
        }
    })
}

/// ferry_combine for all ranks of this process; see ferry_dispatch_all. Collective with the other processes
/// (not with skip_a2a). Does not synchronise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_combine_all(
    communicators: *const *mut ferry_communicator,
    streams: *const *mut c_void,
    inputs: *const *const ferry_combine_input,
    outputs: *const *const ferry_combine_output,
    count: usize,
) -> ferry_status {
    guard("ferry_combine_all", || {
        // SAFETY: the rules of handles, pointers, memory and streams.
        unsafe {
            with_all(communicators, streams, count, |ranks, streams| {
                let inputs = combine_inputs(inputs, count)?;
                let outputs = combine_outputs(outputs, count)?;
                Ok(Communicator::combine_all(
                    ranks, streams, &inputs, &outputs,
                )?)
            })
        }
    })
}

/// ferry_combine_async for all ranks of this process; see ferry_dispatch_all. Not with skip_a2a. Collective
/// with the other processes. Does not synchronise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_combine_all_async(
    communicators: *const *mut ferry_communicator,
    streams: *const *mut c_void,
    inputs: *const *const ferry_combine_input,
    outputs: *const *const ferry_combine_output,
    count: usize,
) -> ferry_status {
    guard("ferry_combine_all_async", || {
        // SAFETY: the rules of handles, pointers, memory and streams.
        unsafe {
            with_all(communicators, streams, count, |ranks, streams| {
                let inputs = combine_inputs(inputs, count)?;
                let outputs = combine_outputs(outputs, count)?;
                Ok(Communicator::combine_async_all(
                    ranks, streams, &inputs, &outputs,
                )?)
            })
        }
    })
}

/// ferry_combine_wait for all ranks of this process; see ferry_dispatch_all. Collective with the other
/// processes. Does not synchronise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_combine_all_wait(
    communicators: *const *mut ferry_communicator,
    streams: *const *mut c_void,
    count: usize,
) -> ferry_status {
    guard("ferry_combine_all_wait", || {
        // SAFETY: the rules of handles, pointers and streams.
        unsafe {
            with_all(communicators, streams, count, |ranks, streams| {
                Ok(Communicator::combine_wait_all(ranks, streams)?)
            })
        }
    })
}

/// ferry_dispatch_counts for all ranks of this process; see ferry_dispatch_all. Not collective. Does not
/// synchronise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_dispatch_counts_all(
    communicators: *const *mut ferry_communicator,
    streams: *const *mut c_void,
    count: usize,
) -> ferry_status {
    guard("ferry_dispatch_counts_all", || {
        // SAFETY: the rules of handles, pointers and streams.
        unsafe {
            with_all(communicators, streams, count, |ranks, streams| {
                Ok(Communicator::dispatch_counts_all(ranks, streams)?)
            })
        }
    })
}

/// ferry_give_up for all ranks of this process; see ferry_dispatch_all. Collective with the other processes.
/// Does not synchronise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_give_up_all(
    communicators: *const *mut ferry_communicator,
    streams: *const *mut c_void,
    count: usize,
) -> ferry_status {
    guard("ferry_give_up_all", || {
        // SAFETY: the rules of handles, pointers and streams.
        unsafe {
            with_all(communicators, streams, count, |ranks, streams| {
                Ok(Communicator::give_up_all(ranks, streams)?)
            })
        }
    })
}

/// Runs a call of all these ranks, which no other thread can use meanwhile.
///
/// # Safety
/// The rules of handles, pointers and streams.
unsafe fn with_all(
    communicators: *const *mut ferry_communicator,
    streams: *const *mut c_void,
    count: usize,
    call: impl FnOnce(&mut [Communicator], &[Stream]) -> Result<(), Failure>,
) -> Result<(), Failure> {
    if count == 0 {
        return Err(Failure::value("count", 0, "the call needs at least 1 rank"));
    }
    // SAFETY: the rule of pointers.
    let streams = unsafe { values(streams, "streams", count)? }.iter();
    // SAFETY: the rule of streams.
    let streams: Vec<Stream> = streams.map(|&at| unsafe { stream_of(at) }).collect();
    // SAFETY: the rule of pointers.
    let handles = unsafe { values(communicators, "communicators", count)? };
    let mut places = Vec::with_capacity(count);
    for (index, &handle) in handles.iter().enumerate() {
        let name = format!("communicators[{index}]");
        if let Some(first) = handles[..index].iter().position(|&other| other == handle) {
            let rule = format!("communicators[{first}] is the same");
            return Err(Failure::value(&name, format!("{handle:p}"), &rule));
        }
        // SAFETY: the rule of handles.
        let place = write_lock(unsafe { get(handle, &name)? })?;
        if place.is_none() {
            return Err(closed_already());
        }
        places.push(place);
    }
    // A panic drops the ranks, and leaves their handles poisoned.
    let mut ranks: Vec<_> = places.iter_mut().filter_map(|place| place.take()).collect();
    let called = call(&mut ranks, &streams);
    for (place, rank) in places.iter_mut().zip(ranks) {
        **place = Some(rank);
    }
    called
}

/// # Safety
/// The rules of pointers and memory.
unsafe fn dispatch_inputs(
    inputs: *const *const ferry_dispatch_input,
    count: usize,
) -> Result<Vec<DispatchInput>, Failure> {
    // SAFETY: the rules of pointers and memory.
    unsafe { each(inputs, "inputs", count, |_, input| input.get()) }
}

/// # Safety
/// The rules of pointers and memory.
unsafe fn dispatch_outputs(
    outputs: *const *const ferry_dispatch_output,
    ranks: &[Communicator],
    count: usize,
) -> Result<Vec<DispatchOutput>, Failure> {
    let plan = |index: usize| ranks[index].plan();
    // SAFETY: the rules of pointers and memory.
    unsafe {
        each(outputs, "outputs", count, |index, output| {
            output.get(plan(index))
        })
    }
}

/// # Safety
/// The rules of pointers and memory.
unsafe fn combine_inputs(
    inputs: *const *const ferry_combine_input,
    count: usize,
) -> Result<Vec<CombineInput>, Failure> {
    // SAFETY: the rules of pointers and memory.
    unsafe { each(inputs, "inputs", count, |_, input| input.get()) }
}

/// # Safety
/// The rules of pointers and memory.
unsafe fn combine_outputs(
    outputs: *const *const ferry_combine_output,
    count: usize,
) -> Result<Vec<CombineOutput>, Failure> {
    // SAFETY: the rules of pointers and memory.
    unsafe { each(outputs, "outputs", count, |_, output| output.get()) }
}

/// Converts the struct of each rank with `get`; a failure names the struct.
///
/// # Safety
/// The rule of pointers.
unsafe fn each<T: Sized0, U>(
    pointers: *const *const T,
    name: &str,
    count: usize,
    get: impl Fn(usize, &T) -> Result<U, Failure>,
) -> Result<Vec<U>, Failure> {
    // SAFETY: the rule of pointers.
    let pointers = unsafe { values(pointers, name, count)? };
    let value = |(index, &pointer): (usize, &*const T)| {
        let name = format!("{name}[{index}]");
        // SAFETY: the rule of pointers.
        let given = unsafe { read(pointer, &name)? };
        get(index, &given).map_err(|failure| Failure {
            text: format!("{name}: {}", failure.text),
            ..failure
        })
    };
    pointers.iter().enumerate().map(value).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::communicator::ferry_communicator_drop;
    use crate::communicator::tests::communicators;
    use crate::status::ferry_status::{FERRY_BUSY, FERRY_INTERNAL, FERRY_OK};

    const STREAMS: [*mut c_void; 2] = [std::ptr::null_mut(); 2];

    fn drop_all(handles: &mut [*mut ferry_communicator]) {
        for handle in handles {
            // SAFETY: the handle lives, and nobody uses it.
            assert_eq!(unsafe { ferry_communicator_drop(handle) }, FERRY_OK);
        }
    }

    #[test]
    fn a_call_with_a_rank_that_is_in_use_takes_none() {
        let mut handles = communicators();
        {
            // SAFETY: the handle lives.
            let held = unsafe { get(handles[1], "handle") }.unwrap();
            let _reading = held.read().unwrap();
            // SAFETY: the handles live.
            let refused = unsafe {
                with_all(handles.as_ptr(), STREAMS.as_ptr(), 2, |_, _| {
                    panic!("it was called")
                })
            };
            assert_eq!(refused.unwrap_err().status, FERRY_BUSY);
        }
        // SAFETY: as above.
        let taken = unsafe { with_all(handles.as_ptr(), STREAMS.as_ptr(), 2, |_, _| Ok(())) };
        assert!(taken.is_ok());
        drop_all(&mut handles);
    }

    #[test]
    fn ranks_of_a_call_that_met_a_bug_can_be_dropped() {
        let mut handles = communicators();
        let call = || {
            guard("ferry_x", || {
                // SAFETY: the handles live.
                unsafe {
                    with_all(handles.as_ptr(), STREAMS.as_ptr(), 2, |_, _| {
                        panic!("a bug")
                    })
                }
            })
        };
        assert_eq!(call(), FERRY_INTERNAL);
        // Its ranks are gone, and each handle says so.
        assert_eq!(call(), FERRY_INTERNAL);
        for &handle in &handles {
            // SAFETY: the handle lives.
            let place = unsafe { get(handle, "handle") }.unwrap();
            assert!(place.try_read().is_err());
        }
        drop_all(&mut handles);
    }
}
