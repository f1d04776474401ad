//! Communicators.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use ferry::{Capacity, DataType, Device, Rank, ReceivedCounts, Round, Stream, Tensor};
use pyo3::prelude::*;

use crate::errors;
use crate::fault::Fault;
use crate::group::{Group, device_name};
use crate::interrupt;
use crate::plan::Plan;
use crate::process::Own;
use crate::scalars;

/// Time between two looks for a signal of a thread that waits for counts.
const PAUSE: Duration = Duration::from_millis(10);
/// Time for which a thread that waits for counts leaves its core to nobody: they mostly come within some tens
/// of microseconds, which is less than the shortest sleep.
const SPIN: Duration = Duration::from_millis(1);

/// One rank's end.
#[pyclass(frozen, module = "ferry_ep.core._ferry")]
pub(crate) struct Communicator {
    inner: Own<Inner>,
    #[pyo3(get)]
    rank: u32,
    #[pyo3(get)]
    pub(crate) plan: Py<Plan>,
    /// Kind and number of its device: "simulated", "cuda:1".
    #[pyo3(get)]
    device: String,
    /// Its number among CUDA devices; -1 for others.
    pub(crate) ordinal: i32,
}

struct Inner {
    /// `None` after it was closed.
    slot: Mutex<Option<ferry::Communicator>>,
    device: Arc<dyn Device>,
    /// Numbers of dispatches and combines that were enqueued, whole or by their first half.
    sent: AtomicU64,
    returned: AtomicU64,
    /// Tokens of the last dispatch, and whether its ids were i64.
    tokens: AtomicUsize,
    wide_ids: AtomicBool,
    /// Whether the slot is empty, for those who do not wait for its lock.
    closed: AtomicBool,
}

#[pymethods]
impl Communicator {
    /// Makes the communicators of this process's ranks.
    #[staticmethod]
    fn create(py: Python<'_>, group: &Group, plan: Py<Plan>) -> PyResult<Vec<Self>> {
        let (group, checked) = (group.open_outside_waits()?, plan.get().plan);
        let made = interrupt::detach(py, || ferry::Communicator::new(&group, &checked))?;
        let ranks = made.map_err(errors::from)?.into_iter();
        let one = |communicator: ferry::Communicator| {
            let rank = communicator.rank();
            let device = communicator.device().clone();
            let name = device_name(&group, rank);
            let number = name.strip_prefix("cuda:").map(str::parse);
            Self {
                rank: rank.0,
                plan: plan.clone_ref(py),
                device: name,
                ordinal: number.and_then(Result::ok).unwrap_or(-1),
                inner: Own::new(Inner {
                    slot: Mutex::new(Some(communicator)),
                    device,
                    sent: AtomicU64::new(0),
                    returned: AtomicU64::new(0),
                    tokens: AtomicUsize::new(0),
                    wide_ids: AtomicBool::new(false),
                    closed: AtomicBool::new(false),
                }),
            }
        };
        Ok(ranks.map(one).collect())
    }

