//! The end of every wait.

/// A clock of this rank's, and the launch's deadline on it.
pub trait Deadline {
    /// Passes a moment of a wait. True once this launch should abort: its deadline has passed, or another
    /// warp of this rank has aborted. All lanes.
    fn timed_out(&self) -> bool {
        self.timed_out_by(u64::MAX)
    }

    /// As [`timed_out`](Self::timed_out), where an earlier launch's `deadline` holds, too.
    fn timed_out_by(&self, deadline: u64) -> bool;
}
