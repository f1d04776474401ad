//! The links between ranks, as a check found them.

mod advice;
mod table;

use std::time::Duration;

use ferry_layout::{LinkTest, Rank};

/// Outcome of a test of a [`Link`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LinkState {
    /// Everything arrived, as it was sent.
    Well,
    /// Something did not arrive.
    Lost,
    /// Something else arrived than was sent.
    Corrupt,
    /// Everything arrived, but it took at least ten times the median of all links, and more than 20 µs.
    Slow,
    /// The pair of ranks was left out, as an earlier test of it was [`Lost`](Self::Lost) or
    /// [`Corrupt`](Self::Corrupt).
    NotRun,
}

impl LinkState {
    /// Whether a link in this state is named as a bad one.
    pub const fn is_bad(self) -> bool {
        matches!(self, Self::Lost | Self::Corrupt | Self::Slow)
    }
}

/// A test of the stores of one rank to the memory of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// The rank that stores.
    pub from: Rank,
    /// The rank to whose memory it stores.
    pub to: Rank,
    /// Kind of what it stores.
    pub test: LinkTest,
    /// Bytes of that.
    pub bytes: u64,
    /// Outcome.
    pub state: LinkState,
    /// Shortest time from the first store until [`from`](Self::from) saw the answer, a flag of 8 bytes from
    /// [`to`](Self::to), on the clock of its GPU; `None` if there was none.
    pub time: Option<Duration>,
}

impl Link {
    /// Bytes a second, with the time of the answer; `None` without a [`time`](Self::time).
    pub fn rate(&self) -> Option<f64> {
        let time = self.time?.as_secs_f64();
        (time > 0.0).then(|| self.bytes as f64 / time)
    }
}

/// Result of [`Group::check_links`](crate::Group::check_links): every ordered pair of ranks in every test.
/// Its [`Display`](std::fmt::Display) is a table for each test, then the bad links and what to look at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkReport {
    /// Ranks of the group.
    pub ranks: u32,
    /// Kind of the group: "local", "node", "nvshmem", "simulated".
    pub group: &'static str,
    /// Whether slow links were looked for: not if ranks share a GPU, where they wait for each other.
    pub judges_times: bool,
    /// Every link, by test, then by the rank that stores, then by the other one.
    pub links: Vec<Link>,
}

impl LinkReport {
    /// Links of which a test went wrong.
    pub fn bad(&self) -> impl Iterator<Item = &Link> {
        self.links.iter().filter(|link| link.state.is_bad())
    }

    /// Whether no link is [bad](Self::bad).
    pub fn is_well(&self) -> bool {
        self.bad().next().is_none()
    }

    /// The links of a test.
    fn of(&self, test: LinkTest) -> impl Iterator<Item = &Link> {
        self.links.iter().filter(move |link| link.test == test)
    }

    /// Median of the times of a test, the lower one of two; `None` if nothing was answered.
    pub fn median(&self, test: LinkTest) -> Option<Duration> {
        let mut times: Vec<_> = self.of(test).filter_map(|link| link.time).collect();
        times.sort_unstable();
        times.get(times.len().saturating_sub(1) / 2).copied()
    }
}

/// Error of the check of a group's links.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LinksError {
    /// Links are bad; the message names them. The report has all.
    #[error("{}", advice::sentence(.0))]
    Bad(Box<LinkReport>),
    /// A group of processes of which this one drives several ranks.
    #[error(
        "check_links: this process drives ranks {local:?} of {ranks}; of a group of processes, each has one \
         rank"
    )]
    SomeRanks {
        /// The ranks that this process drives.
        local: Vec<u32>,
        /// Ranks of the group.
        ranks: u32,
    },
    /// A row that a rank was to send and to receive, and its kernel did not test.
    #[error("check_links: rank {} has not tested row {row} with rank {}", rank.0, peer.0)]
    Untested {
        /// The rank.
        rank: Rank,
        /// The other one.
        peer: Rank,
        /// Number of the row.
        row: usize,
    },
}
