//! Errors of a call for all ranks of a process.

use ferry_layout::Rank;

use crate::error::Error;

/// Error of a call for all ranks of a process, [`Communicator::together`](crate::Communicator::together) or
/// [`Communicator::close_all`](crate::Communicator::close_all).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LocalRanksError {
    /// An argument without one value for each rank. Nothing was launched.
    #[error(
        "{given} {argument} were given, but the call is for {} ranks, {local:?}, and takes one for each",
        local.len()
    )]
    Count {
        /// The argument: "streams", "calls".
        argument: &'static str,
        /// Number of its values.
        given: usize,
        /// The ranks of the call.
        local: Vec<u32>,
    },
    /// Calls of two kinds. Nothing was launched.
    #[error(
        "the call of rank {} is {other}, and that of the first rank is {first}; all ranks make one kind of \
         call together",
        rank.0
    )]
    OtherCall {
        /// Call of the first rank, such as "dispatch".
        first: &'static str,
        /// The first call of another kind.
        other: &'static str,
        /// Its rank.
        rank: Rank,
    },
    /// A check of a rank failed, or the first launch. Nothing was launched, on any rank.
    #[error("rank {}: {source}; nothing was launched on any rank", rank.0)]
    Refused {
        /// The first rank whose check failed, or the rank of the first launch.
        rank: Rank,
        /// Error of the check or the launch.
        source: Box<Error>,
    },
    /// The kernel of a rank could not be launched, and those of ranks before it were. All ranks of the call
    /// return [`Poisoned`](Self::Poisoned) from now on; the kernels that were launched end by their deadline.
    #[error(
        "the launch on rank {} failed, and all ranks of the call must be built anew: {source}",
        rank.0
    )]
    NotLaunched {
        /// The rank.
        rank: Rank,
        /// Error of the launch.
        source: Box<Error>,
    },
    /// An earlier call was [not launched](Self::NotLaunched) on one of its ranks, and this communicator
    /// cannot be used any more.
    #[error(
        "the communicator must be built anew: a call for all ranks of this process could not be launched on \
         rank {}",
        rank.0
    )]
    Poisoned {
        /// The rank without a launch.
        rank: Rank,
    },
    /// A rank was not closed, because the round of another rank is open. Nothing was freed.
    #[error("not closed: the round of rank {} is open; finish it, then close all", other.0)]
    NotClosed {
        /// The first rank whose round is open.
        other: Rank,
    },
    /// No rank at all. Nothing was launched.
    #[error("no communicators were given; the call is for all ranks of this process")]
    NoRanks,
    /// Ranks of two communicators in one call. Nothing was launched.
    #[error(
        "rank {} is of another communicator than rank {}, which is given first; pass ranks that were made \
         together",
        other.0, first.0
    )]
    OtherCommunicator {
        /// The first rank of the call.
        first: Rank,
        /// The first rank of another communicator.
        other: Rank,
    },
    /// A rank that this process drives is not in the call. Nothing was launched.
    #[error(
        "rank {} is missing: ranks {given:?} were given, but the call is for all ranks of this process",
        rank.0
    )]
    Missing {
        /// The first rank that is missing.
        rank: Rank,
        /// The ranks of the call.
        given: Vec<u32>,
    },
}