    #[getter]
    fn round(&self, py: Python<'_>) -> PyResult<&'static str> {
        let round = self.call(py, |communicator| Ok(communicator.round()))?;
        Ok(match round {
            Round::Idle => "idle",
            Round::DispatchSent => "dispatch sent",
            Round::Dispatched => "dispatched",
            Round::CombineSent => "combine sent",
        })
    }

    #[getter]
    fn max_sms(&self, py: Python<'_>) -> PyResult<Option<u32>> {
        self.call(py, |communicator| Ok(communicator.max_sms()))
    }

    fn limit_sms(&self, py: Python<'_>, max_sms: &Bound<'_, PyAny>) -> PyResult<()> {
        let max_sms: Option<u32> = scalars::max_sms(max_sms).map_err(|_| {
            let given = scalars::shown(max_sms);
            let text = format!(
                "max_sms is {given}, but it is a number of multiprocessors from 1 to 2**32 - 1, or None"
            );
            errors::raise("ArgumentError", text)
        })?;
        self.call(py, |communicator| communicator.limit_sms(max_sms))
    }

    #[getter]
    fn deadline(&self, py: Python<'_>) -> PyResult<f64> {
        self.call(py, |communicator| Ok(communicator.deadline().as_secs_f64()))
    }

    fn set_deadline(&self, py: Python<'_>, deadline: &Bound<'_, PyAny>) -> PyResult<()> {
        let wrong = || {
            let given = scalars::shown(deadline);
            let rule = "it is a number of seconds, above 0 and at most a day, or None";
            errors::raise("ArgumentError", format!("deadline is {given}, but {rule}"))
        };
        let seconds: Option<f64> = scalars::deadline(deadline).map_err(|_| wrong())?;
        let deadline = seconds.map(Duration::try_from_secs_f64).transpose();
        let deadline = deadline.map_err(|_| wrong())?;
        self.call(py, |communicator| communicator.set_deadline(deadline))
    }

    #[getter]
    pub(crate) fn closed(&self) -> PyResult<bool> {
        Ok(self
            .inner
            .get("communicator")?
            .closed
            .load(Ordering::Relaxed))
    }

    /// Rows, blocks of scales, rows of each source and of each expert; nothing until they have come. With
    /// `wait` it looks until they have, and lets other threads of Python run.
    fn received(&self, py: Python<'_>, wait: bool) -> PyResult<Option<Counts>> {
        let begin = Instant::now();
        let mut found = self.call(py, |communicator| communicator.received())?;
        while wait && found.is_none() {
            found = self.call(py, |communicator| received_within(communicator, begin))?;
            py.check_signals()?;
        }
        Ok(found.map(|counts| {
            let Capacity {
                rows, scale_blocks, ..
            } = counts.capacity;
            (
                rows,
                scale_blocks,
                counts.source_counts,
                counts.expert_counts,
            )
        }))
    }

    /// The rows of a view: tokens, scales and row scales.
    fn view(&self, py: Python<'_>) -> PyResult<(Strided, Option<Strided>, Option<Strided>)> {
        // SAFETY: the Python object of a view refuses every use once combine or give_up was called or the
        // communicator closed, and keeps the communicator alive.
        let view = self.call(py, |communicator| unsafe { communicator.view() })?;
        let scales = view.scales.as_ref().map(strided);
        let row_scales = view.row_scales.as_ref().map(strided);
        Ok((strided(&view.tokens), scales, row_scales))
    }

    /// Numbers of dispatches and of combines that were enqueued; giving up a round counts as a combine.
    fn counts(&self) -> PyResult<(u64, u64)> {
        let inner = self.inner.get("communicator")?;
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Ok((of(&inner.sent), of(&inner.returned)))
    }

    /// Tokens of the last dispatch, and whether its ids were i64.
    fn last(&self) -> PyResult<(usize, bool)> {
        let inner = self.inner.get("communicator")?;
        let wide_ids = inner.wide_ids.load(Ordering::Relaxed);
        Ok((inner.tokens.load(Ordering::Relaxed), wide_ids))
    }

    /// Waits for everything enqueued on `stream`. With `is_part`, of a call that launched already, it first
    /// waits for other threads' calls.
    #[pyo3(signature = (stream, is_part=false))]
    fn synchronize(&self, py: Python<'_>, stream: u64, is_part: bool) -> PyResult<Option<Fault>> {
        let stream = handle(stream);
        let mut slot = match is_part {
            true => self.lock_after_others(py)?,
            false => self.lock()?,
        };
        let told = self.with(py, &mut slot, |communicator| {
            communicator.synchronize(stream)
        })?;
        Ok(told.fault().map(|fault| Fault(fault.0)))
    }

    fn check(&self, py: Python<'_>) -> PyResult<Option<Fault>> {
        let told = self.call(py, |communicator| communicator.check())?;
        Ok(told.fault().map(|fault| Fault(fault.0)))
    }

    /// Closes it. After an error that leaves it open it can be used on.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let mut slot = self.lock()?;
        let Some(communicator) = slot.take() else {
            return Ok(());
        };
        let closed = interrupt::detach(py, || communicator.close())?;
        let refused = closed.map_err(|refused| {
            *slot = refused.communicator.map(|communicator| *communicator);
            errors::from(refused.error)
        });
        self.note_closed(slot.is_none())?;
        refused
    }

    /// Drops it as it is, also with an open round.
    fn drop(&self, py: Python<'_>) -> PyResult<()> {
        let communicator = self.lock()?.take();
        py.detach(|| drop(communicator));
        self.note_closed(true)?;
        // A drop tells no errors, not even that it was interrupted.
        interrupt::take().map_or(Ok(()), Err)
    }

    fn assume_no_foreign_graphs(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, |communicator| {
            // SAFETY: the caller has destroyed all graphs of this communicator's calls: documented on
            // `ferry_ep.Communicator.assume_no_graphs`.
            unsafe { communicator.assume_no_foreign_graphs() };
            Ok(())
        })
    }
}

