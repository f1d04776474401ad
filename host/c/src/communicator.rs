//! Communicators, a handle for each rank of this process.

use std::ffi::c_void;
use std::sync::{RwLock, TryLockError};
use std::time::Duration;

use ferry::{CloseError, Communicator, Error, Round};

use crate::device::stream_of;
use crate::fault::{ferry_fault, report};
use crate::group::{ferry_group, read_place};
use crate::handle::{Opaque, get, put, require_place, store, take};
use crate::plan::ferry_plan;
use crate::status::ferry_status::{FERRY_BUSY, FERRY_INTERNAL, FERRY_WRONG_ORDER};
use crate::status::{Failure, ferry_status, guard};

/// One rank's end of a communicator. Calls of a round need it exclusively: while one thread is in a
/// call, another thread's call returns FERRY_BUSY. ferry_check and ferry_synchronize may overlap.
pub struct ferry_communicator(());

impl Opaque for ferry_communicator {
    /// `None` during close and during a call for all ranks; it stays so if a panic ends either.
    type Value = RwLock<Option<Communicator>>;
    const NAME: &'static str = "ferry_communicator";
    const MAGIC: u64 = u64::from_le_bytes(*b"ferry/co");
}

/// Progress of a rank's round, which decides the call that comes next.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ferry_round {
    /// No round is open: ferry_dispatch or ferry_dispatch_async comes next.
    FERRY_ROUND_IDLE = 0,
    /// ferry_dispatch_wait comes next.
    FERRY_ROUND_SENT = 1,
    /// ferry_combine, ferry_combine_async or ferry_give_up comes next.
    FERRY_ROUND_DISPATCHED = 2,
    /// ferry_combine_wait comes next.
    FERRY_ROUND_RETURNED = 3,
}

impl From<Round> for ferry_round {
    fn from(round: Round) -> Self {
        match round {
            Round::Idle => Self::FERRY_ROUND_IDLE,
            Round::DispatchSent => Self::FERRY_ROUND_SENT,
            Round::Dispatched => Self::FERRY_ROUND_DISPATCHED,
            Round::CombineSent => Self::FERRY_ROUND_RETURNED,
        }
    }
}

/// Makes a communicator, and stores a handle for each rank that this process drives, in ascending order;
/// `count` is their number (ferry_group_local_ranks). Each handle may be used by a thread of its own. All
/// ranks compare their sizes. On failure all handles are NULL. FERRY_IN_USE if ranks share a GPU that has no
/// room for the kernels of all communicators of this process. Collective. Synchronises.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_communicators_new(
    group: *const ferry_group,
    plan: *const ferry_plan,
    communicators: *mut *mut ferry_communicator,
    count: usize,
) -> ferry_status {
    guard("ferry_communicators_new", || {
        // SAFETY: the rule of pointers.
        unsafe { require_place(communicators, "communicators", count)? };
        // SAFETY: the rule of handles.
        let group = unsafe { get(group, "group")? };
        // SAFETY: the rule of handles.
        let plan = unsafe { get(plan, "plan")? };
        let local = group.local_ranks().len();
        if count != local {
            let rule = format!("this process drives {local} ranks");
            return Err(Failure::value("count", count, &rule));
        }
        for (index, rank) in Communicator::new(group, plan)?.into_iter().enumerate() {
            // SAFETY: `require_place` checked `count` places, as many as there are local ranks.
            unsafe { put(communicators.add(index), RwLock::new(Some(rank))) };
        }
        Ok(())
    })
}

/// Stores the rank of this communicator. Not collective. Does not synchronise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_communicator_rank(
    communicator: *const ferry_communicator,
    rank: *mut u32,
) -> ferry_status {
    guard("ferry_communicator_rank", || {
        // SAFETY: the rules of handles and pointers.
        unsafe { look_at(communicator, |own| store(rank, "rank", own.rank().0)) }
    })
}

