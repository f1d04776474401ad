//! The order in which ranks of a process that share a GPU enqueue kernels that wait for each other.
//!
//! A kernel behind another one in a stream begins after that has ended. So a rank's kernel must not come
//! behind a kernel of another rank that waits for it. What a kernel sends and waits for is counted in halves
//! of rounds: the dispatch of round n is half 2n - 1, its combine half 2n. All ranks of a communicator make
//! the same calls, so halves with the same number belong together.
//!
//! What is captured does not run, and counts for its graph alone, from the half with which each rank begins
//! there. When the graph is launched, it counts as if its calls were made. Of a graph that others than
//! `CudaDevice::capture` make no launch is seen: behind such a capture only captures are looked at.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use ferry_layout::{Kernel, Rank};

use crate::{SharedGpuError, Stream};

#[cfg(any(feature = "cuda", test))]
pub(crate) mod graphs;

/// Most captures that are remembered whose graphs did not come about.
const MOST_RECORDINGS: usize = 64;

/// What is being captured.
static RECORDINGS: Mutex<Vec<Recording>> = Mutex::new(Vec::new());

/// What follows one after another: a stream, or in a capture what was enqueued on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lane {
    line: Line,
    /// The number of the capture.
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
    /// That of `stream`, which is in the capture with this number, or in none.
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
    /// What was enqueued, captures apart.
    enqueued: Mutex<Halves>,
    /// A graph was captured that launches unseen.
    is_uncertain: AtomicBool,
}

/// A rank's place in an order.
#[derive(Clone)]
pub(crate) struct Turn {
    order: Arc<Order>,
    index: usize,
}

/// A capture, and what ranks of an order have enqueued in it.
struct Recording {
    capture: u64,
    order: Arc<Order>,
    halves: Halves,
}

