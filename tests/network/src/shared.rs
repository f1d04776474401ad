//! The state that NVSHMEM's threads and the two agents of a PE share.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::counts::Counts;
use crate::cuda::Context;
use crate::frame::Request;
use crate::memory::{Memory, Place};
use crate::settings::{Loss, Settings};

/// A request that waits to be sent.
#[derive(Debug)]
pub(crate) enum Op {
    /// Bytes that are read when they are sent.
    Put { to: u64, from: u64, bytes: usize },
    /// All else.
    Send(Request),
}

/// The place of an answer.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Pending {
    /// So many bytes.
    Get { to: u64, bytes: usize },
    /// A word, then this flag.
    Fetch { to: u64, flag: u64 },
}

/// The requests to a peer.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    pub(crate) ops: Vec<Op>,
    /// Nothing was asked since the last fence.
    pub(crate) is_fenced: bool,
    /// Operations that the peer acknowledges.
    pub(crate) to_acknowledge: u64,
    /// Operations that it answers, which are their numbers, too.
    pub(crate) to_answer: u64,
    pub(crate) pending: HashMap<u64, Pending>,
}

impl Queue {
    /// The number of an answer that will go there.
    pub(crate) fn expect(&mut self, pending: Pending) -> u64 {
        self.to_answer += 1;
        self.pending.insert(self.to_answer, pending);
        self.to_answer
    }
}

/// Another PE, or this one.
#[derive(Debug, Default)]
pub(crate) struct Peer {
    queue: Mutex<Queue>,
    pub(crate) acknowledged: AtomicU64,
    pub(crate) answered: AtomicU64,
    is_lost: AtomicBool,
    /// It said that nothing comes any more.
    pub(crate) has_left: AtomicBool,
}

impl Peer {
    pub(crate) fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::Relaxed)
    }
}

/// The state that NVSHMEM's threads and the two agents of a PE share.
pub(crate) struct Shared {
    pub(crate) settings: Settings,
    pub(crate) context: Option<Context>,
    pub(crate) memory: Arc<Memory>,
    pub(crate) pe: usize,
    pub(crate) peers: Vec<Peer>,
    pub(crate) counts: Counts,
    /// This PE asks for nothing more but that its peers know.
    pub(crate) is_leaving: AtomicBool,
    /// The agents are to end once all is sent and received.
    pub(crate) is_closing: AtomicBool,
    /// They are to end now.
    pub(crate) stops: AtomicBool,
    /// This PE is lost to the others, on purpose.
    has_dropped_out: AtomicBool,
    has_failed: AtomicBool,
}

impl Shared {
    pub(crate) fn new(
        settings: Settings,
        context: Option<Context>,
        memory: Arc<Memory>,
        [pe, pes]: [usize; 2],
    ) -> Self {
        Self {
            settings,
            context,
            memory,
            pe,
            peers: (0..pes).map(|_| Peer::default()).collect(),
            counts: Counts::default(),
            is_leaving: AtomicBool::new(false),
            is_closing: AtomicBool::new(false),
            stops: AtomicBool::new(false),
            has_dropped_out: AtomicBool::new(false),
            has_failed: AtomicBool::new(false),
        }
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Relaxed)
    }

    /// Says why the transport fails. NVSHMEM is told at its next call.
    pub(crate) fn fail(&self, why: &str) {
        eprintln!("ferry-network: PE {}: {why}", self.pe);
        self.has_failed.store(true, Ordering::Relaxed);
        self.write_counts();
    }

    /// Notes that a peer is lost, unless it left after all that it was asked, or this PE leaves as well.
    pub(crate) fn lose(&self, pe: usize, why: &str) {
        let peer = &self.peers[pe];
        let stops = self.stops.load(Ordering::Relaxed);
        let has_left = peer.has_left.load(Ordering::Acquire);
        let is_leaving = self.is_leaving.load(Ordering::Acquire);
        if stops
            || has_left && (is_leaving || self.is_quiet(pe))
            || peer.is_lost.swap(true, Ordering::Relaxed)
        {
            return;
        }
        eprintln!("ferry-network: PE {}: PE {pe} is lost: {why}", self.pe);
        Counts::add(&self.counts.lost, 1);
        self.write_counts();
    }

    /// The way in which this PE is lost to the others, if it is by now.
    pub(crate) fn dropped_out(&self) -> Option<Loss> {
        let victim = self.settings.lose?;
        self.has_dropped_out
            .load(Ordering::Relaxed)
            .then_some(victim.how)
    }

    pub(crate) fn drop_out(&self) {
        self.has_dropped_out.store(true, Ordering::Relaxed);
    }

    /// Whether a peer has acknowledged and answered all that it was asked so far.
    pub(crate) fn is_quiet(&self, pe: usize) -> bool {
        let peer = &self.peers[pe];
        let queue = peer.queue();
        peer.acknowledged.load(Ordering::Acquire) >= queue.to_acknowledge
            && peer.answered.load(Ordering::Acquire) >= queue.to_answer
    }

    pub(crate) fn log(&self, text: &str) {
        if self.settings.log {
            eprintln!("ferry-network: PE {}: {text}", self.pe);
        }
    }

    /// Kind of memory that this PE gave to NVSHMEM, registered or not.
    pub(crate) fn own_place(&self, at: u64, bytes: usize) -> Place {
        let registered = self.memory.hold().of_this_pe(at, bytes);
        let asked = || match &self.context {
            Some(context) if context.is_of_gpu(at) => Place::Gpu,
            _ => Place::Host,
        };
        registered.unwrap_or_else(asked)
    }

    pub(crate) fn write_counts(&self) {
        let Some(folder) = &self.settings.counts else {
            return;
        };
        if let Err(error) = self.counts.write(folder, self.pe) {
            eprintln!(
                "ferry-network: PE {}: {}: {error}",
                self.pe,
                folder.display()
            );
        }
    }
}

/// Yields, then sleeps, while there is nothing to do.
#[derive(Default)]
pub(crate) struct Idle(Option<Instant>);

impl Idle {
    pub(crate) fn after(&mut self, is_busy: bool) {
        if is_busy {
            self.0 = None;
            return;
        }
        let idle = self.0.get_or_insert_with(Instant::now).elapsed();
        if idle < Duration::from_millis(2) {
            thread::yield_now();
        } else if idle < Duration::from_millis(50) {
            thread::sleep(Duration::from_micros(20));
        } else {
            thread::sleep(Duration::from_micros(200));
        }
    }
}
