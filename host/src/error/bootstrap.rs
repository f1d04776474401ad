//! Errors of a bootstrap.

use std::net::SocketAddr;

use ferry_layout::MAX_RANKS;

/// Why the processes did not find each other.
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
        /// Where they meet.
        address: SocketAddr,
    },
    /// Two processes call themselves the same, or a process was started again before rank 0 could see that
    /// the connection of the one before is dead.
    #[error(
        "rank {rank} has joined at {address} already: another process was started with the same rank, or the \
         connection of one that is gone is still open (its machine lost power, or its network broke)"
    )]
    DuplicateRank {
        /// The rank.
        rank: u32,
        /// Where they meet.
        address: SocketAddr,
    },
    /// Processes do not agree on the size of the group. On rank 0 only when its time is over and
    /// nobody else has come as that rank.
    #[error(
        "rank {rank} expects {ours} ranks, but rank {peer} expects {theirs} (rendezvous at {address})"
    )]
    WorldSize {
        /// This rank.
        rank: u32,
        /// The size here.
        ours: u32,
        /// The other rank.
        peer: u32,
        /// The size there.
        theirs: u32,
        /// Where they meet.
        address: SocketAddr,
    },
    /// A key of no bytes.
    #[error("a key has at least one byte, and this one has none")]
    EmptyKey,
    /// Processes do not have the same key. On rank 0 only when its time is over and nobody else has
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
        /// The other rank, or who calls itself so.
        peer: u32,
        /// Whether that has a key. It may also have one that it did not prove.
        theirs: bool,
        /// Where the other is.
        address: SocketAddr,
    },
    /// Not everybody came.
    #[error("ranks {missing:?} of {ranks} did not come to {address} within {seconds} s")]
    MissingRanks {
        /// Who did not come.
        missing: Vec<u32>,
        /// Size of the group.
        ranks: u32,
        /// Where they meet.
        address: SocketAddr,
        /// How long rank 0 waited.
        seconds: f64,
    },
    /// Rank 0 ended the rendezvous; its own error says why.
    #[error("rank 0 at {address} gave up the rendezvous; its own error says why")]
    GivenUp {
        /// Where they meet.
        address: SocketAddr,
    },
    /// A rank did not answer. Rank 0 answers when all have come: where `peer` is 0, it may be there
    /// and wait for another, and nobody is known to be lost.
    #[error("rank {peer} at {address} did not answer within {seconds} s ({doing})")]
    Timeout {
        /// Who was waited for.
        peer: u32,
        /// Where it is.
        address: SocketAddr,
        /// What was going on.
        doing: &'static str,
        /// How long.
        seconds: f64,
    },
    /// A rank speaks another protocol, another version of it, or makes other calls.
    #[error(
        "rank {peer} at {address} sent something unexpected ({doing}): wanted {wanted:#x}, got {got:#x}"
    )]
    Unexpected {
        /// Who.
        peer: u32,
        /// Where it is.
        address: SocketAddr,
        /// What was going on.
        doing: &'static str,
        /// What was wanted.
        wanted: u64,
        /// What came.
        got: u64,
    },
    /// The connection to a rank failed.
    #[error("connection to rank {peer} at {address} failed ({doing}): {source}")]
    Io {
        /// Who.
        peer: u32,
        /// Where it is.
        address: SocketAddr,
        /// What was going on.
        doing: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
    /// A rank was lost: its process ended, its connection broke, it did not keep to the protocol,
    /// or rank 0 waited for it in vain. Told by another rank, or known from an earlier call.
    #[error("rank {rank} was lost: {reason}")]
    Lost {
        /// The lost one.
        rank: u32,
        /// What the rank that saw it said.
        reason: String,
    },
    /// A rank gave up, and nobody is known to be lost: rank 0 came late, or waited for a rank that did. Told
    /// by that rank, or known from an earlier call.
    #[error("rank {rank} gave up: {reason}")]
    GaveUp {
        /// Who gave up.
        rank: u32,
        /// Its reason.
        reason: String,
    },
    /// A group of more ranks than Ferry's have.
    #[error("ranks is {ranks}, but a group has at most {MAX_RANKS}")]
    TooManyRanks {
        /// How many it would have.
        ranks: u32,
    },
    /// A rank that a group does not have.
    #[error("rank {rank} is not among {ranks} ranks")]
    NotAmong {
        /// The rank.
        rank: u32,
        /// Size of the group.
        ranks: u32,
    },
    /// An all-gather that did not give one rank's bytes for each rank.
    #[error("an all-gather of {ranks} ranks gave the bytes of {given}")]
    Gathered {
        /// How many it gave.
        given: usize,
        /// Size of the group.
        ranks: u32,
    },
    /// An all-gather that put something else in this rank's place than this rank gave.
    #[error(
        "an all-gather gave rank {rank} other bytes in its own place than it had given; bytes come by \
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
        /// What it said.
        reason: String,
    },
}

impl BootstrapError {
    /// The rank that was lost, or did not keep to the protocol, once the processes had met. `None`
    /// where that is not known: of a [`Timeout`](Self::Timeout) on rank 0 (`peer` is 0) and of
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
