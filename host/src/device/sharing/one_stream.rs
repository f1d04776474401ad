//! The order in which ranks of a process that share a GPU enqueue kernels that wait for each other.
//!
//! A kernel begins after the preceding one in its stream has ended. So a rank's kernel must not follow a
//! kernel of another rank that waits for it. Sends and waits are counted in halves of rounds: the dispatch of
//! round n is half 2n - 1, its combine (or its end without one) half 2n. All ranks of a communicator make the
//! same calls, so halves with the same number belong together.
//!
//! Captured calls do not run, and count only for their graph, from the half with which each rank begins
//! there. When the graph is launched, it counts as if its calls were made. Launches of graphs that
//! `CudaDevice::capture` did not make are not seen: after such a capture only captures are checked.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use ferry_layout::{Kernel, Rank};

use crate::error::SharedGpuError;
use crate::tensor::handles::Stream;

#[cfg(any(feature = "cuda", test))]
pub(crate) mod graphs;

/// Most captures that are kept without having become graphs.
const MOST_RECORDINGS: usize = 64;

/// Captures in progress.
static RECORDINGS: Mutex<Vec<Recording>> = Mutex::new(Vec::new());

/// A sequence of kernels that run one after another: a stream, or its part of a capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lane {
    line: Line,
    /// The number of the capture, if any.
    capture: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Line {
    /// The legacy default stream.
    Default,
    /// The default stream that each thread has of its own.
    OfThread(ThreadId),
    Stream(u64),
}

impl Lane {
    /// The lane of `stream`, which is in the capture with this number, or in none.
    pub(crate) fn of(stream: Stream, capture: Option<u64>) -> Self {
        let line = match stream.handle() {
            0 | 1 => Line::Default,
            2 => Line::OfThread(thread::current().id()),
            handle => Line::Stream(handle),
        };
        Self { line, capture }
    }
}

/// The ranks of a communicator that this process drives on one GPU: at least two.
pub(crate) struct Order {
    ranks: Vec<Rank>,
    /// Enqueued halves, without captures.
    enqueued: Mutex<Halves>,
    /// Whether a graph was captured whose launches are not seen.
    is_uncertain: AtomicBool,
}

/// A rank's place in an order.
#[derive(Clone)]
pub(crate) struct Turn {
    order: Arc<Order>,
    index: usize,
}

/// A capture, and the halves that ranks of an order have enqueued in it.
struct Recording {
    capture: u64,
    order: Arc<Order>,
    halves: Halves,
}

/// Progress of the ranks of an order.
struct Halves {
    /// Progress of each rank by index; `None` for a rank that enqueued nothing here.
    ranks: Vec<Option<Progress>>,
    /// Kernels that wait for halves: the last in each lane of each rank, and some whose waits are met.
    waits: Vec<Wait>,
    /// Number of reservations whose launches are in progress: until then no wait is forgotten.
    reserved: usize,
}

/// Kernels that count as enqueued while their launch is in progress, so that no other thread's kernel comes
/// between check and launch. A drop before [`launched`](Self::launched) takes them back.
#[must_use]
pub(crate) struct Reserved {
    order: Arc<Order>,
    lane: Lane,
    steps: Vec<Step>,
    is_launched: bool,
}

/// A change of a rank's progress that can be taken back.
struct Step {
    index: usize,
    /// Number of halves that it sends.
    sends: u64,
    before: Option<Progress>,
    wait: Option<Wait>,
}

#[derive(Clone, Copy)]
struct Progress {
    /// The half before the first one here.
    #[cfg_attr(
        not(any(feature = "cuda", test)),
        expect(dead_code, reason = "graphs are CUDA's")
    )]
    before: u64,
    /// The last half that was sent.
    sent: u64,
    /// The last half that was waited for, by which kernel.
    until: u64,
    by: Kernel,
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct Wait {
    lane: Lane,
    index: usize,
    kernel: Kernel,
    /// The half of all others that it waits for.
    until: u64,
}

/// Effect of a kernel on the others' kernels.
struct Effect {
    /// Whether it sends the next half.
    sends: bool,
    /// The half of all others that it waits for; 0 for none.
    until: u64,
}

