//! A link between two ranks that does not do what it should.

use std::collections::VecDeque;

use crate::addresses::rank_of;
use crate::write::{Polled, Write};

/// Simulated time between two writes that arrive over a slow link: many times what a pair of ranks takes to
/// exchange flags.
const SLOW_NS: u64 = 500_000;

/// A link whose writes go wrong: those of one rank to the memory of another one of its node. Puts to other
/// nodes are not affected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadLink {
    /// The rank that writes.
    pub from: u32,
    /// The rank to whose memory it writes.
    pub to: u32,
    /// Its fault.
    pub kind: BadLinkKind,
}

/// Fault of a [`BadLink`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BadLinkKind {
    /// No write arrives.
    Lost,
    /// A bit of every write is another one.
    Corrupt,
    /// A bit of every write but those of flags is another one.
    CorruptRows,
    /// Writes arrive one by one, half a simulated millisecond after each other, but none later than the end
    /// of the launch that made it.
    Slow,
}

/// Fate of a write.
pub enum Fate {
    /// It arrives, as it is now.
    Arrives(Write),
    /// It does not arrive, or not yet.
    Away,
}

/// The bad link of a machine, if it has one, and the writes that are under way on it.
pub struct Links {
    bad: Option<BadLink>,
    /// Each with the time at which it arrives, in order.
    slow: VecDeque<(u64, Write)>,
}

impl Links {
    pub fn new(bad: Option<BadLink>) -> Self {
        Self {
            bad,
            slow: VecDeque::new(),
        }
    }

    /// Takes a write that `from` makes at `now`.
    pub fn take(&mut self, from: u32, mut write: Write, now: u64) -> Fate {
        let to = rank_of(write.address);
        let is_bad = |bad: &BadLink| bad.from == from && to == Some(bad.to as usize);
        match self.bad.filter(is_bad).map(|bad| bad.kind) {
            None => Fate::Arrives(write),
            Some(BadLinkKind::Lost) => Fate::Away,
            Some(BadLinkKind::CorruptRows) if write.polled == Polled::Signal => {
                Fate::Arrives(write)
            }
            Some(BadLinkKind::Corrupt | BadLinkKind::CorruptRows) => {
                write.bytes[0] ^= 0x80;
                Fate::Arrives(write)
            }
            Some(BadLinkKind::Slow) => {
                let last = self.slow.back().map_or(now, |(due, _)| *due);
                self.slow.push_back((last.max(now) + SLOW_NS, write));
                Fate::Away
            }
        }
    }

    /// Time at which the next write arrives, if one is under way.
    pub fn next_due(&self) -> Option<u64> {
        self.slow.front().map(|(due, _)| *due)
    }

    /// The next write under way, which arrives now.
    pub fn arrive(&mut self) -> Option<Write> {
        self.slow.pop_front().map(|(_, write)| write)
    }

    /// Whether writes of `rank` are under way.
    pub fn are_of(&self, rank: u32) -> bool {
        !self.slow.is_empty() && self.bad.is_some_and(|bad| bad.from == rank)
    }
}