/// Stores the progress of the rank's round, a ferry_round, regardless of faults. Not collective. Does not
/// synchronise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_communicator_round(
    communicator: *mut ferry_communicator,
    round: *mut u32,
) -> ferry_status {
    guard("ferry_communicator_round", || {
        // SAFETY: the rule of handles.
        unsafe {
            with_rank(communicator, |rank| {
                store(round, "round", ferry_round::from(rank.round()) as u32)
            })
        }
    })
}

/// Returns whether a kernel has reported a fault so far: FERRY_OK, FERRY_INPUT_FAULT (reported once; go
/// on), FERRY_FAULT or FERRY_POISONED. Stores the fault in `fault`, whose size is set, unless that is NULL;
/// after FERRY_OK its kind is FERRY_FAULT_NONE. Reads host memory only; running kernels may report later.
/// Not collective. Does not synchronise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_check(
    communicator: *const ferry_communicator,
    fault: *mut ferry_fault,
) -> ferry_status {
    guard("ferry_check", || {
        // SAFETY: the rules of handles and pointers.
        unsafe { look_at(communicator, |rank| report(fault, || rank.check())) }
    })
}

/// Waits for everything enqueued on the stream, then does the same as ferry_check. Also finds out if a peer
/// gave up on this rank because it was late: FERRY_POISONED, with a fault of kind FERRY_FAULT_PEER_TIMEOUT
/// whose culprit is this rank and whose peer is the rank that gave up. Not collective, but waits for the
/// peers that kernels wait for, until their deadline at most. Synchronises.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_synchronize(
    communicator: *const ferry_communicator,
    stream: *mut c_void,
    fault: *mut ferry_fault,
) -> ferry_status {
    guard("ferry_synchronize", || {
        // SAFETY: the rules of handles, pointers and streams.
        unsafe {
            look_at(communicator, |rank| {
                report(fault, || rank.synchronize(stream_of(stream)))
            })
        }
    })
}

/// Frees the rank's memory and sets `*communicator` to NULL; the last rank of this process also frees the
/// windows, after a barrier with the other processes. Synchronise the streams in use first, including those
/// of replays. Returns FERRY_WRONG_ORDER while a round is open, unless a kernel gave up on it, and
/// FERRY_IN_USE while graphs that ferry_graph_capture made of its calls are alive. Then, as with FERRY_BUSY,
/// nothing was done and `*communicator` is unchanged. The caller promises that graphs made in any other way
/// neither run nor will be launched. After any other failure `*communicator` is NULL, and memory that could
/// not be freed is leaked. Collective. Synchronises.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_communicator_close(
    communicator: *mut *mut ferry_communicator,
) -> ferry_status {
    guard("ferry_communicator_close", || {
        let closed = {
            // SAFETY: the rules of pointers and handles.
            let handle = unsafe { get(read_place(communicator)?, "*communicator")? };
            let mut rank = write_lock(handle)?;
            let open = rank.take().ok_or_else(closed_already)?;
            let closed = match open.close() {
                Err(CloseError {
                    error: Error::ForeignGraphs { .. },
                    communicator: Some(mut open),
                }) => {
                    // SAFETY: the rule of graphs. Last, because a close that is refused promises nothing.
                    unsafe { open.assume_no_foreign_graphs() };
                    open.close()
                }
                closed => closed,
            };
            match closed {
                Err(CloseError {
                    error,
                    communicator: Some(open),
                }) => {
                    *rank = Some(*open);
                    return Err(error.into());
                }
                closed => closed,
            }
        };
        // SAFETY: the rules of pointers and handles.
        drop(unsafe { take(communicator, "*communicator")? });
        Ok(closed.map_err(ferry::Error::from)?)
    })
}

