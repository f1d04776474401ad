//! Calls as values, for all ranks of a process.

use std::ffi::c_void;

use ferry::{Call, Communicator, Plan, Stream};

use self::ferry_call_kind::*;
use crate::arguments::{
    ferry_combine_input, ferry_combine_output, ferry_dispatch_input, ferry_dispatch_output,
};
use crate::communicator::{closed_already, ferry_communicator, write_lock};
use crate::device::stream_of;
use crate::handle::{get, values};
use crate::status::{Failure, ferry_status, guard};
use crate::structs::{Sized0, read, sized};

/// Kind of a call of a round. The functions of these names say what each does.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ferry_call_kind {
    /// ferry_dispatch: takes dispatch_input and dispatch_output.
    FERRY_CALL_DISPATCH = 1,
    /// ferry_dispatch_async: takes dispatch_input.
    FERRY_CALL_DISPATCH_ASYNC = 2,
    /// ferry_dispatch_counts.
    FERRY_CALL_DISPATCH_COUNTS = 3,
    /// ferry_dispatch_wait: takes dispatch_output.
    FERRY_CALL_DISPATCH_WAIT = 4,
    /// ferry_combine: takes combine_input and combine_output.
    FERRY_CALL_COMBINE = 5,
    /// ferry_combine_async: takes combine_input and combine_output.
    FERRY_CALL_COMBINE_ASYNC = 6,
    /// ferry_combine_wait.
    FERRY_CALL_COMBINE_WAIT = 7,
    /// ferry_give_up.
    FERRY_CALL_GIVE_UP = 8,
}

/// A call of a round, with its tensors. Begin with FERRY_CALL_INIT. Pointers that its kind does not take are
/// NULL.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ferry_call {
    /// sizeof(ferry_call).
    pub size: usize,
    /// A ferry_call_kind.
    pub kind: u32,
    /// Zero.
    pub reserved: u32,
    /// Inputs of FERRY_CALL_DISPATCH and FERRY_CALL_DISPATCH_ASYNC.
    pub dispatch_input: *const ferry_dispatch_input,
    /// Outputs of FERRY_CALL_DISPATCH and FERRY_CALL_DISPATCH_WAIT.
    pub dispatch_output: *const ferry_dispatch_output,
    /// Inputs of FERRY_CALL_COMBINE and FERRY_CALL_COMBINE_ASYNC.
    pub combine_input: *const ferry_combine_input,
    /// Output of FERRY_CALL_COMBINE and FERRY_CALL_COMBINE_ASYNC.
    pub combine_output: *const ferry_combine_output,
}
sized!(ferry_call, 48);

/// Makes a call on all ranks of this process: on all of them or on none. `communicators` must be exactly
/// those of one ferry_communicators_new, in any order (FERRY_INVALID_ARGUMENT otherwise). Each array has
/// `count` elements, in the order of `communicators`. The calls are of one kind (FERRY_INVALID_ARGUMENT
/// otherwise), with each rank's own tensors. All checks of all ranks come first, then the kernels are
/// enqueued, one rank after another; no launch waits for a kernel. If a check or the first launch fails,
/// nothing was enqueued on any rank, and their rounds are unchanged. If a later launch fails, this returns
/// FERRY_POISONED, and all communicators of the call can only be closed. Calls for all ranks and for single
/// ranks may be mixed in a round. Collective with the other processes (not FERRY_CALL_DISPATCH_COUNTS, and
/// not with skip_a2a). Does not synchronise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_together(
    communicators: *const *mut ferry_communicator,
    streams: *const *mut c_void,
    calls: *const *const ferry_call,
    count: usize,
) -> ferry_status {
    guard("ferry_together", || {
        // SAFETY: the rules of handles, pointers, memory and streams.
        unsafe {
            with_all(communicators, streams, count, |ranks, streams| {
                let mut given = Vec::with_capacity(count);
                for (index, &call) in values(calls, "calls", count)?.iter().enumerate() {
                    let name = format!("calls[{index}]");
                    given.push(read(call, &name)?.get(&name, ranks[index].plan())?);
                }
                Ok(Communicator::together(ranks, streams, &given)?)
            })
        }
    })
}