impl Communicator {
    /// Locks the communicator. Fails with `BusyError` if another thread is in one of its calls.
    pub(crate) fn lock(&self) -> PyResult<MutexGuard<'_, Option<ferry::Communicator>>> {
        match self.inner.get("communicator")?.slot.try_lock() {
            Ok(slot) => Ok(slot),
            Err(TryLockError::Poisoned(slot)) => Ok(slot.into_inner()),
            Err(TryLockError::WouldBlock) => Err(errors::raise(
                "BusyError",
                format!(
                    "rank {}: another thread is in a call of this communicator",
                    self.rank
                ),
            )),
        }
    }

    /// Makes a call without the interpreter's lock.
    pub(crate) fn call<R: Send>(
        &self,
        py: Python<'_>,
        act: impl FnOnce(&mut ferry::Communicator) -> Result<R, ferry::Error> + Send,
    ) -> PyResult<R> {
        self.with(py, &mut *self.lock()?, act)
    }

    /// Makes a call of what was locked.
    fn with<R: Send>(
        &self,
        py: Python<'_>,
        slot: &mut Option<ferry::Communicator>,
        act: impl FnOnce(&mut ferry::Communicator) -> Result<R, ferry::Error> + Send,
    ) -> PyResult<R> {
        let communicator = slot.as_mut().ok_or_else(|| self.is_closed())?;
        interrupt::detach(py, || act(communicator))?.map_err(errors::from)
    }

    /// Locks the communicator once no other thread is in one of its calls, which end by the deadline.
    fn lock_after_others(
        &self,
        py: Python<'_>,
    ) -> PyResult<MutexGuard<'_, Option<ferry::Communicator>>> {
        let slot = &self.inner.get("communicator")?.slot;
        loop {
            match slot.try_lock() {
                Ok(slot) => return Ok(slot),
                Err(TryLockError::Poisoned(slot)) => return Ok(slot.into_inner()),
                Err(TryLockError::WouldBlock) => py.detach(|| thread::sleep(SPIN / 20)),
            }
            py.check_signals()?;
        }
    }

    /// The error of a use after close.
    pub(crate) fn is_closed(&self) -> PyErr {
        let text = format!("rank {}: the communicator was closed", self.rank);
        errors::raise("ClosedError", text)
    }

    /// Its device, as long as it is open.
    pub(crate) fn device_of(&self) -> PyResult<&Arc<dyn Device>> {
        Ok(&self.inner.get("communicator")?.device)
    }

    /// Notes whether the slot is empty.
    pub(crate) fn note_closed(&self, closed: bool) -> PyResult<()> {
        let inner = self.inner.get("communicator")?;
        inner.closed.store(closed, Ordering::Relaxed);
        Ok(())
    }

    /// Makes a call of a round.
    pub(crate) fn enqueue(
        &self,
        py: Python<'_>,
        stream: Stream,
        call: &ferry::Call,
    ) -> PyResult<()> {
        self.call(py, |communicator| communicator.enqueue(stream, call))?;
        self.note(call)
    }

    /// Notes a dispatch, and counts what ends a round.
    pub(crate) fn note(&self, call: &ferry::Call) -> PyResult<()> {
        let inner = self.inner.get("communicator")?;
        match call {
            ferry::Call::Dispatch(input, _) | ferry::Call::DispatchAsync(input) => {
                let wide_ids = input.topk_ids.data_type == DataType::I64;
                inner.tokens.store(input.x.dims[0], Ordering::Relaxed);
                inner.wide_ids.store(wide_ids, Ordering::Relaxed);
                inner.sent.fetch_add(1, Ordering::Relaxed);
            }
            ferry::Call::Combine(..) | ferry::Call::CombineAsync(..) | ferry::Call::GiveUp => {
                inner.returned.fetch_add(1, Ordering::Relaxed);
            }
            ferry::Call::DispatchCounts
            | ferry::Call::DispatchWait(_)
            | ferry::Call::CombineWait => {}
        }
        Ok(())
    }

    /// This rank.
    pub(crate) const fn number(&self) -> Rank {
        Rank(self.rank)
    }
}

/// Looks for counts until they have come, or [`PAUSE`] has passed. `begin`: beginning of the wait.
fn received_within(
    communicator: &ferry::Communicator,
    begin: Instant,
) -> Result<Option<ReceivedCounts>, ferry::Error> {
    let end = Instant::now() + PAUSE;
    loop {
        let found = communicator.received()?;
        if found.is_some() || Instant::now() >= end {
            return Ok(found);
        }
        if begin.elapsed() < SPIN {
            std::hint::spin_loop();
        } else {
            thread::sleep(SPIN / 20);
        }
    }
}

/// Rows, blocks of scales, rows of each source, rows of each expert.
type Counts = (usize, usize, Vec<u32>, Vec<u32>);
/// Address, data type, shape, and strides in elements.
type Strided = (u64, &'static str, Vec<usize>, Vec<usize>);

fn strided<const N: usize>(tensor: &Tensor<N>) -> Strided {
    let at = tensor.at.address();
    (
        at,
        tensor.data_type.name(),
        tensor.dims.to_vec(),
        tensor.strides.to_vec(),
    )
}

/// The stream with this handle.
pub(crate) const fn handle(stream: u64) -> Stream {
    // SAFETY: the caller passes live streams of the rank's device: documented on
    // `ferry_ep.Communicator.dispatch`.
    unsafe { Stream::new(stream) }
}
