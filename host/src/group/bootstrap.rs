//! Exchange of bytes between processes before they have a group.

mod accept;
pub(crate) mod function;
mod hello;
mod join;
mod key;
mod newcomer;
mod peer;
pub(crate) mod tcp;

use ferry_layout::MAX_RANKS;

use crate::error::bootstrap::BootstrapError;

/// Exchanges a few bytes between the processes of a group, one per rank: MPI, TCP, or an
/// all-gather of your engine ([`FnBootstrap`](crate::bootstrap::FnBootstrap)).
///
/// All ranks make the same calls in the same order. Every wait must end, with an error that names
/// the lost rank if it is known ([`BootstrapError::lost_rank`]), and after an error
/// each later call should fail at once, as [`TcpBootstrap`](crate::bootstrap::TcpBootstrap)'s do. A node
/// group waits for other ranks nowhere else, except for their part in its own kernels: leaving it and freeing
/// memory wait for kernels at work on this process's device, which end by their deadline. An NVSHMEM group
/// comes to a barrier here before each call that waits for all ranks inside NVSHMEM: over a bootstrap whose
/// waits do not end (MPI's do not), making, closing and leaving communicators and groups wait for ever for a
/// rank that was lost.
///
/// # Calls that use it
///
/// A group owns its bootstrap. The following calls use it, in the thread that makes them; no other call and
/// no thread of Ferry's does. Threads that make such calls at one time take turns.
///
/// | call | all-gathers | most bytes of a rank in one |
/// |---|---|---|
/// | `Group::node` | 7 | 600 |
/// | `Group::nvshmem` | 3 | 600 |
/// | [`Communicator::new`](crate::Communicator::new) | 5 | 128 |
/// | [`close`](crate::Communicator::close) of a communicator | 2; NVSHMEM: 1, after a barrier | 128 |
/// | the same, after it gave up | none | |
/// | [`Group::check_links`](crate::Group::check_links) | at most 12, and 10 for each rank | 128 |
/// | [`Group::close`](crate::Group::close) | 1 | 64, and 8 for each communicator not closed |
///
/// These are the numbers if nothing fails. A step that fails on one rank is the last one of the
/// call on all of them, except that windows may be freed, which takes one all-gather more; so all
/// still make the same calls. Lengths differ between ranks if a name is sent (of a machine or
/// its boot), or an error instead of an answer. Each of these calls may call [`rank`](Self::rank) and
/// [`ranks`](Self::ranks). Dispatch and combine, buffers and graphs use no bootstrap, nor
/// does dropping a communicator or a group.
///
/// # Safety
/// Ranks write into memory whose addresses a bootstrap exchanged, and free their own when all have come so
/// far. An implementation promises that
/// - [`rank`](Self::rank) and [`ranks`](Self::ranks) always return the same, and each process of the
///   group has a rank of its own;
/// - [`all_gather`](Self::all_gather) returns `Ok` only after all ranks have called it as often as this one,
///   and only with the bytes that each passed to this very call, unchanged and by rank;
/// - [`barrier`](Self::barrier) returns `Ok` only after all ranks have called it as often as this one.
pub unsafe trait Bootstrap: Send {
    /// Rank of this process.
    fn rank(&self) -> u32;

    /// Number of processes in the group.
    fn ranks(&self) -> u32;

    /// Returns every rank's `bytes`, by rank; the lengths may differ. Collective.
    ///
    /// # Errors
    /// A rank that does not take part, and errors of the transport.
    fn all_gather(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, BootstrapError>;

    /// Returns once all ranks have called it. Collective.
    ///
    /// # Errors
    /// Those of [`all_gather`](Self::all_gather).
    fn barrier(&mut self) -> Result<(), BootstrapError> {
        self.all_gather(&[]).map(drop)
    }
}

/// Refuses more ranks than a group can have, before memory is allocated for each.
fn require_ranks(ranks: u32) -> Result<(), BootstrapError> {
    match ranks {
        ..=MAX_RANKS => Ok(()),
        _ => Err(BootstrapError::TooManyRanks { ranks }),
    }
}