impl ferry_call {
    /// Converts the call. `at`: its name.
    ///
    /// # Safety
    /// The rules of pointers and memory.
    unsafe fn get(&self, at: &str, plan: &Plan) -> Result<Call, Failure> {
        let mut kinds = KINDS.into_iter();
        let Some((kind, takes)) = kinds.find(|&(kind, _)| kind as u32 == self.kind) else {
            let name = format!("{at}->kind");
            return Err(Failure::value(&name, self.kind, "no ferry_call_kind"));
        };
        if self.reserved != 0 {
            let name = format!("{at}->reserved");
            return Err(Failure::value(&name, self.reserved, "it must be 0"));
        }
        for (name, given) in [
            ("dispatch_input", self.dispatch_input.cast::<c_void>()),
            ("dispatch_output", self.dispatch_output.cast()),
            ("combine_input", self.combine_input.cast()),
            ("combine_output", self.combine_output.cast()),
        ] {
            if !given.is_null() && !takes.contains(&name) {
                let rule = format!("{kind:?} takes none");
                return Err(Failure::value(
                    &format!("{at}->{name}"),
                    format!("{given:p}"),
                    &rule,
                ));
            }
        }
        // SAFETY: the rules of pointers and memory.
        let sent = || unsafe {
            of(self.dispatch_input, at, "dispatch_input", |given| {
                given.get()
            })
        };
        // SAFETY: as above.
        let rows = || unsafe {
            of(self.dispatch_output, at, "dispatch_output", |given| {
                given.get(plan)
            })
        };
        // SAFETY: as above.
        let answers =
            || unsafe { of(self.combine_input, at, "combine_input", |given| given.get()) };
        // SAFETY: as above.
        let sums = || unsafe {
            of(self.combine_output, at, "combine_output", |given| {
                given.get()
            })
        };
        Ok(match kind {
            FERRY_CALL_DISPATCH => Call::Dispatch(sent()?, rows()?),
            FERRY_CALL_DISPATCH_ASYNC => Call::DispatchAsync(sent()?),
            FERRY_CALL_DISPATCH_COUNTS => Call::DispatchCounts,
            FERRY_CALL_DISPATCH_WAIT => Call::DispatchWait(rows()?),
            FERRY_CALL_COMBINE => Call::Combine(answers()?, sums()?),
            FERRY_CALL_COMBINE_ASYNC => Call::CombineAsync(answers()?, sums()?),
            FERRY_CALL_COMBINE_WAIT => Call::CombineWait,
            FERRY_CALL_GIVE_UP => Call::GiveUp,
        })
    }
}

/// Every kind, and the fields that it takes.
const KINDS: [(ferry_call_kind, &[&str]); 8] = [
    (FERRY_CALL_DISPATCH, &["dispatch_input", "dispatch_output"]),
    (FERRY_CALL_DISPATCH_ASYNC, &["dispatch_input"]),
    (FERRY_CALL_DISPATCH_COUNTS, &[]),
    (FERRY_CALL_DISPATCH_WAIT, &["dispatch_output"]),
    (FERRY_CALL_COMBINE, &["combine_input", "combine_output"]),
    (
        FERRY_CALL_COMBINE_ASYNC,
        &["combine_input", "combine_output"],
    ),
    (FERRY_CALL_COMBINE_WAIT, &[]),
    (FERRY_CALL_GIVE_UP, &[]),
];

/// Converts a struct of a call with `get`; a failure names the struct.
///
/// # Safety
/// The rule of pointers.
unsafe fn of<T: Sized0, U>(
    pointer: *const T,
    call: &str,
    field: &str,
    get: impl FnOnce(&T) -> Result<U, Failure>,
) -> Result<U, Failure> {
    let name = format!("{call}->{field}");
    // SAFETY: the rule of pointers.
    let given = unsafe { read(pointer, &name)? };
    get(&given).map_err(|failure| Failure {
        text: format!("{name}: {}", failure.text),
        ..failure
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