/// How far the ranks of an order are.
#[derive(Clone)]
struct Halves {
    /// By index; `None` for a rank that enqueued nothing here.
    ranks: Vec<Option<Progress>>,
    /// Kernels that wait for halves that were not enqueued when they were.
    waits: Vec<Wait>,
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

#[derive(Clone, Copy)]
struct Wait {
    lane: Lane,
    index: usize,
    kernel: Kernel,
    /// The half of all others that it waits for.
    until: u64,
}

/// What a kernel does to the others' kernels.
struct Effect {
    /// Whether it sends the next half.
    sends: bool,
    /// The half of all others that it waits for; 0 for none.
    until: u64,
}

impl Effect {
    /// That of a rank that has sent so many halves.
    const fn of(kernel: Kernel, sent: u64) -> Self {
        let (sends, until) = match kernel {
            Kernel::Dispatch | Kernel::Combine => (true, sent + 1),
            // For credits of the round before.
            Kernel::DispatchAsync => (true, sent),
            Kernel::DispatchWait | Kernel::CombineWait => (false, sent),
            Kernel::CombineAsync => (true, 0),
            Kernel::FusedSilu | Kernel::LocalDispatch | Kernel::LocalCombine => (false, 0),
        };
        Self { sends, until }
    }
}

/// The half before the first one of a capture that begins with `kernel`.
const fn before(kernel: Kernel) -> u64 {
    match kernel {
        Kernel::DispatchWait | Kernel::Combine | Kernel::CombineAsync => 1,
        Kernel::CombineWait => 2,
        _ => 0,
    }
}

impl Halves {
    /// Of ranks that have enqueued nothing yet.
    fn new(ranks: usize) -> Self {
        Self {
            ranks: vec![None; ranks],
            waits: Vec::new(),
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

    /// What stands in `lane` and waits for the half behind `sent` of the rank at `index`.
    fn waiting(&self, index: usize, sent: u64, lane: Lane) -> Option<&Wait> {
        let mut waits = self.waits.iter();
        waits.find(|wait| wait.lane == lane && wait.index != index && wait.until > sent)
    }

    /// What `kernel` of the rank at `index` must not come behind.
    fn conflict(&self, index: usize, kernel: Kernel, lane: Lane) -> Option<&Wait> {
        let Progress { sent, .. } = self.progress(index, kernel);
        let sends = Effect::of(kernel, sent).sends;
        self.waiting(index, sent, lane).filter(|_| sends)
    }

    /// `kernel` of the rank at `index` was enqueued.
    fn enter(&mut self, index: usize, kernel: Kernel, lane: Lane) {
        let mut progress = self.progress(index, kernel);
        let Effect { sends, until } = Effect::of(kernel, progress.sent);
        progress.sent += u64::from(sends);
        if until > 0 {
            (progress.until, progress.by) = (until, kernel);
        }
        self.ranks[index] = Some(progress);
        self.forget_what_came();
        self.wait(Wait {
            lane,
            index,
            kernel,
            until,
        });
    }

    fn wait(&mut self, wait: Wait) {
        if !self.is_met(&wait) {
            let is_same = |known: &Wait| (known.lane, known.index) == (wait.lane, wait.index);
            self.waits.retain(|known| !is_same(known));
            self.waits.push(wait);
        }
    }

    fn forget_what_came(&mut self) {
        let waits = std::mem::take(&mut self.waits);
        self.waits = waits
            .into_iter()
            .filter(|wait| !self.is_met(wait))
            .collect();
    }

    /// Whether all that it waits for was enqueued.
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

    /// Looks at what was enqueued, or in the capture; not where launches are unseen.
    fn look<T>(&self, lane: Lane, at: impl FnOnce(&Halves) -> Option<T>) -> Option<T> {
        let Some(capture) = lane.capture else {
            let is_uncertain = self.is_uncertain.load(Ordering::Relaxed);
            return at(&lock(&self.enqueued)).filter(|_| !is_uncertain);
        };
        let recordings = lock(&RECORDINGS);
        let mut known = recordings.iter();
        at(&known.find(|known| known.is(capture, self))?.halves)
    }

    fn change(self: &Arc<Self>, lane: Lane, change: impl FnOnce(&mut Halves)) {
        let Some(capture) = lane.capture else {
            return change(&mut lock(&self.enqueued));
        };
        let mut recordings = lock(&RECORDINGS);
        if let Some(known) = recordings.iter_mut().find(|known| known.is(capture, self)) {
            return change(&mut known.halves);
        }
        let mut halves = Halves::new(self.ranks.len());
        change(&mut halves);
        if recordings.len() == MOST_RECORDINGS {
            recordings.remove(0);
        }
        recordings.push(Recording {
            capture,
            order: self.clone(),
            halves,
        });
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
    /// Whose it is.
    pub(crate) fn rank(&self) -> Rank {
        self.order.ranks[self.index]
    }

    /// Refuses a kernel that would come behind one that waits for it.
    pub(crate) fn check(&self, kernel: Kernel, lane: Lane) -> Result<(), SharedGpuError> {
        let Self { order, index } = self;
        let refused = order.look(lane, |halves| {
            let wait = halves.conflict(*index, kernel, lane)?;
            Some(order.refusal(*index, kernel, wait))
        });
        refused.map_or(Ok(()), Err)
    }

    /// The kernel was enqueued. `is_seen`: should it be a part of a graph, its launches will be seen.
    pub(crate) fn enter(&self, kernel: Kernel, lane: Lane, is_seen: bool) {
        if lane.capture.is_some() && !is_seen {
            self.order.is_uncertain.store(true, Ordering::Relaxed);
        }
        let enter = |halves: &mut Halves| halves.enter(self.index, kernel, lane);
        self.order.change(lane, enter);
    }
}

/// Refuses calls, to be enqueued one after another, of which one would come behind another that waits for
/// it: whose call, and why.
pub(crate) fn check_all(calls: &[(&Turn, Kernel, Lane)]) -> Result<(), (Rank, SharedGpuError)> {
    let mut trials: Vec<(&Arc<Order>, Option<u64>, Halves)> = Vec::new();
    for &(Turn { order, index }, kernel, lane) in calls {
        let is_same = |(known, capture, _): &&mut (&Arc<Order>, Option<u64>, Halves)| {
            Arc::ptr_eq(known, order) && *capture == lane.capture
        };
        let halves = match trials.iter_mut().find(is_same) {
            Some((_, _, halves)) => halves,
            None => {
                let now = order.look(lane, |halves| Some(halves.clone()));
                let now = now.unwrap_or_else(|| Halves::new(order.ranks.len()));
                trials.push((order, lane.capture, now));
                let Some((_, _, halves)) = trials.last_mut() else {
                    continue;
                };
                halves
            }
        };
        if let Some(wait) = halves.conflict(*index, kernel, lane) {
            return Err((order.ranks[*index], order.refusal(*index, kernel, wait)));
        }
        halves.enter(*index, kernel, lane);
    }
    Ok(())
}

#[cfg(test)]
mod tests;
