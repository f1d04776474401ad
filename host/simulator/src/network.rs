//! Puts between nodes, which travel in parts.

use rand::Rng;
use rand_chacha::ChaCha8Rng;

use crate::memory::{Memory, Outside};

/// Largest part of a row, in bytes.
const MAX_PART_BYTES: u64 = 512;
/// Bytes of a word, which is never torn.
const WORD_BYTES: u64 = 8;
/// One of so many puts is held back until nothing else can be done: if nobody waits for it, it arrives after
/// its round.
const HELD_ONE_IN: u32 = 16;

/// A rank whose way to other nodes takes no more puts.
#[derive(Clone, Copy, Debug)]
pub struct Stalled {
    /// Its number, below [`Options::ranks`](crate::Options::ranks).
    pub rank: u32,
    /// Number of its puts after which it stalls.
    pub after_puts: u64,
}

/// A put as a warp issues it. All positions are addresses.
pub struct Sent {
    /// The rank that sends, and the number of its warp among all that were ever started.
    pub sender: (u32, u64),
    /// The rank to which it goes.
    pub peer: u32,
    pub from: u64,
    pub to: u64,
    pub bytes: u64,
    /// Whether it is of words rather than of a row.
    pub is_words: bool,
}

/// A part of a put, read from its source when it is delivered.
struct Part {
    from: u64,
    to: u64,
    bytes: u64,
}

/// A put under way.
struct Flight {
    sender: (u32, u64),
    peer: u32,
    /// Fences that its warp had issued before.
    fences: u64,
    parts: Vec<Part>,
    is_held: bool,
}

impl Flight {
    /// Whether a fence of its warp keeps it behind `other`.
    fn is_behind(&self, other: &Self) -> bool {
        (self.sender, self.peer) == (other.sender, other.peer) && self.fences > other.fences
    }
}

pub struct Network {
    flights: Vec<Flight>,
    stalled: Option<Stalled>,
    /// Puts of the rank that stalls.
    sent: u64,
}

/// A part that has arrived.
pub struct Delivered {
    pub to: u64,
    pub bytes: Vec<u8>,
}

impl Network {
    pub fn new(stalled: Option<Stalled>) -> Self {
        Self {
            flights: Vec::new(),
            stalled,
            sent: 0,
        }
    }

    /// Whether it takes puts of a rank.
    pub fn has_room(&self, rank: u32) -> bool {
        self.stalled
            .is_none_or(|stalled| stalled.rank != rank || self.sent < stalled.after_puts)
    }

    /// Sends a put of a warp that has issued so many fences.
    pub fn send(&mut self, sent: &Sent, fences: u64, rng: &mut ChaCha8Rng) {
        let part_bytes = match sent.is_words {
            true => WORD_BYTES,
            false => MAX_PART_BYTES,
        };
        let parts = (0..sent.bytes)
            .step_by(part_bytes as usize)
            .map(|at| Part {
                from: sent.from + at,
                to: sent.to + at,
                bytes: part_bytes.min(sent.bytes - at),
            })
            .collect();
        self.sent += u64::from(
            self.stalled
                .is_some_and(|stalled| stalled.rank == sent.sender.0),
        );
        self.flights.push(Flight {
            sender: sent.sender,
            peer: sent.peer,
            fences,
            parts,
            is_held: rng.random_ratio(1, HELD_ONE_IN),
        });
    }

    pub fn is_empty(&self) -> bool {
        self.flights.is_empty()
    }

    /// Delivers a part: `None` if it is of a put that is held back, unless `all` may arrive.
    pub fn deliver(
        &mut self,
        all: bool,
        memory: &mut Memory,
        rng: &mut ChaCha8Rng,
    ) -> Result<Option<Delivered>, Outside> {
        let mut index = rng.random_range(0..self.flights.len());
        let behind = |index: usize| {
            let flight = &self.flights[index];
            let mut others = self.flights.iter();
            others.position(|other| flight.is_behind(other))
        };
        // Each has fewer fences before it than the last one.
        while let Some(before) = behind(index) {
            index = before;
        }
        let flight = &mut self.flights[index];
        if flight.is_held && !all {
            return Ok(None);
        }
        let part = rng.random_range(0..flight.parts.len());
        let Part { from, to, bytes } = flight.parts.swap_remove(part);
        if flight.parts.is_empty() {
            self.flights.swap_remove(index);
        }
        let bytes = memory.read(from, bytes)?.to_vec();
        memory.write(to, &bytes)?;
        Ok(Some(Delivered { to, bytes }))
    }

    /// Discards the puts of a lost rank.
    pub fn lose(&mut self, rank: u32) {
        self.flights.retain(|flight| flight.sender.0 != rank);
    }
}
