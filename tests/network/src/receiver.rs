//! The agent at the target: writes what came into this PE's memory, and answers.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::counts::Counts;
use crate::error::{FrameError, NetworkError};
use crate::frame::{Answer, AtomicRequest, Request};
use crate::link::Link;
use crate::memory::{Held, Place};
use crate::mover::Mover;
use crate::schedule::{Batch, Clock, Schedule, Waiting};
use crate::settings::{Loss, Order, Victim};
use crate::shared::{Idle, Shared};

/// Bytes of answers that wait for a socket before nothing more is taken from it.
const MOST_UNSENT: usize = 16 << 20;
/// The file of counts is at most so old.
const WRITE_COUNTS: Duration = Duration::from_secs(1);
/// A process that is lost on purpose ends with this.
const LOST_EXIT: i32 = 9;

/// A connection from a PE.
pub(crate) struct Incoming {
    pe: usize,
    link: Link,
    schedule: Schedule,
    /// Operations that took effect and have no answer of their own; so many of them the peer was told.
    done: u64,
    told: u64,
    has_left: bool,
}

impl Incoming {
    pub(crate) fn new(pe: usize, link: Link, order: Order) -> Self {
        Self {
            pe,
            link,
            schedule: Schedule::new(order),
            done: 0,
            told: 0,
            has_left: false,
        }
    }

    /// Whether nothing of it is awaited.
    fn is_over(&self) -> bool {
        (self.has_left || self.link.is_closed())
            && self.schedule.is_empty()
            && self.link.unsent() == 0
    }
}

/// The agent at the target.
pub(crate) struct Receiver {
    shared: Arc<Shared>,
    mover: Mover,
    clock: Clock,
    /// Operations of others that took effect.
    applied: u64,
}

impl Receiver {
    pub(crate) fn new(shared: Arc<Shared>, mover: Mover) -> Self {
        let clock = Clock::new(shared.settings.clone(), shared.pe as u64, Instant::now());
        Self {
            shared,
            mover,
            clock,
            applied: 0,
        }
    }

    /// Receives until it is to end and no PE sends any more.
    pub(crate) fn run(mut self, mut all: Vec<Incoming>) -> Result<(), NetworkError> {
        let shared = self.shared.clone();
        if let Some(context) = &shared.context {
            context.enter()?;
        }
        let (mut idle, mut written) = (Idle::default(), Instant::now());
        while !shared.stops.load(Ordering::Relaxed) {
            let mut is_busy = false;
            for incoming in &mut all {
                match shared.dropped_out() {
                    None => {}
                    Some(Loss::Hang) => break,
                    Some(_) => incoming.link.close(),
                }
                match self.step(incoming) {
                    Ok(any) => is_busy |= any,
                    Err(error) => {
                        incoming.link.close();
                        incoming.schedule = Schedule::new(shared.settings.order);
                        shared.fail(&format!("requests of PE {}: {error}", incoming.pe));
                    }
                }
                if self.is_to_drop_out() {
                    self.drop_out();
                }
            }
            let is_closing = shared.is_closing.load(Ordering::Acquire);
            if is_closing && all.iter().all(Incoming::is_over) {
                return Ok(());
            }
            if written.elapsed() > WRITE_COUNTS {
                written = Instant::now();
                shared.write_counts();
            }
            idle.after(is_busy);
        }
        Ok(())
    }

    fn is_to_drop_out(&self) -> bool {
        let is_due = |victim: Victim| victim.pe == self.shared.pe && self.applied >= victim.after;
        self.shared.settings.lose.is_some_and(is_due) && self.shared.dropped_out().is_none()
    }

    fn drop_out(&self) {
        let Some(victim) = self.shared.settings.lose else {
            return;
        };
        let how = victim.how;
        eprintln!(
            "ferry-network: PE {} drops out ({how:?}) after {} operations",
            self.shared.pe, self.applied
        );
        self.shared.drop_out();
        self.shared.write_counts();
        if how == Loss::Exit {
            std::process::exit(LOST_EXIT);
        }
    }

    /// Takes requests, and lets those take effect whose turn it is. Whether there was anything to do.
    fn step(&mut self, incoming: &mut Incoming) -> Result<bool, NetworkError> {
        let mut is_busy = !incoming.schedule.is_full() && incoming.link.fill();
        self.take(incoming)?;
        while !incoming.schedule.is_empty() {
            let batch = incoming.schedule.take(Instant::now(), &mut self.clock);
            if batch.puts.is_empty() && batch.others.is_empty() {
                break;
            }
            self.apply(incoming, &batch)?;
            is_busy = true;
        }
        if incoming.done > incoming.told {
            incoming.told = incoming.done;
            Answer::Done(incoming.done).write(incoming.link.output());
        }
        is_busy |= incoming.link.flush();
        if incoming.link.is_closed() && !incoming.has_left {
            self.shared.lose(incoming.pe, "it closed its connection");
        }
        Ok(is_busy)
    }