impl Effect {
    /// Effect of `kernel` of a rank that has sent `sent` halves.
    const fn of(kernel: Kernel, sent: u64) -> Self {
        let (sends, until) = match kernel {
            Kernel::Dispatch | Kernel::Combine | Kernel::Links => (true, sent + 1),
            // Waits for credits of the round before.
            Kernel::DispatchAsync => (true, sent),
            Kernel::DispatchWait | Kernel::DispatchCounts | Kernel::CombineWait => (false, sent),
            // A group between nodes, where giving up waits for the others, has one rank a process.
            Kernel::CombineAsync | Kernel::GiveUp => (true, 0),
            Kernel::FusedSilu | Kernel::LocalDispatch | Kernel::LocalCombine => (false, 0),
        };
        Self { sends, until }
    }
}

/// The half before the first one of a capture that begins with `kernel`.
const fn before(kernel: Kernel) -> u64 {
    match kernel {
        Kernel::DispatchWait
        | Kernel::DispatchCounts
        | Kernel::Combine
        | Kernel::CombineAsync
        | Kernel::GiveUp => 1,
        Kernel::CombineWait => 2,
        _ => 0,
    }
}

impl Halves {
    /// Progress of ranks that have enqueued nothing yet.
    fn new(ranks: usize) -> Self {
        Self {
            ranks: vec![None; ranks],
            waits: Vec::new(),
            reserved: 0,
        }
    }

    fn progress(&self, index: usize, kernel: Kernel) -> Progress {
        let before = before(kernel);
        self.ranks[index].unwrap_or(Progress {
            before,
            sent: before,
            until: 0,
            by: kernel,
        })
    }

    /// The kernel in `lane` that waits for the half after `sent` of the rank at `index`.
    fn waiting(&self, index: usize, sent: u64, lane: Lane) -> Option<&Wait> {
        let mut waits = self.waits.iter();
        waits.find(|wait| wait.lane == lane && wait.index != index && wait.until > sent)
    }

    /// The kernel that `kernel` of the rank at `index` must not follow, if it is in `lane`.
    fn conflict(&self, index: usize, kernel: Kernel, lane: Lane) -> Option<&Wait> {
        let Progress { sent, .. } = self.progress(index, kernel);
        let sends = Effect::of(kernel, sent).sends;
        self.waiting(index, sent, lane).filter(|_| sends)
    }

    /// Counts `kernel` of the rank at `index` as enqueued.
    fn enter(&mut self, index: usize, kernel: Kernel, lane: Lane) -> Step {
        let mut progress = self.progress(index, kernel);
        let before = self.ranks[index];
        let Effect { sends, until } = Effect::of(kernel, progress.sent);
        progress.sent += u64::from(sends);
        let wait = (until > 0).then_some(Wait {
            lane,
            index,
            kernel,
            until,
        });
        if wait.is_some() {
            (progress.until, progress.by) = (until, kernel);
        }
        self.ranks[index] = Some(progress);
        self.waits.extend(wait);
        Step {
            index,
            sends: u64::from(sends),
            before,
            wait,
        }
    }

    /// Undoes the step.
    fn take_back(&mut self, step: &Step) {
        let sent = self.ranks[step.index].map_or(0, |progress| progress.sent);
        self.ranks[step.index] = step.before.map(|before| Progress {
            sent: sent.saturating_sub(step.sends),
            ..before
        });
        let mut waits = self.waits.iter();
        if let Some(at) = waits.rposition(|wait| Some(*wait) == step.wait) {
            self.waits.remove(at);
        }
    }

    /// Forgets waits that are met, and those with a later one of the same rank in the same lane, which waits
    /// for more. Not while a step may be undone.
    fn settle(&mut self) {
        self.reserved = self.reserved.saturating_sub(1);
        if self.reserved > 0 {
            return;
        }
        let waits = std::mem::take(&mut self.waits);
        for (at, wait) in waits.iter().enumerate() {
            let is_later = |later: &Wait| (later.lane, later.index) == (wait.lane, wait.index);
            if !self.is_met(wait) && !waits[at + 1..].iter().any(is_later) {
                self.waits.push(*wait);
            }
        }
    }

