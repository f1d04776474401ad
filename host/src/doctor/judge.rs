//! Links from what both of their ranks found.

use std::time::Duration;

use ferry_layout::{LinkOutcome, LinkRecord, LinkTest, Rank};

use crate::error::links::{Link, LinkReport, LinkState};

/// A link is slow if it takes so many times the median.
const SLOW_TIMES: u32 = 10;

/// Longest time that fits beside the outcomes in a word: half a year.
const MOST_NS: u64 = u64::MAX >> 10;

/// Findings of a rank with a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cell {
    /// Answers to what it sent.
    sent: LinkOutcome,
    /// Outcome of what the peer sent.
    received: LinkOutcome,
    /// Nanoseconds until all answers had come; 0 if one did not.
    ns: u64,
}

impl Cell {
    pub(super) const NONE: Self = Self {
        sent: LinkOutcome::NotRun,
        received: LinkOutcome::NotRun,
        ns: 0,
    };

    /// Returns what the warps of a rank found together, from the record of each row. The error is the number
    /// of a row for which the kernel has not left one.
    pub(super) fn of(records: &[LinkRecord]) -> Result<Self, usize> {
        let (mut sent, mut received) = (LinkOutcome::NotRun, LinkOutcome::NotRun);
        for (row, record) in records.iter().enumerate() {
            let outcome = |number| match LinkOutcome::of_number(number) {
                None | Some(LinkOutcome::NotRun) => Err(row),
                Some(outcome) => Ok(outcome),
            };
            sent = worse(sent, outcome(record.sent)?);
            received = worse(received, outcome(record.received)?);
        }
        let begun = records.iter().map(|record| record.begun).min().unwrap_or(0);
        let ended = records.iter().map(|record| record.ended).max().unwrap_or(0);
        let ns = match sent {
            LinkOutcome::Well => ended.saturating_sub(begun).clamp(1, MOST_NS),
            _ => 0,
        };
        Ok(Self { sent, received, ns })
    }

    /// Both, as one word.
    pub(super) const fn word(self) -> u64 {
        self.sent as u64 | (self.received as u64) << 2 | self.ns << 4
    }

    /// The cell of a [`word`](Self::word).
    pub(super) fn of_word(word: u64) -> Self {
        let outcome = |shift: u32| LinkOutcome::of_number((word >> shift & 3) as u32);
        Self {
            sent: outcome(0).unwrap_or(LinkOutcome::NotRun),
            received: outcome(2).unwrap_or(LinkOutcome::NotRun),
            ns: word >> 4,
        }
    }

    /// The worse outcomes and the shorter time of two launches.
    fn merge(self, other: Self) -> Self {
        let sent = worse(self.sent, other.sent);
        Self {
            sent,
            received: worse(self.received, other.received),
            ns: match (sent, self.ns, other.ns) {
                (LinkOutcome::Well, 0, ns) | (LinkOutcome::Well, ns, 0) => ns,
                (LinkOutcome::Well, a, b) => a.min(b),
                _ => 0,
            },
        }
    }
}

/// The worse of two outcomes.
const fn worse(a: LinkOutcome, b: LinkOutcome) -> LinkOutcome {
    if a as u32 >= b as u32 { a } else { b }
}

/// Findings of each rank with each peer in a test.
pub(super) struct Cells {
    ranks: u32,
    cells: Vec<Cell>,
}

impl Cells {
    /// Nothing yet.
    pub(super) fn none(ranks: u32) -> Self {
        let cells = vec![Cell::NONE; (ranks * ranks) as usize];
        Self { ranks, cells }
    }

    /// Bits of each rank, one for each other one.
    pub(super) fn all_peers(ranks: u32) -> Vec<u64> {
        let all = u64::MAX >> (u64::BITS - ranks);
        (0..ranks).map(|rank| all & !(1 << rank)).collect()
    }

    const fn index(&self, rank: Rank, peer: Rank) -> usize {
        (rank.0 * self.ranks + peer.0) as usize
    }