/// Frees the handle without waiting for other ranks and sets `*communicator` to NULL, for a rank that cannot
/// go on, or a process that is about to end. If all ranks of the group are in this process, each stream of
/// this rank's calls was passed to ferry_synchronize since, and none of the calls was captured, the memory
/// is freed, which synchronises. Otherwise it is leaked: running kernels go on, and graphs may be launched.
/// A group with such graphs cannot be closed (FERRY_IN_USE): those of ferry_graph_capture until they are
/// freed, others for ever. Not collective.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_communicator_drop(
    communicator: *mut *mut ferry_communicator,
) -> ferry_status {
    guard("ferry_communicator_drop", || {
        // SAFETY: the rules of pointers and handles.
        let handle = unsafe { get(read_place(communicator)?, "*communicator")? };
        // A communicator whose lock a panic poisoned is dropped all the same.
        if let Err(refused @ TryLockError::WouldBlock) = handle.try_write() {
            return Err(locked(&refused));
        }
        // SAFETY: the rules of pointers and handles.
        unsafe { take(communicator, "*communicator") }.map(drop)
    })
}

/// Sets the most multiprocessors that the kernels of later calls occupy, until the next call of it; 0 for as
/// many as at first: max_sms of the configuration, or the rank's part of a shared GPU. Each half of a split
/// call can have its own, and each rank; launches that a graph has keep theirs. FERRY_INVALID_ARGUMENT if it
/// is more than at first, or if receive is BY_EXPERT or PADDED. Not collective. Does not synchronise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_communicator_limit_sms(
    communicator: *mut ferry_communicator,
    max_sms: u32,
) -> ferry_status {
    guard("ferry_communicator_limit_sms", || {
        let max_sms = (max_sms != 0).then_some(max_sms);
        // SAFETY: the rule of handles.
        unsafe { with_rank(communicator, |rank| Ok(rank.limit_sms(max_sms)?)) }
    })
}

/// Sets the longest time in nanoseconds that a kernel of later calls waits, from its start, until the next
/// call of it; 0 for deadline_ns of the configuration. Each half of a split call can have its own, and each
/// rank; launches that a graph has keep theirs. FERRY_INVALID_ARGUMENT if it is more than a day. Not
/// collective. Does not synchronise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_communicator_set_deadline(
    communicator: *mut ferry_communicator,
    deadline_ns: u64,
) -> ferry_status {
    guard("ferry_communicator_set_deadline", || {
        let deadline = (deadline_ns != 0).then(|| Duration::from_nanos(deadline_ns));
        // SAFETY: the rule of handles.
        unsafe { with_rank(communicator, |rank| Ok(rank.set_deadline(deadline)?)) }
    })
}

type Rank = <ferry_communicator as Opaque>::Value;

pub(crate) fn write_lock(
    rank: &Rank,
) -> Result<std::sync::RwLockWriteGuard<'_, Option<Communicator>>, Failure> {
    rank.try_write().map_err(|refused| locked(&refused))
}

fn locked<T>(refused: &TryLockError<T>) -> Failure {
    match refused {
        TryLockError::WouldBlock => Failure::new(
            FERRY_BUSY,
            "another thread is in a call of this communicator",
        ),
        TryLockError::Poisoned(_) => Failure::new(
            FERRY_INTERNAL,
            "an earlier call of this communicator met a bug; drop it",
        ),
    }
}

pub(crate) fn closed_already() -> Failure {
    Failure::new(FERRY_WRONG_ORDER, "the communicator was closed")
}

/// Runs a call that changes a rank.
///
/// # Safety
/// The rule of handles.
pub(crate) unsafe fn with_rank(
    communicator: *mut ferry_communicator,
    call: impl FnOnce(&mut Communicator) -> Result<(), Failure>,
) -> Result<(), Failure> {
    // SAFETY: the rule of handles.
    let rank = unsafe { get(communicator, "communicator")? };
    call(write_lock(rank)?.as_mut().ok_or_else(closed_already)?)
}

/// Runs a call that only reads a rank.
///
/// # Safety
/// The rule of handles.
pub(crate) unsafe fn look_at(
    communicator: *const ferry_communicator,
    call: impl FnOnce(&Communicator) -> Result<(), Failure>,
) -> Result<(), Failure> {
    // SAFETY: the rule of handles.
    let rank = unsafe { get(communicator, "communicator")? };
    let rank = rank.try_read().map_err(|refused| locked(&refused))?;
    call(rank.as_ref().ok_or_else(closed_already)?)
}

