//! The orders, delays and cuts of a network: it decides what takes effect when.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use crate::frame::{HEADER, Request};
use crate::settings::{Order, Settings};

/// Most that waits before no more is taken from a connection.
const MOST_WAITING: usize = 1 << 15;
/// Most bytes of it.
const MOST_BYTES: usize = 64 << 20;
/// Shortest piece: words of so many bytes are never cut, unless the order is [`Order::Broken`].
const WORD: usize = 8;
/// Pieces of words in [`Order::Broken`].
const TORN: usize = 2;
/// Delay of all puts but words in [`Order::Broken`], for somebody to look in between.
const BROKEN: Duration = Duration::from_millis(10);

/// Draws delays, and has a PE's link inwards.
pub(crate) struct Clock {
    settings: Settings,
    dice: SmallRng,
    /// Time at which the link has carried all so far.
    link_is_free: Instant,
}

impl Clock {
    pub(crate) fn new(settings: Settings, stream: u64, now: Instant) -> Self {
        let seed = settings.seed.wrapping_mul(1_000).wrapping_add(stream);
        Self {
            settings,
            dice: SmallRng::seed_from_u64(seed),
            link_is_free: now,
        }
    }

    /// Time at which so many bytes that come now have come over the link.
    fn arrival(&mut self, bytes: usize, now: Instant) -> Instant {
        // Gb/s are bits a nanosecond.
        let ns = (bytes as u64 * 8).checked_div(self.settings.gbit);
        let carried = ns.map(|ns| self.link_is_free.max(now) + Duration::from_nanos(ns));
        self.link_is_free = carried.unwrap_or(now);
        self.link_is_free + Duration::from_micros(self.settings.latency_us)
    }

    fn delay(&mut self, request: &Request) -> Duration {
        let (longest, more) = match request {
            Request::Put { bytes, .. }
                if self.settings.order == Order::Broken && bytes.len() > WORD =>
            {
                (self.settings.delay_us, BROKEN)
            }
            Request::Put { .. } | Request::Get { .. } => (self.settings.delay_us, Duration::ZERO),
            Request::Word { .. } | Request::Atomic(_) => {
                (self.settings.signal_delay_us, Duration::ZERO)
            }
            Request::Fence | Request::Last => (0, Duration::ZERO),
        };
        more + Duration::from_micros(self.dice.random_range(0..=longest))
    }

    /// Whether a put of so many bytes is cut.
    fn cuts(&self, bytes: usize) -> bool {
        let is_torn = self.settings.order == Order::Broken && bytes <= WORD;
        is_torn || self.settings.pieces > 0 && bytes > WORD
    }

    /// Bytes of a put's next piece at an address: words up to the longest piece, each length of twice the
    /// words as likely, up to an aligned place.
    fn piece(&mut self, at: u64, left: usize) -> usize {
        if self.settings.order == Order::Broken && left <= WORD {
            return left.min(TORN);
        }
        let most = (self.settings.pieces / WORD).max(1);
        let doublings = self.dice.random_range(0..=most.ilog2());
        let words = self.dice.random_range(1..=most.min(1 << doublings));
        let before = (at % WORD as u64) as usize;
        (words * WORD - before).min(left)
    }
}

/// A request, or a piece of a put, that has come.
#[derive(Debug)]
pub(crate) struct Waiting {
    /// Number of the request on its connection.
    number: u64,
    due: Instant,
    pub(crate) request: Request,
}

/// All that takes effect now: puts, then all else, unless the order is [`Order::Broken`].
#[derive(Debug, Default)]
pub(crate) struct Batch {
    pub(crate) puts: Vec<Waiting>,
    pub(crate) others: Vec<Waiting>,
    /// Number of them that overtook something.
    pub(crate) overtakings: u64,
}

/// All that has come on a connection and has not taken effect.
#[derive(Debug)]
pub(crate) struct Schedule {
    order: Order,
    waiting: VecDeque<Waiting>,
    bytes: usize,
    /// Pieces that are left of puts that were cut.
    pieces: HashMap<u64, u32>,
    next: u64,
}

