//! The end of every wait.

/// The end of every wait.
pub trait Deadline {
    /// Passes a moment of a wait. True once this launch should abort: the deadline has passed, or another warp of this
    /// rank has aborted. All lanes.
    fn timed_out(&self) -> bool;
}
