//! The end of every wait.

/// A clock of this rank, and the launch's deadline on it.
pub trait Deadline {
    /// Nanoseconds on that clock, which all warps of the rank share. All lanes.
    fn now(&self) -> u64;

    /// Spends a moment of a wait, and returns whether this launch should abort: its deadline has passed, or
    /// another warp of this rank has aborted. All lanes.
    fn timed_out(&self) -> bool {
        self.timed_out_by(u64::MAX)
    }

    /// Does the same as [`timed_out`](Self::timed_out), but an earlier launch's `deadline` holds, too.
    fn timed_out_by(&self, deadline: u64) -> bool;

    /// Does the same as [`timed_out`](Self::timed_out) in a wait that each lane ends by itself, after look
    /// number `look`. Nothing that takes all lanes: it would meet a vote of those that have left. A machine
    /// whose lanes step together needs no other than the warp's.
    fn lane_timed_out(&self, look: u32) -> bool {
        let _ = look;
        self.timed_out()
    }
}