    fn take(&mut self, incoming: &mut Incoming) -> Result<(), NetworkError> {
        let now = Instant::now();
        while !incoming.schedule.is_full() && incoming.link.unsent() < MOST_UNSENT {
            let Some(request) = incoming.link.next(Request::read)? else {
                break;
            };
            if incoming.has_left {
                return Err(FrameError::AfterLast.into());
            }
            if request == Request::Last {
                incoming.has_left = true;
                incoming.done += 1;
                let peer = &self.shared.peers[incoming.pe];
                peer.has_left.store(true, Ordering::Release);
                continue;
            }
            let pieces = incoming.schedule.push(request, now, &mut self.clock);
            Counts::add(&self.shared.counts.pieces, u64::from(pieces));
        }
        Ok(())
    }

    fn apply(&mut self, incoming: &mut Incoming, batch: &Batch) -> Result<(), NetworkError> {
        let shared = self.shared.clone();
        let held = shared.memory.hold();
        let is_broken = shared.settings.order == Order::Broken;
        if !is_broken {
            self.write_puts(&held, &batch.puts)?;
        }
        for one in &batch.others {
            match &one.request {
                Request::Word { to, size, value } => {
                    let bytes = &value.to_le_bytes()[..usize::from(*size)];
                    self.write(&held, "word", *to, bytes)?;
                }
                Request::Atomic(atomic) => self.change(&held, atomic, &mut incoming.link)?,
                Request::Get { from, bytes, id } => {
                    let bytes = self.read(&held, "get", *from, *bytes)?;
                    let id = *id;
                    Answer::Bytes { id, bytes }.write(incoming.link.output());
                }
                Request::Put { .. } | Request::Fence | Request::Last => {}
            }
        }
        self.mover.wait()?;
        if is_broken {
            self.write_puts(&held, &batch.puts)?;
        }
        drop(held);
        Counts::add(&shared.counts.overtakings, batch.overtakings);
        for one in batch.puts.iter().chain(&batch.others) {
            self.finish(incoming, one);
        }
        Ok(())
    }

    /// Counts a request that has taken effect as a whole.
    fn finish(&mut self, incoming: &mut Incoming, one: &Waiting) {
        if !incoming.schedule.finish(one) {
            return;
        }
        self.applied += 1;
        let counts = &self.shared.counts;
        let (count, is_answered) = match &one.request {
            Request::Put { .. } => (&counts.puts_in, false),
            Request::Get { .. } => (&counts.gets_in, true),
            Request::Atomic(atomic) => (&counts.words_in, atomic.fetch.is_some()),
            _ => (&counts.words_in, false),
        };
        Counts::add(count, 1);
        incoming.done += u64::from(!is_answered);
    }

    fn write_puts(&mut self, held: &Held<'_>, puts: &[Waiting]) -> Result<(), NetworkError> {
        for put in puts {
            if let Request::Put { to, bytes } = &put.request {
                self.write(held, "put", *to, bytes)?;
                Counts::add(&self.shared.counts.bytes_in, bytes.len() as u64);
            }
        }
        self.mover.wait()
    }

    fn place(
        held: &Held<'_>,
        what: &'static str,
        at: u64,
        bytes: usize,
    ) -> Result<Place, NetworkError> {
        held.of_peers(at, bytes)
            .ok_or(NetworkError::Outside { what, bytes, at })
    }

    fn write(
        &mut self,
        held: &Held<'_>,
        what: &'static str,
        to: u64,
        bytes: &[u8],
    ) -> Result<(), NetworkError> {
        if bytes.is_empty() {
            return Ok(());
        }
        let place = Self::place(held, what, to, bytes.len())?;
        // SAFETY: all of it is registered for peers, and held until the mover was waited for.
        unsafe { self.mover.write(to, bytes, place) }
    }

    fn read(
        &mut self,
        held: &Held<'_>,
        what: &'static str,
        from: u64,
        bytes: usize,
    ) -> Result<Vec<u8>, NetworkError> {
        if bytes == 0 {
            return Ok(Vec::new());
        }
        let place = Self::place(held, what, from, bytes)?;
        self.mover.wait()?;
        // SAFETY: all of it is registered for peers, and held until the mover was waited for.
        let range = unsafe { self.mover.read(from, bytes, place)? };
        self.mover.wait_for_reads()?;
        Ok(self.mover.get(range).to_vec())
    }

    /// Changes a word. Only what comes over the network is ordered among itself: a kernel that changes the
    /// same word at this moment may be overwritten.
    fn change(
        &mut self,
        held: &Held<'_>,
        atomic: &AtomicRequest,
        link: &mut Link,
    ) -> Result<(), NetworkError> {
        let size = usize::from(atomic.size);
        let mut old = [0; 8];
        if !atomic.operation.only_writes() || atomic.fetch.is_some() {
            old[..size].copy_from_slice(&self.read(held, "word", atomic.at, size)?);
        }
        let old = u64::from_le_bytes(old);
        let mask = u64::MAX >> (64 - 8 * u32::from(atomic.size));
        let new = atomic
            .operation
            .apply(old, atomic.value, atomic.comparand & mask);
        if let Some(new) = new {
            self.write(held, "word", atomic.at, &new.to_le_bytes()[..size])?;
        }
        if let Some(id) = atomic.fetch {
            self.mover.wait()?;
            Answer::Old { id, value: old }.write(link.output());
        }
        Ok(())
    }
}
