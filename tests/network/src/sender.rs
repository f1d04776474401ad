//! The agent at the source: reads this PE's memory and sends it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use crate::error::{FrameError, NetworkError};
use crate::frame::{self, Answer};
use crate::link::Link;
use crate::mover::Mover;
use crate::settings::Loss;
use crate::shared::{Idle, Op, Pending, Shared};

/// Bytes that wait for a socket before no more are read from memory.
const MOST_UNSENT: usize = 16 << 20;
/// Longest that a PE's last words may come after it closed a connection.
const GRACE: Duration = Duration::from_secs(5);
/// Most operations whose sources are read at once.
const MOST_AT_ONCE: usize = 256;

/// A connection to a PE.
pub(crate) struct Outgoing {
    pe: usize,
    link: Link,
    /// Operations, and when their sources are read.
    taken: VecDeque<(Op, Instant)>,
    /// Since when the connection is closed.
    closed: Option<Instant>,
}

impl Outgoing {
    pub(crate) const fn new(pe: usize, link: Link) -> Self {
        Self {
            pe,
            link,
            taken: VecDeque::new(),
            closed: None,
        }
    }
}

/// The agent at the source.
pub(crate) struct Sender {
    shared: Arc<Shared>,
    mover: Mover,
    dice: SmallRng,
}

impl Sender {
    pub(crate) fn new(shared: Arc<Shared>, mover: Mover) -> Self {
        let seed = shared.settings.seed.wrapping_mul(7_777);
        let dice = SmallRng::seed_from_u64(seed.wrapping_add(shared.pe as u64));
        Self {
            shared,
            mover,
            dice,
        }
    }

    /// Sends until it is to end, and all is sent.
    pub(crate) fn run(mut self, mut all: Vec<Outgoing>) -> Result<(), NetworkError> {
        let shared = self.shared.clone();
        if let Some(context) = &shared.context {
            context.enter()?;
        }
        let mut idle = Idle::default();
        while !shared.stops.load(Ordering::Relaxed) {
            // Before the queues are looked at: nothing is asked after it.
            let is_closing = shared.is_closing.load(Ordering::Acquire);
            let mut is_busy = false;
            for outgoing in &mut all {
                if shared.dropped_out() == Some(Loss::Hang) {
                    break;
                }
                match self.step(outgoing) {
                    Ok(any) => is_busy |= any,
                    Err(error) => {
                        outgoing.link.close();
                        shared.fail(&format!("answers of PE {}: {error}", outgoing.pe));
                    }
                }
            }
            // A connection that closes with answers in it may take requests along.
            if is_closing
                && all
                    .iter()
                    .all(|one| one.link.is_closed() || shared.is_quiet(one.pe))
            {
                return Ok(());
            }
            idle.after(is_busy);
        }
        Ok(())
    }

    /// Whether there was anything to do.
    fn step(&mut self, outgoing: &mut Outgoing) -> Result<bool, NetworkError> {
        let shared = self.shared.clone();
        let Outgoing {
            pe,
            link,
            taken,
            closed,
        } = outgoing;
        if shared.dropped_out().is_some() {
            link.close();
        }
        let now = Instant::now();
        for op in shared.peers[*pe].queue().ops.drain(..) {
            let late = self.dice.random_range(0..=shared.settings.late_read_us);
            taken.push_back((op, now + Duration::from_micros(late)));
        }
        let mut is_busy = link.fill();
        self.answers(*pe, link)?;
        if link.is_closed() {
            // A PE that ends says so on its other connection, which this PE's other agent reads.
            let since = closed.get_or_insert(now).elapsed();
            let has_left = shared.peers[*pe].has_left.load(Ordering::Acquire);
            if has_left || since > GRACE || shared.dropped_out().is_some() {
                shared.lose(*pe, "it closed its connection to this PE's requests");
            }
            taken.clear();
            return Ok(is_busy);
        }
        let before = taken.len();
        self.send(taken, link)?;
        is_busy |= taken.len() < before;
        is_busy |= link.flush();
        Ok(is_busy)
    }

    /// Reads the sources of operations that are due, as many as are staged at once, and sends them.
    fn send(
        &mut self,
        ops: &mut VecDeque<(Op, Instant)>,
        link: &mut Link,
    ) -> Result<(), NetworkError> {
        let now = Instant::now();
        while link.unsent() < MOST_UNSENT {
            let mut batch = Vec::new();
            while let Some((op, _)) = ops.pop_front_if(|(op, due)| {
                let fits = match op {
                    Op::Put { bytes, .. } => self.mover.has_room(*bytes),
                    Op::Send(_) => true,
                };
                *due <= now && fits && batch.len() < MOST_AT_ONCE
            }) {
                let source = match op {
                    Op::Put { from, bytes, .. } => {
                        let place = self.shared.own_place(from, bytes);
                        // SAFETY: NVSHMEM's caller keeps the source of a put until a quiet.
                        Some(unsafe { self.mover.read(from, bytes, place)? })
                    }
                    Op::Send(_) => None,
                };
                batch.push((op, source));
            }
            if batch.is_empty() {
                return Ok(());
            }
            self.mover.wait_for_reads()?;
            for (op, source) in batch {
                match op {
                    Op::Put { to, bytes, .. } => frame::write_put(link.output(), to, bytes),
                    Op::Send(request) => request.write(link.output()),
                }
                if let Some(source) = source {
                    link.output().extend_from_slice(self.mover.get(source));
                }
            }
            self.mover.wait()?;
            link.flush();
        }
        Ok(())
    }

    /// Takes what the peer says of earlier requests.
    fn answers(&mut self, pe: usize, link: &mut Link) -> Result<(), NetworkError> {
        let shared = self.shared.clone();
        let peer = &shared.peers[pe];
        while let Some(answer) = link.next(Answer::read)? {
            match answer {
                Answer::Done(count) => {
                    let so_far = peer.acknowledged.load(Ordering::Relaxed);
                    let asked = peer.queue().to_acknowledge;
                    if count < so_far || count > asked {
                        return Err(FrameError::Acknowledged(count, so_far, asked).into());
                    }
                    peer.acknowledged.store(count, Ordering::Release);
                }
                Answer::Bytes { id, bytes } => {
                    let pending = peer.queue().pending.remove(&id);
                    let Some(Pending::Get { to, bytes: wanted }) = pending else {
                        return Err(FrameError::Answer(id).into());
                    };
                    if bytes.len() != wanted {
                        return Err(FrameError::AnswerLength(id, bytes.len(), wanted).into());
                    }
                    self.store(to, &bytes)?;
                    peer.answered.fetch_add(1, Ordering::Release);
                }
                Answer::Old { id, value } => {
                    let pending = peer.queue().pending.remove(&id);
                    let Some(Pending::Fetch { to, flag }) = pending else {
                        return Err(FrameError::Answer(id).into());
                    };
                    self.store(to, &value.to_le_bytes())?;
                    // A kernel waits for it.
                    self.store(to.wrapping_add(8), &flag.to_le_bytes())?;
                    peer.answered.fetch_add(1, Ordering::Release);
                }
            }
        }
        Ok(())
    }

    fn store(&mut self, to: u64, bytes: &[u8]) -> Result<(), NetworkError> {
        let place = self.shared.own_place(to, bytes.len());
        // SAFETY: this PE named the place in its request, and waits for the answer.
        unsafe { self.mover.write(to, bytes, place)? };
        self.mover.wait()
    }
}