#[cfg(test)]
pub(crate) mod tests {
    use std::ptr;
    use std::sync::Arc;

    use ferry::{Config, Group, Plan, Stream};

    use super::*;
    use crate::noted;

    /// Handles for the ranks of a simulated group of two.
    pub(crate) fn communicators() -> Vec<*mut ferry_communicator> {
        let group = Group::simulated(2, 7).unwrap();
        let plan = Plan::new(&group, Config::new(4, 2, 8, 3)).unwrap();
        let ranks = Communicator::new(&group, &plan).unwrap();
        let handle = |rank| {
            let mut place = ptr::null_mut();
            // SAFETY: `place` lives.
            unsafe { put(&mut place, RwLock::new(Some(rank))) };
            place
        };
        ranks.into_iter().map(handle).collect()
    }

    #[test]
    fn a_communicator_that_is_in_use_is_busy() {
        let mut handles = communicators();
        let mut number = 7;
        {
            // SAFETY: the handle lives.
            let held = unsafe { get(handles[1], "handle") }.unwrap();
            let _reading = held.read().unwrap();
            // SAFETY: handle and `number` live.
            let looked_at = unsafe { ferry_communicator_rank(handles[1], &mut number) };
            assert_eq!((looked_at, number), (ferry_status::FERRY_OK, 1));
            // SAFETY: as above.
            let changed = unsafe { ferry_communicator_round(handles[1], &mut number) };
            assert_eq!(changed, FERRY_BUSY);
            // SAFETY: as above.
            let status = unsafe { ferry_communicator_close(&mut handles[1]) };
            assert_eq!(status, FERRY_BUSY);
            // SAFETY: as above.
            let status = unsafe { ferry_communicator_drop(&mut handles[1]) };
            assert_eq!(status, FERRY_BUSY);
        }
        for handle in &mut handles {
            // SAFETY: the handle lives, and nobody uses it.
            let status = unsafe { ferry_communicator_close(handle) };
            assert_eq!(status, ferry_status::FERRY_OK);
            assert!(handle.is_null());
        }
    }

    #[test]
    fn closing_promises_that_graphs_of_others_are_gone_and_dropping_does_not() {
        type GiveBack = unsafe extern "C" fn(*mut *mut ferry_communicator) -> ferry_status;
        let cases: [(GiveBack, bool); 2] = [
            (ferry_communicator_close, true),
            (ferry_communicator_drop, false),
        ];
        for (give_back, is_freed) in cases {
            let notes = Arc::<noted::Notes>::default();
            let mut rank = noted::start(&notes, 1, noted::config()).unwrap();
            *notes.others_capture.lock().unwrap() = true;
            noted::round(&mut rank, Stream::DEFAULT).unwrap();
            assert!(rank.synchronize(Stream::DEFAULT).unwrap().fault().is_none());
            notes.take();
            let mut handle = ptr::null_mut();
            // SAFETY: `handle` lives.
            unsafe { put(&mut handle, RwLock::new(Some(rank))) };
            // SAFETY: the handle lives, and nobody uses it. There are no graphs.
            let status = unsafe { give_back(&mut handle) };
            assert_eq!(status, ferry_status::FERRY_OK);
            let frees = |call: &String| call == "free_windows";
            assert_eq!(notes.take().iter().any(frees), is_freed);
        }
    }

    #[test]
    fn a_communicator_that_met_a_bug_can_be_dropped() {
        for mut handle in communicators() {
            let met = guard("ferry_x", || {
                // SAFETY: the handle lives.
                unsafe { with_rank(handle, |_| panic!("a bug")) }
            });
            assert_eq!(met, FERRY_INTERNAL);
            let mut number = 7;
            // SAFETY: handle and `number` live.
            let status = unsafe { ferry_communicator_rank(handle, &mut number) };
            assert_eq!(status, FERRY_INTERNAL);
            // SAFETY: the handle lives, and nobody uses it.
            let status = unsafe { ferry_communicator_drop(&mut handle) };
            assert_eq!(status, ferry_status::FERRY_OK);
            assert!(handle.is_null());
        }
    }
}
