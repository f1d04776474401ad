//! The end of a communicator.

use std::fmt;
use std::sync::Arc;

use ferry_layout::Rank;

use super::Communicator;
use crate::communicator::memory::Leave;
use crate::error::local_ranks::LocalRanksError;
use crate::error::round::Round;
use crate::error::{Error, leak};

/// Error of closing a communicator. `?` converts it to an [`Error`], and drops the communicator in it, if
/// any.
pub struct CloseError {
    /// The reason.
    pub error: Error,
    /// The communicator as it was, to be closed later: with [`Error::GraphsAlive`],
    /// [`Error::ForeignGraphs`] and [`Error::RoundOpen`]. If it is dropped, its
    /// [memory is freed or leaked](Communicator#dropped).
    pub communicator: Option<Box<Communicator>>,
}

impl fmt::Debug for CloseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.error, f)
    }
}

impl fmt::Display for CloseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.error, f)
    }
}

impl std::error::Error for CloseError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

impl From<CloseError> for Error {
    fn from(refused: CloseError) -> Self {
        refused.error
    }
}

impl From<Error> for CloseError {
    fn from(error: Error) -> Self {
        Self {
            error,
            communicator: None,
        }
    }
}

/// Errors of [`Communicator::close_all`]. `?` converts it to the [`Error`] of the first rank; those of the
/// others become warnings.
#[derive(Debug)]
pub struct CloseAllError {
    /// Ranks that failed, in the order of the given ranks; never empty.
    failures: Vec<(Rank, CloseError)>,
    ranks: usize,
}

impl CloseAllError {
    /// Every rank that failed, in the order of the given ranks. At least one.
    pub fn failures(&self) -> &[(Rank, CloseError)] {
        &self.failures
    }

    /// [`failures`](Self::failures) by value, with the communicators that were not closed.
    pub fn into_failures(self) -> Vec<(Rank, CloseError)> {
        self.failures
    }
}

impl fmt::Display for CloseAllError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (failed, ranks) = (self.failures.len(), self.ranks);
        write!(f, "closing {failed} of {ranks} ranks failed")?;
        self.failures
            .iter()
            .try_for_each(|(rank, failure)| write!(f, "; rank {}: {failure}", rank.0))
    }
}

impl std::error::Error for CloseAllError {}

impl From<CloseAllError> for Error {
    fn from(failed: CloseAllError) -> Self {
        let mut failures = failed.failures;
        for (rank, error) in failures.drain(1..) {
            tracing::warn!(rank = rank.0, %error, "cannot close");
        }
        failures.swap_remove(0).1.into()
    }
}

impl Communicator {
    /// Frees this rank's memory, and with the last rank of this process the windows, after a
    /// barrier with the other processes. Synchronize the streams in use first. Collective.
    /// Synchronizes.
    ///
    /// If ranks share a GPU, freeing can wait for kernels of other ranks. If those wait for a launch
    /// that this thread, or one that waits itself, has yet to make, they do until the deadline: close between
    /// rounds, while no kernel waits for a launch.
    ///
    /// A rank's last combine or `give_up` may end before its peers have told it that they read its tokens:
    /// their kernels still store into its window then. So one of several processes must close its
    /// communicators before it ends, even if it is done.
    ///
    /// A communicator that gave up, or on which a peer gave up, is closed without a barrier. This call finds
    /// that by itself, as far as it has happened by now, with two short reads from the device. If the
    /// communicator spans processes, its windows are then leaked; a node group frees them when all its ranks
    /// [close](crate::Group::close) it. If another process gave up or was lost and this one did not notice,
    /// the barrier fails as soon as the group's bootstrap notices, at the latest after its timeout, and the
    /// windows are leaked, with a warning. In an NVSHMEM group a rank that is lost after the barrier, while
    /// windows are freed, can keep the others waiting for ever, see
    /// [`Group::close`](crate::Group::close).
    ///
    /// # Errors
    /// [`CloseError`] returns the communicator, and nothing was freed, with
    /// - [`Error::RoundOpen`] while a round is open, unless a kernel has given up, or a peer on this rank:
    ///   enqueue the rest of the round, or if a peer is lost, [`synchronize`](Self::synchronize) first, which
    ///   waits until this rank gives up;
    /// - [`Error::GraphsAlive`] while there are graphs that `CudaDevice::capture` made of its calls;
    /// - [`Error::ForeignGraphs`] if others made graphs of its calls and nobody has
    ///   [said](Self::assume_no_foreign_graphs) that they are gone.
    ///
    /// With [`Error::Bootstrap`], which names a lost rank, and errors of the device or the group, the
    /// communicator is closed, and memory that could not be freed is leaked.
    pub fn close(mut self) -> Result<(), CloseError> {
        if let Err(error) = self
            .require_no_round()
            .and_then(|()| self.require_no_graphs())
        {
            return Err(CloseError {
                error,
                communicator: Some(Box::new(self)),
            });
        }
        let how = match self.has_given_up() {
            true => Leave::GaveUp,
            false => Leave::Closed,
        };
        Ok(self.leave(how)?)
    }

    /// Closes a communicator that gave up, or one of whose other ranks did: without a barrier. Synchronizes.
    pub(crate) fn close_given_up(mut self) -> Result<(), Error> {
        self.leave(Leave::GaveUp)
    }

    fn leave(&mut self, how: Leave) -> Result<(), Error> {
        self.closed = true;
        let freed = self.memory.free();
        freed.and(self.windows.leave(how))
    }

