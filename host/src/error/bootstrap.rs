//! Errors of a bootstrap.

use std::net::SocketAddr;

use ferry_layout::MAX_RANKS;

/// Reason why the processes did not find each other.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BootstrapError {
    /// A rank outside the group.
    #[error("rank {rank} is not among {ranks} ranks (rendezvous at {address})")]
    RankOutOfRange {
        /// The rank.
        rank: u32,
        /// Size of the group.
        ranks: u32,
        /// Address of the rendezvous.
        address: SocketAddr,
    },
    /// Two processes with one rank, or a process that was started again before rank 0 noticed that
    /// the connection of its predecessor is dead.
    #[error(
        "rank {rank} has joined at {address} already: another process was started with the same rank, or the \
         connection of one that is gone is still open (its machine lost power, or its network broke)"
    )]
    DuplicateRank {
        /// The rank.
        rank: u32,
        /// Address of the rendezvous.
        address: SocketAddr,
    },
    /// Processes disagree on the size of the group. On rank 0 only after its timeout, if
    /// no other process has come as that rank.
    #[error(
        "rank {rank} expects {ours} ranks, but rank {peer} expects {theirs} (rendezvous at {address})"
    )]
    WorldSize {
        /// This rank.
        rank: u32,
        /// The size on this rank.
        ours: u32,
        /// The other rank.
        peer: u32,
        /// The size on the other rank.
        theirs: u32,
        /// Address of the rendezvous.
        address: SocketAddr,
    },
    /// An empty key.
    #[error("a key has at least one byte, and this one has none")]
    EmptyKey,
    /// Processes with different keys. On rank 0 only after its timeout, if no other process has
    /// come as that rank.
    #[error(
        "rank {rank} has {} key, and rank {peer} at {address} has {}: all or none have one, the same",
        if *.ours { "a" } else { "no" },
        match (.ours, .theirs) {
            (true, true) => "another",
            (_, true) => "one",
            (_, false) => "none",
        },
    )]
    OtherKey {
        /// This rank.
        rank: u32,
        /// Whether it has a key.
        ours: bool,
        /// The other rank, or a process that claims to be it.
        peer: u32,
        /// Whether it has a key. It may also have one that it did not prove.
        theirs: bool,
        /// Address of the other process.
        address: SocketAddr,
    },
    /// Some ranks did not come.
    #[error("ranks {missing:?} of {ranks} did not come to {address} within {seconds} s")]
    MissingRanks {
        /// Ranks that did not come.
        missing: Vec<u32>,
        /// Size of the group.
        ranks: u32,
        /// Address of the rendezvous.
        address: SocketAddr,
        /// Time that rank 0 waited.
        seconds: f64,
    },
    /// Rank 0 ended the rendezvous; its own error says why.
    #[error("rank 0 at {address} gave up the rendezvous; its own error says why")]
    GivenUp {
        /// Address of the rendezvous.
        address: SocketAddr,
    },
    /// A rank did not answer. Rank 0 answers when all have come: if `peer` is 0, it may be there
    /// and wait for another rank, and no rank is known to be lost.
    #[error("rank {peer} at {address} did not answer within {seconds} s ({doing})")]
    Timeout {
        /// The rank.
        peer: u32,
        /// Its address.
        address: SocketAddr,
        /// The step at that time.
        doing: &'static str,
        /// Length of the wait.
        seconds: f64,
    },
    /// A rank speaks another protocol, another version of it, or makes other calls.
    #[error(
        "rank {peer} at {address} sent something unexpected ({doing}): wanted {wanted:#x}, got {got:#x}"
    )]
    Unexpected {
        /// The rank.
        peer: u32,
        /// Its address.
        address: SocketAddr,
        /// The step at that time.
        doing: &'static str,
        /// Expected value.
        wanted: u64,
        /// Received value.
        got: u64,
    },
    /// The connection to a rank failed.
    #[error("connection to rank {peer} at {address} failed ({doing}): {source}")]
    Io {
        /// The rank.
        peer: u32,
        /// Its address.
        address: SocketAddr,
        /// The step at that time.
        doing: &'static str,
        /// Error of the system.
        source: std::io::Error,
    },
    /// A rank was lost: its process ended, its connection broke, it broke the protocol,
    /// or rank 0 waited for it in vain. Reported by another rank, or known from an earlier call.
    #[error("rank {rank} was lost: {reason}")]
    Lost {
        /// The lost rank.
        rank: u32,
        /// Reason, in words of the rank that noticed.
        reason: String,
    },
    /// A rank gave up, and no rank is known to be lost: rank 0 came late, or waited for a rank that did.
    /// Reported by that rank, or known from an earlier call.
    #[error("rank {rank} gave up: {reason}")]
    GaveUp {
        /// The rank that gave up.
        rank: u32,
        /// Its reason.
        reason: String,
    },
    /// A group of too many ranks.
    #[error("ranks is {ranks}, but a group has at most {MAX_RANKS}")]
    TooManyRanks {
        /// Number of ranks.
        ranks: u32,
    },
    /// A rank that is not in the group.
    #[error("rank {rank} is not among {ranks} ranks")]
    NotAmong {
        /// The rank.
        rank: u32,
        /// Size of the group.
        ranks: u32,
    },
    /// An all-gather that did not return the bytes of each rank.
    #[error("an all-gather of {ranks} ranks returned the bytes of {given}")]
    Gathered {
        /// Number of ranks whose bytes it returned.
        given: usize,
        /// Size of the group.
        ranks: u32,
    },
    /// An all-gather that returned other bytes for this rank than this rank passed.
    #[error(
        "an all-gather returned other bytes for rank {rank} than that rank passed; bytes are ordered by \
         rank, as all processes number them"
    )]
    OtherPlace {
        /// This rank.
        rank: u32,
    },
    /// Another transport failed: MPI, or an engine's own.
    #[error("{call} failed: {reason}")]
    Other {
        /// The call.
        call: &'static str,
        /// Its error.
        reason: String,
    },
}

impl BootstrapError {
    /// The rank that was lost, or broke the protocol, after the processes had met. `None`
    /// if it is not known: with a [`Timeout`](Self::Timeout) on rank 0 (`peer` is 0) and with
    /// [`GaveUp`](Self::GaveUp), all may be there.
    pub const fn lost_rank(&self) -> Option<u32> {
        match self {
            Self::Timeout { peer: 0, .. } => None,
            Self::Lost { rank: peer, .. }
            | Self::Io { peer, .. }
            | Self::Timeout { peer, .. }
            | Self::Unexpected { peer, .. } => Some(*peer),
            _ => None,
        }
    }
}
