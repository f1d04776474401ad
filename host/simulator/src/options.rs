//! Behavior of a simulated machine.

use std::time::Duration;

use crate::bad_link::BadLink;
use crate::combines::Combines;
use crate::network::Stalled;
use crate::racing::Racing;

/// Pause between two looks whether a wait is interrupted.
pub(crate) const ASK_AGAIN: Duration = Duration::from_millis(50);

/// Asks [`Options::interrupted`].
pub(crate) fn is_interrupted(ask: Option<fn() -> bool>) -> bool {
    ask.is_some_and(|ask| ask())
}

/// Behavior of a simulated machine, whose time is simulated, too: each turn of the scheduler takes 100 ns of
/// it, and deadlines are measured in it. [`Options::new`] has the defaults; `ranks` and `seed` have none.
#[derive(Clone, Debug)]
pub struct Options {
    /// Ranks of the group, 1 to [`MAX_RANKS`](ferry_layout::MAX_RANKS).
    pub ranks: u32,
    /// Seed of every choice of the scheduler: the same seed and the same calls make the same run.
    pub seed: u64,
    /// Warps of a launch on each rank, at least 1. An even number makes blocks of two warps, an odd one of
    /// one, and there are at most [`MAX_BLOCKS`](crate::MAX_BLOCKS). Default: 4.
    pub warps: u32,
    /// A warp begins to stall in one of this many turns, for up to 50 turns of all warps; 0: never.
    /// Default: 64.
    pub stall_one_in: u32,
    /// A rank that dies during the simulation. Default: `None`.
    pub lost: Option<Lost>,
    /// A link that loses, changes or delays writes. Default: `None`.
    pub bad_link: Option<BadLink>,
    /// Wall time that the simulation waits for a launch from another thread before it lets the next deadline
    /// pass, if nothing else can happen and some rank runs nothing. Each launch and each passed deadline
    /// restart it. `None`, the default: while the simulation waits, simulated time passes like wall time, and
    /// each launch times out at its own deadline, regardless of other launches. Faults name the patience, or
    /// the deadline. Set it to detect a missing rank quickly.
    pub patience: Option<Duration>,
    /// A rank whose way to other nodes stalls. Default: `None`.
    pub stalled: Option<Stalled>,
    /// Whether a signal may arrive after its round is over, for tests that damage windows, whose rounds end
    /// early. Default: false, such a signal ends the simulation with an error.
    pub allow_late_signals: bool,
    /// Key of the job, if ranks are processes: rank 0 sends away those that have another one. Default: empty.
    pub key: Vec<u8>,
    /// Asked some 20 times a second while this process waits for the machine; true ends the wait with
    /// [`SimulatorError::Interrupted`](crate::SimulatorError::Interrupted). Default: `None`.
    pub interrupted: Option<fn() -> bool>,
    /// Epilogue of combines. Default: [`Combines::STEPS`], Ferry's own steps.
    pub combines: Combines,
    /// Inputs that change while kernels run. Default: none.
    pub racing: Racing,
}

/// A rank that dies: its kernels end, and no more begin there.
#[derive(Clone, Copy, Debug)]
pub struct Lost {
    /// Its number, below [`Options::ranks`].
    pub rank: u32,
    /// Number of the scheduler's turns, over all ranks, after which it dies. A turn takes 100 ns of simulated
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
            bad_link: None,
            patience: None,
            stalled: None,
            allow_late_signals: false,
            key: Vec::new(),
            interrupted: None,
            combines: Combines::STEPS,
            racing: Racing::default(),
        }
    }

    /// Number of blocks of a launch, at most `max_blocks`, and of warps in each: two if the number of warps
    /// is even, else one.
    pub(crate) fn blocks(&self, max_blocks: Option<u32>) -> (u32, u32) {
        let in_block = if self.warps.is_multiple_of(2) { 2 } else { 1 };
        let blocks = self.warps / in_block;
        let most = max_blocks.unwrap_or(blocks).max(1);
        (blocks.min(most), in_block)
    }
}