impl Schedule {
    pub(crate) fn new(order: Order) -> Self {
        Self {
            order,
            waiting: VecDeque::new(),
            bytes: 0,
            pieces: HashMap::new(),
            next: 0,
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Whether no more should come for now. What waits depends on nothing that comes later.
    pub(crate) fn is_full(&self) -> bool {
        self.waiting.len() >= MOST_WAITING || self.bytes >= MOST_BYTES
    }

    /// Takes a request that came now. Returns the number of pieces that it was cut into, if it was.
    pub(crate) fn push(&mut self, request: Request, now: Instant, clock: &mut Clock) -> u32 {
        let number = self.next;
        self.next += 1;
        self.bytes += weight(&request);
        let arrival = match &request {
            Request::Fence => now,
            Request::Put { bytes, .. } => clock.arrival(HEADER + bytes.len(), now),
            _ => clock.arrival(HEADER, now),
        };
        let (to, whole) = match request {
            Request::Put { to, bytes } if clock.cuts(bytes.len()) => (to, bytes),
            request => {
                let due = arrival + clock.delay(&request);
                self.waiting.push_back(Waiting {
                    number,
                    due,
                    request,
                });
                return 0;
            }
        };
        let (mut at, mut pieces) = (0, 0);
        while at < whole.len() {
            // A target at the end of all addresses is refused when it is written.
            let to = to.wrapping_add(at as u64);
            let bytes = clock.piece(to, whole.len() - at);
            let request = Request::Put {
                to,
                bytes: whole[at..at + bytes].to_vec(),
            };
            let due = arrival + clock.delay(&request);
            self.waiting.push_back(Waiting {
                number,
                due,
                request,
            });
            (at, pieces) = (at + bytes, pieces + 1);
        }
        self.pieces.insert(number, pieces);
        pieces
    }

    /// Takes all that may take effect now. It must have done so before the next call.
    pub(crate) fn take(&mut self, now: Instant, clock: &mut Clock) -> Batch {
        let mut taken = match self.order {
            Order::Fifo => self.take_run(now),
            Order::Fence => self.take_before_fence(now),
            Order::Relaxed | Order::Broken => self.take_any(now),
        };
        if self.order != Order::Fifo {
            taken.shuffle(&mut clock.dice);
        }
        let oldest = self
            .waiting
            .front()
            .map_or(u64::MAX, |waiting| waiting.number);
        let overtakings = taken.iter().filter(|one| one.number > oldest).count() as u64;
        self.bytes -= taken.iter().map(|one| weight(&one.request)).sum::<usize>();
        let is_put = |one: &Waiting| matches!(one.request, Request::Put { .. });
        let (puts, others) = taken.into_iter().partition(is_put);
        Batch {
            puts,
            others,
            overtakings,
        }
    }

    /// The first puts, or the one request that is no put.
    fn take_run(&mut self, now: Instant) -> Vec<Waiting> {
        let mut run: Vec<Waiting> = Vec::new();
        while let Some(first) = self.waiting.front() {
            let is_put = match first.request {
                Request::Fence => {
                    self.waiting.pop_front();
                    continue;
                }
                Request::Put { .. } => true,
                _ => false,
            };
            if first.due > now || !is_put && !run.is_empty() {
                break;
            }
            run.extend(self.waiting.pop_front());
            if !is_put {
                break;
            }
        }
        run
    }

    /// All that is due before the first fence; the fence goes once nothing is before it.
    fn take_before_fence(&mut self, now: Instant) -> Vec<Waiting> {
        while matches!(self.waiting.front(), Some(first) if first.request == Request::Fence) {
            self.waiting.pop_front();
        }
        let is_fence = |one: &Waiting| one.request == Request::Fence;
        let end = self.waiting.iter().position(is_fence);
        let behind = self.waiting.split_off(end.unwrap_or(self.waiting.len()));
        let mut firsts = Firsts::new(self.order);
        let (taken, mut left) = split(std::mem::take(&mut self.waiting), |one| {
            // Each one of an address counts, due or not.
            firsts.has(&one.request) && one.due <= now
        });
        left.extend(behind);
        self.waiting = left;
        taken
    }

    /// All that is due, signals only after the puts before them, and words that are put only after all that
    /// is before a fence before them, unless the order is broken.
    fn take_any(&mut self, now: Instant) -> Vec<Waiting> {
        let is_put = |one: &&Waiting| matches!(one.request, Request::Put { .. });
        let is_fence = |one: &&Waiting| one.request == Request::Fence;
        while self.waiting.front().as_ref().is_some_and(is_fence) {
            self.waiting.pop_front();
        }
        let (first_put, fence) = match self.order {
            Order::Broken => {
                self.waiting.retain(|one| one.request != Request::Fence);
                (None, None)
            }
            _ => (
                self.waiting.iter().find(is_put),
                self.waiting.iter().find(is_fence),
            ),
        };
        let [first_put, fence] =
            [first_put, fence].map(|one| one.map_or(u64::MAX, |one| one.number));
        let mut firsts = Firsts::new(self.order);
        let (taken, left) = split(std::mem::take(&mut self.waiting), |one| {
            let is_free = match &one.request {
                Request::Put { bytes, .. } => bytes.len() > WORD || one.number < fence,
                Request::Get { .. } => true,
                Request::Fence => false,
                _ => one.number < first_put,
            };
            firsts.has(&one.request) && is_free && one.due <= now
        });
        self.waiting = left;
        taken
    }

    /// Whether a request has taken effect as a whole, now that this one has.
    pub(crate) fn finish(&mut self, one: &Waiting) -> bool {
        let Some(left) = self.pieces.get_mut(&one.number) else {
            return true;
        };
        *left -= 1;
        if *left > 0 {
            return false;
        }
        self.pieces.remove(&one.number);
        true
    }
}

/// Bytes that it has, or that its answer will have.
const fn weight(request: &Request) -> usize {
    match request {
        Request::Put { bytes, .. } => bytes.len(),
        Request::Get { bytes, .. } => *bytes,
        _ => 0,
    }
}

fn split(
    all: VecDeque<Waiting>,
    mut is_taken: impl FnMut(&Waiting) -> bool,
) -> (Vec<Waiting>, VecDeque<Waiting>) {
    let (mut taken, mut left) = (Vec::new(), VecDeque::new());
    for one in all {
        if is_taken(&one) {
            taken.push(one);
        } else {
            left.push_back(one);
        }
    }
    (taken, left)
}

/// Finds the first operation on each word that waits. NVSHMEM's own barriers count up in a word, and so rely
/// on the order of what one PE does to it; signals between fences do not.
struct Firsts {
    order: Order,
    seen: HashSet<u64>,
}

impl Firsts {
    fn new(order: Order) -> Self {
        let seen = HashSet::new();
        Self { order, seen }
    }

    fn has(&mut self, request: &Request) -> bool {
        match request {
            Request::Word { to, .. } => self.seen.insert(*to),
            Request::Atomic(atomic) => {
                let is_free = self.order != Order::Fence && atomic.operation.is_signal();
                is_free || self.seen.insert(atomic.at)
            }
            _ => true,
        }
    }
}

#[cfg(test)]
#[path = "schedule_tests.rs"]
mod tests;
