//! What the fibres share with the scheduler: memory, clock, and what went wrong.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use ferry_layout::Counter;
use rand_chacha::ChaCha8Rng;

use crate::error::SimulatorError;
use crate::memory::{Memory, Outside, rank_of};
use crate::network::Network;

/// What the fibres share with the scheduler.
pub struct Shared {
    pub memory: RefCell<Memory>,
    pub network: RefCell<Network>,
    pub rng: RefCell<ChaCha8Rng>,
    pub seed: u64,
    /// Nanoseconds.
    pub clock: Cell<u64>,
    /// The patience that ended when a deadline was last made to pass; `None` if nobody could come any more.
    pub patience: Cell<Option<Duration>>,
    /// By rank: grows whenever a word of its memory changes that its warps may poll. Warps poll no
    /// other rank's.
    pub versions: Vec<Cell<u64>>,
    /// By rank: when its warps last did what no wait does, that is wrote a row or took a ticket.
    pub worked_at: Vec<Cell<u64>>,
    /// The first bad access, which ends the simulation.
    pub violation: RefCell<Option<SimulatorError>>,
    /// The windows that launches have named so far.
    pub windows: RefCell<Vec<KnownWindow>>,
    pub allow_late_signals: bool,
}

/// A rank's window, and where it counts its rounds.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct KnownWindow {
    pub rank: u32,
    pub start: u64,
    pub bytes: u64,
    pub workspace: u64,
    /// Where credits of its node come: the next round waits for them.
    pub credits: (u64, u64),
    /// Rounds that were over when a launch last began or ended.
    pub finished: u64,
}

impl Shared {
    /// Notes an access outside all allocations.
    pub fn report(&self, outside: Outside, by: &str) {
        let Outside {
            what,
            address,
            bytes,
        } = outside;
        let error = SimulatorError::BadAccess {
            seed: self.seed,
            what,
            address,
            bytes,
            by: if by.is_empty() {
                String::new()
            } else {
                format!(", by {by}")
            },
        };
        self.violation.borrow_mut().get_or_insert(error);
    }

    /// A signal has arrived: its round must not be over there. Whoever waits for what a round
    /// sends misses nothing, so nothing comes afterwards. But a credit may come until the next round is over.
    pub fn signalled(&self, address: u64, value: u64) {
        if let Some(rank) = rank_of(address) {
            self.bump(rank as u32);
        }
        let windows = self.windows.borrow();
        let Some(window) = windows
            .iter()
            .find(|window| (window.start..window.start + window.bytes).contains(&address))
        else {
            return;
        };
        // A word with a value carries its round in the upper half.
        let round = if value >> 32 == 0 { value } else { value >> 32 };
        let (first_credit, end) = window.credits;
        let is_late = match (first_credit..end).contains(&address) {
            true => round < window.finished,
            false => round <= window.finished,
        };
        if is_late && !self.allow_late_signals {
            let (seed, rank) = (self.seed, window.rank);
            let error = SimulatorError::LateSignal { seed, rank, round };
            self.violation.borrow_mut().get_or_insert(error);
        }
    }

    /// A launch begins in `window`, of which all but what is finished is said.
    pub fn know(&self, mut window: KnownWindow) {
        let mut windows = self.windows.borrow_mut();
        // Memory that was freed may have become another window.
        if let Some(known) = windows.iter().position(|known| known.start == window.start) {
            window.finished = windows.swap_remove(known).finished;
        }
        self.count_rounds(&mut window);
        windows.push(window);
    }

    /// A launch of `rank` has ended: if it ended a round, nothing of that round may arrive any more.
    pub fn launch_ended(&self, rank: u32) {
        let mut windows = self.windows.borrow_mut();
        let of_rank = windows.iter_mut().filter(|window| window.rank == rank);
        of_rank.for_each(|window| self.count_rounds(window));
    }

    /// Notes the rounds that a rank has finished. One that gave up may have counted a round whose rows it
    /// did not wait for.
    fn count_rounds(&self, window: &mut KnownWindow) {
        if self.counter(window.workspace, Counter::Aborted) == 0 {
            window.finished = self.counter(window.workspace, Counter::Finished);
        }
    }

    fn counter(&self, workspace: u64, counter: Counter) -> u64 {
        let at = workspace + counter.bytes();
        self.memory.borrow().read_u64(at).unwrap_or(0)
    }

    /// Wakes whoever polls on `rank`.
    pub fn bump(&self, rank: u32) {
        if let Some(version) = self.versions.get(rank as usize) {
            version.set(version.get() + 1);
        }
    }

    /// Notes that a warp of `rank` is at work, not waiting.
    pub fn note_work(&self, rank: u32) {
        self.worked_at[rank as usize].set(self.clock.get());
    }

    /// The version of a rank's memory.
    pub fn version(&self, rank: u32) -> u64 {
        self.versions[rank as usize].get()
    }

    pub fn bump_all(&self) {
        (0..self.versions.len() as u32).for_each(|rank| self.bump(rank));
    }
}