    fn get(&self, rank: Rank, peer: Rank) -> Cell {
        self.cells[self.index(rank, peer)]
    }

    fn set(&mut self, rank: Rank, peer: Rank, cell: Cell) {
        let index = self.index(rank, peer);
        self.cells[index] = cell;
    }

    /// Adds what a rank found with a peer in another launch.
    pub(super) fn merge(&mut self, rank: Rank, peer: Rank, found: Cell) {
        self.set(rank, peer, self.get(rank, peer).merge(found));
    }

    /// State of a link, but for its time. A rank that was sent nothing answers nothing: what is missing is
    /// the link's own fault if it was sent, or if it is the answer to what has arrived.
    fn state(&self, from: Rank, to: Rank) -> LinkState {
        let there = self.get(to, from);
        match (there.received, there.sent) {
            (LinkOutcome::NotRun, _) => LinkState::NotRun,
            (LinkOutcome::Missing, _) => LinkState::Lost,
            (LinkOutcome::Wrong, _) => LinkState::Corrupt,
            (LinkOutcome::Well, LinkOutcome::Wrong) => LinkState::Corrupt,
            (LinkOutcome::Well, LinkOutcome::Missing)
                if self.get(from, to).received == LinkOutcome::Well =>
            {
                LinkState::Lost
            }
            (LinkOutcome::Well, _) => LinkState::Well,
        }
    }

    /// Removes the pairs of bad links from each rank's `peers`.
    pub(super) fn leave_out_bad(&self, peers: &mut [u64]) {
        for from in 0..self.ranks {
            for to in 0..self.ranks {
                if self.state(Rank(from), Rank(to)).is_bad() {
                    peers[from as usize] &= !(1 << to);
                    peers[to as usize] &= !(1 << from);
                }
            }
        }
    }
}

/// Adds the links of a test that sends `bytes` to a report. Times up to `floor` are not slow.
pub(super) fn judge(
    report: &mut LinkReport,
    (test, bytes): (LinkTest, u64),
    floor: Duration,
    cells: &Cells,
) {
    let ranks = || (0..report.ranks).map(Rank);
    let pairs = ranks().flat_map(|from| ranks().map(move |to| (from, to)));
    let links = pairs.filter(|(from, to)| from != to).map(|(from, to)| {
        let ns = cells.get(from, to).ns;
        Link {
            from,
            to,
            test,
            bytes,
            state: cells.state(from, to),
            time: (ns > 0).then(|| Duration::from_nanos(ns)),
        }
    });
    let links: Vec<_> = links.collect();
    let first = report.links.len();
    report.links.extend(links);
    let (true, Some(median)) = (report.judges_times, report.median(test)) else {
        return;
    };
    let usual = report.median(LinkTest::Flag).unwrap_or_default();
    let (earlier, links) = report.links.split_at_mut(first);
    for (at, link) in links.iter_mut().enumerate() {
        let Some(time) = link.time else { continue };
        // Whose answers come over a slow link is not slow itself.
        let (own, waits) = match test {
            // By as much as a flag and its answer, which are tested first, are late.
            LinkTest::Rows => {
                let late = flag_time(earlier, at).saturating_sub(usual);
                (time.saturating_sub(late), false)
            }
            _ => {
                let back = cells.get(link.to, link.from).ns;
                (time, Duration::from_nanos(back) >= 2 * time)
            }
        };
        let is_slow = own >= median * SLOW_TIMES && own > floor && !waits;
        if link.state == LinkState::Well && is_slow {
            link.state = LinkState::Slow;
        }
    }
}

/// Time of a flag and its answer over link `at` of a test, from the links of all earlier tests.
fn flag_time(earlier: &[Link], at: usize) -> Duration {
    let flag = earlier.get(at);
    let flag = flag.filter(|link| link.test == LinkTest::Flag);
    flag.and_then(|link| link.time).unwrap_or_default()
}

#[cfg(test)]
#[path = "judge_tests.rs"]
mod tests;
