//! How a communicator ends.

use std::fmt;
use std::sync::Arc;

use super::ExpertParallel;
use crate::Error;
use crate::memory::Leave;

/// Why a communicator was not closed, or not in order. It becomes an [`Error`] by `?`, and then drops a
/// communicator that it has.
pub struct CloseError {
    /// What went wrong.
    pub error: Error,
    /// The communicator as it was, to be closed later: with [`Error::GraphsAlive`]. Dropped, it is leaked.
    pub communicator: Option<Box<ExpertParallel>>,
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

impl ExpertParallel {
    /// Frees this rank's memory, and with the last rank of this process the windows, after a
    /// barrier with the other processes. Synchronise the streams in use first. Collective.
    /// Synchronises.
    ///
    /// A rank's last combine may end before its peers have told it that they read its tokens: their kernels
    /// still store into its window then. So a process of several comes here before it ends, also when it is
    /// done.
    ///
    /// A communicator that gave up is closed without a barrier; if it spans processes, its
    /// windows are leaked; a node group frees them when all its ranks [close](crate::Group::close)
    /// it. If another process's gave up or was lost and this one's did not, the barrier fails as
    /// soon as the group's bootstrap says so, at the latest after its timeout, and the windows are
    /// leaked, with a warning. In an NVSHMEM group a rank that is lost after the barrier, while
    /// windows are freed, can keep the others waiting for ever, see
    /// [`Group::close`](crate::Group::close).
    ///
    /// # Errors
    /// [`Error::GraphsAlive`] while there are graphs that `CudaDevice::capture` made of its calls: nothing is
    /// freed, and [`CloseError`] gives the communicator back. [`Error::Bootstrap`] that names a lost
    /// rank, and what the device or the group reports.
    pub fn close(mut self) -> Result<(), CloseError> {
        let graphs = Arc::strong_count(&self.member) - 1;
        if graphs > 0 {
            let rank = self.rank();
            return Err(CloseError {
                error: Error::GraphsAlive { rank, graphs },
                communicator: Some(Box::new(self)),
            });
        }
        let gave_up = self.require_alive().is_err()
            || self
                .fault()
                .is_ok_and(|fault| fault.is_some_and(|(fault, _)| !fault.kind.is_input()))
            || self.has_stopped().unwrap_or(true);
        self.closed = true;
        let freed = self.memory.free();
        let left = self.windows.leave(if gave_up {
            Leave::GaveUp
        } else {
            Leave::Closed
        });
        Ok(freed.and(left)?)
    }
}

impl Drop for ExpertParallel {
    /// Frees nothing, waits for nobody: teardown is [`close`](Self::close).
    fn drop(&mut self) {
        if self.closed {
            return;
        }
        self.memory.leak();
        tracing::warn!(
            rank = self.rank().0,
            "dropped without close: its memory is leaked"
        );
        // A dropped holder makes this no more than a count.
        let _ = self.windows.leave(Leave::Dropped);
    }
}
