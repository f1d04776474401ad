//! Behavior of a simulated machine.

use std::time::Duration;

use crate::combines::Combines;

/// Behavior of a simulated machine. [`Options::new`] has the defaults; `ranks` and `seed` have none.
#[derive(Clone, Debug)]
pub struct Options {
    /// Ranks of the group, 1 to [`MAX_RANKS`](ferry_layout::MAX_RANKS).
    pub ranks: u32,
    /// Decides every choice of the scheduler: the same seed and the same calls make the same run. Any number.
    pub seed: u64,
    /// Warps that a launch has on each rank, at least 1. An even number makes blocks of two warps, an odd one
    /// of one, and there are at most [`MAX_BLOCKS`](crate::MAX_BLOCKS). Default: 4.
    pub warps: u32,
    /// One in how many of its turns a warp begins to stall, for up to 50 turns of all warps; 0: never.
    /// Default: 64.
    pub stall_one_in: u32,
    /// A rank that dies on the way. Default: `None`, nobody does.
    pub lost: Option<Lost>,
    /// Time that a simulation in which nothing more can happen, but some rank runs nothing, waits for a
    /// launch from another thread before it lets the next deadline pass, in wall time. Each launch, and each
    /// deadline that passes, makes it start anew. `None`, the default: simulated time passes as
    /// wall time does while the simulation waits so, and each launch times out when its own
    /// deadline has passed, whoever else launches meanwhile. Faults that come of it name the
    /// patience, or the deadline. Set it where a rank is to be missed quickly.
    pub patience: Option<Duration>,
    /// Whether a signal may arrive when its round is over: where a test damages windows, rounds end early.
    /// Default: false, such a signal ends the simulation with an error.
    pub allow_late_signals: bool,
    /// Epilogue with which combines run. Default: [`Combines::STEPS`], Ferry's own steps.
    pub combines: Combines,
}

/// A rank that dies: what runs on it ends, and nothing more begins there.
#[derive(Clone, Copy, Debug)]
pub struct Lost {
    /// Its number, below [`Options::ranks`].
    pub rank: u32,
    /// Turns of the scheduler, of all ranks together, after which it dies. A turn takes 100 ns of simulated
    /// time.
    pub after_steps: u64,
}

impl Options {
    /// Four warps a rank, occasional stalls, nobody lost, as patient as the deadlines.
    pub fn new(ranks: u32, seed: u64) -> Self {
        Self {
            ranks,
            seed,
            warps: 4,
            stall_one_in: 64,
            lost: None,
            patience: None,
            allow_late_signals: false,
            combines: Combines::STEPS,
        }
    }

    /// Blocks of a launch: of two warps each, if that comes out even.
    pub(crate) fn blocks(&self) -> u32 {
        match self.warps.is_multiple_of(2) {
            true => self.warps / 2,
            false => self.warps,
        }
    }
}
