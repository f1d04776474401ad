//! Words that peers read.

use ferry_layout::{Rank, Signal, Tagged};

/// Words that peers read: system scope, and accessed through these methods alone.
pub trait Signals {
    /// Orders everything this warp wrote before everything it signals afterwards, at system
    /// scope. All lanes take part.
    fn release(&self);

    /// Stores `value` into a signal word of `to`, which is on this node. Not ordered with anything but an
    /// earlier [`release`](Self::release). For one lane.
    fn signal(&self, to: Rank, at: Signal, value: u64);

    /// Reads a signal word of the own window; data released before it was stored can be read afterwards. For
    /// one lane.
    fn load_signal(&self, at: Signal) -> u64;

    /// Reads a signal word that carries its value: seeing it makes no other data readable. For one lane.
    fn load_tagged(&self, at: Signal) -> Tagged {
        Tagged(self.load_signal(at))
    }
}