    /// Refuses an open round, unless it can never be finished.
    fn require_no_round(&self) -> Result<(), Error> {
        let (rank, open) = (self.rank, self.round());
        if open == Round::Idle || self.has_given_up() {
            return Ok(());
        }
        Err(Error::RoundOpen { rank, open })
    }

    /// Whether this rank gave up, or a peer on it, as far as is known by now. Synchronizes.
    pub(crate) fn has_given_up(&self) -> bool {
        self.require_alive().is_err()
            || self
                .fault()
                .is_ok_and(|fault| fault.is_some_and(|(fault, _)| !fault.kind.is_input()))
            || self.has_stopped().unwrap_or(true)
            || self.require_peers().is_err()
    }

    fn require_no_graphs(&self) -> Result<(), Error> {
        let (rank, graphs) = (self.rank(), Arc::strong_count(&self.member) - 1);
        if graphs > 0 {
            return Err(Error::GraphsAlive { rank, graphs });
        }
        if self.streams.have_foreign_graphs() {
            return Err(Error::ForeignGraphs { rank });
        }
        Ok(())
    }

    /// Promises that all graphs of this rank's calls so far that `CudaDevice::capture` did not make are gone:
    /// [`close`](Self::close) is then not refused, and a drop may free. Not collective. Does not synchronize.
    ///
    /// # Safety
    /// None of them is at work or will be launched.
    pub const unsafe fn assume_no_foreign_graphs(&mut self) {
        self.streams.forget_foreign_graphs();
    }

    /// [`close`](Self::close)s all these ranks of this process, one after another, and goes on after one
    /// that fails. Collective. Synchronizes.
    ///
    /// ```
    /// use ferry::{Config, Communicator, Group, Plan};
    ///
    /// # fn main() -> Result<(), ferry::Error> {
    /// let group = Group::simulated(4, 7)?;
    /// let plan = Plan::new(&group, Config::new(8, 2, 8, 3))?;
    /// let ranks = Communicator::new(&group, &plan)?;
    /// if let Err(failed) = Communicator::close_all(ranks) {
    ///     for (rank, error) in failed.failures() {
    ///         eprintln!("rank {}: {error}", rank.0);
    ///     }
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`CloseAllError`], with the error of [`close`](Self::close) for each rank that failed. If the round of
    /// any of these ranks is open ([`Error::RoundOpen`]), none is closed, and
    /// [`into_failures`](CloseAllError::into_failures) returns all communicators: the others' kernels may
    /// wait for its next call.
    pub fn close_all(ranks: impl IntoIterator<Item = Self>) -> Result<(), CloseAllError> {
        let communicators: Vec<Self> = ranks.into_iter().collect();
        let ranks = communicators.len();
        let open: Vec<_> = communicators.iter().map(Self::require_no_round).collect();
        let first = communicators
            .iter()
            .zip(&open)
            .find(|(_, open)| open.is_err());
        if let Some(first) = first.map(|(communicator, _)| communicator.rank) {
            let give_back = |(communicator, open): (Self, Result<(), Error>)| {
                let not_closed = LocalRanksError::NotClosed { other: first };
                let failure = CloseError {
                    error: open.err().unwrap_or_else(|| not_closed.into()),
                    communicator: Some(Box::new(communicator)),
                };
                (
                    failure.communicator.as_ref().map_or(first, |of| of.rank),
                    failure,
                )
            };
            let failures = communicators.into_iter().zip(open).map(give_back).collect();
            return Err(CloseAllError { failures, ranks });
        }
        let close = |communicator: Self| {
            let rank = communicator.rank;
            communicator.close().err().map(|failure| (rank, failure))
        };
        let failures: Vec<_> = communicators.into_iter().filter_map(close).collect();
        if failures.is_empty() {
            return Ok(());
        }
        Err(CloseAllError { failures, ranks })
    }
}

impl Communicator {
    /// Whether no kernel that uses its memory can be at work or be launched any more. Waits for
    /// nobody. Between nodes, rows may still be under way after the end of the kernel that sent them.
    fn is_done(&mut self) -> bool {
        self.windows.are_all_here()
            && !self.plan.shape().spans_nodes()
            && Arc::strong_count(&self.member) == 1
            && self.streams.are_done()
    }
}

impl Drop for Communicator {
    /// See [Dropped](Communicator#dropped).
    fn drop(&mut self) {
        if self.closed {
            return;
        }
        let rank = self.rank().0;
        if self.is_done() {
            let freed = self.memory.free();
            // All ranks are here, so that this waits for nobody.
            let left = self.windows.leave(Leave::Closed);
            if let Err(error) = freed.and(left) {
                tracing::warn!(rank, %error, "cannot free the memory of a communicator that was dropped");
            }
            return;
        }
        self.memory.leak();
        let first = if self.streams.have_foreign_graphs() {
            // Its group cannot be closed any more, as with a live graph of our own.
            std::mem::forget(self.member.clone());
            ", after the graphs that others made of its calls are gone (assume_no_foreign_graphs)"
        } else {
            ""
        };
        tracing::warn!(rank, "dropped without close: its memory is leaked");
        leak::tell(&format!(
            "rank {rank}'s communicator was dropped without close, and its memory is leaked: something may \
             still use it; close it instead{first}"
        ));
        // Only counts: a dropped holder frees nothing, so that this cannot fail.
        let _ = self.windows.leave(Leave::Dropped);
    }
}