    /// Whether all halves that it waits for were enqueued.
    fn is_met(&self, wait: &Wait) -> bool {
        let mut ranks = self.ranks.iter().enumerate();
        ranks.all(|(index, progress)| {
            let sent = progress.map_or(0, |progress| progress.sent);
            index == wait.index || sent >= wait.until
        })
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Order {
    /// The places of these ranks, in the same order.
    pub(crate) fn of(ranks: Vec<Rank>) -> Vec<Turn> {
        let mut enqueued = Halves::new(ranks.len());
        for index in 0..ranks.len() {
            enqueued.ranks[index] = Some(enqueued.progress(index, Kernel::Dispatch));
        }
        let order = Arc::new(Self {
            enqueued: Mutex::new(enqueued),
            is_uncertain: AtomicBool::new(false),
            ranks,
        });
        let turn = |index| Turn {
            order: order.clone(),
            index,
        };
        (0..order.ranks.len()).map(turn).collect()
    }

    /// Changes the enqueued halves, or those of the lane's capture, if it is recorded.
    fn change<T>(&self, lane: Lane, change: impl FnOnce(&mut Halves) -> T) -> Option<T> {
        let Some(capture) = lane.capture else {
            return Some(change(&mut lock(&self.enqueued)));
        };
        let mut recordings = lock(&RECORDINGS);
        let known = recordings
            .iter_mut()
            .find(|known| known.is(capture, self))?;
        Some(change(&mut known.halves))
    }

    /// Adds a recording for a capture. If there are too many, one of another capture is forgotten.
    fn record(self: &Arc<Self>, capture: u64) {
        let mut recordings = lock(&RECORDINGS);
        if recordings.iter().any(|known| known.is(capture, self)) {
            return;
        }
        let mut known = recordings.iter();
        let of_another = known.position(|known| known.capture != capture);
        if let (MOST_RECORDINGS.., Some(at)) = (recordings.len(), of_another) {
            recordings.remove(at);
        }
        recordings.push(Recording {
            capture,
            order: self.clone(),
            halves: Halves::new(self.ranks.len()),
        });
    }

    /// Makes the steps of `enter` unless `refused` returns an error, both under one lock. If launches are
    /// not seen, nothing is refused.
    fn reserve(
        self: &Arc<Self>,
        lane: Lane,
        refused: impl FnOnce(&Halves) -> Option<SharedGpuError>,
        enter: impl FnOnce(&mut Halves) -> Vec<Step>,
    ) -> Result<Reserved, SharedGpuError> {
        if let Some(capture) = lane.capture {
            self.record(capture);
        }
        let is_seen = lane.capture.is_some() || !self.is_uncertain.load(Ordering::Relaxed);
        let steps = self.change(lane, |halves| {
            if let Some(refused) = refused(halves).filter(|_| is_seen) {
                return Err(refused);
            }
            halves.reserved += 1;
            Ok(enter(halves))
        });
        Ok(Reserved {
            order: self.clone(),
            lane,
            steps: steps.transpose()?.unwrap_or_default(),
            is_launched: false,
        })
    }

    fn refusal(&self, index: usize, kernel: Kernel, wait: &Wait) -> SharedGpuError {
        SharedGpuError::OneStream {
            rank: self.ranks[index],
            kernel,
            waiting: self.ranks[wait.index],
            waiting_kernel: wait.kernel,
        }
    }
}

impl Recording {
    fn is(&self, capture: u64, order: &Order) -> bool {
        self.capture == capture && std::ptr::eq(Arc::as_ptr(&self.order), order)
    }
}

impl Turn {
    /// The rank of this place.
    pub(crate) fn rank(&self) -> Rank {
        self.order.ranks[self.index]
    }

    /// Refuses a kernel that would follow one that waits for it; otherwise counts it as enqueued.
    pub(crate) fn reserve(&self, kernel: Kernel, lane: Lane) -> Result<Reserved, SharedGpuError> {
        let (order, index) = (&self.order, self.index);
        let refused = |halves: &Halves| {
            let wait = halves.conflict(index, kernel, lane)?;
            Some(order.refusal(index, kernel, wait))
        };
        order.reserve(lane, refused, |halves| {
            vec![halves.enter(index, kernel, lane)]
        })
    }
}

impl Reserved {
    /// Keeps the steps. `is_seen`: whether launches will be seen, if it is a part of a graph.
    pub(crate) fn launched(mut self, is_seen: bool) {
        if self.lane.capture.is_some() && !is_seen {
            self.order.is_uncertain.store(true, Ordering::Relaxed);
        }
        self.is_launched = true;
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        let Self {
            order,
            lane,
            steps,
            is_launched,
        } = self;
        order.change(*lane, |halves| {
            if !*is_launched {
                steps.iter().for_each(|step| halves.take_back(step));
            }
            halves.settle();
        });
    }
}

#[cfg(test)]
mod tests;
