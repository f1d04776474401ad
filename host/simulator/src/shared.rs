//! State shared by the fibres and the scheduler: memory, clock, and the first error.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use ferry_layout::Counter;
use rand_chacha::ChaCha8Rng;

use crate::addresses::{Machine, rank_of};
use crate::bad_link::{Fate, Links};
use crate::error::SimulatorError;
use crate::memory::{Memory, Outside};
use crate::network::{Delivered, Network};
use crate::racing::Racing;
use crate::write::{Polled, Write};

/// State shared by the fibres and the scheduler.
pub struct Shared {
    pub memory: RefCell<Memory>,
    pub network: RefCell<Network>,
    pub links: RefCell<Links>,
    pub rng: RefCell<ChaCha8Rng>,
    pub seed: u64,
    pub machine: Machine,
    /// Simulated time in nanoseconds.
    pub clock: Cell<u64>,
    /// The patience that ended when the last deadline passed; `None` if no more launch could come, or a rank
    /// was lost.
    pub patience: Cell<Option<Duration>>,
    /// Version of each rank's memory: grows whenever a word changes that its warps may poll. Warps poll only
    /// their own rank's memory.
    pub versions: Vec<Cell<u64>>,
    /// Time at which each rank's warps last wrote a row or took a ticket, which waits never do.
    pub worked_at: Vec<Cell<u64>>,
    /// The first error, which ends the simulation.
    pub violation: RefCell<Option<SimulatorError>>,
    /// Windows that launches have named so far.
    pub windows: RefCell<Vec<KnownWindow>>,
    pub allow_late_signals: bool,
    /// Warps that were started so far.
    pub births: Cell<u64>,
}

/// A rank's window, and the workspace that counts its rounds.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct KnownWindow {
    pub rank: u32,
    pub start: u64,
    pub bytes: u64,
    /// Bytes from its start that hold signals.
    pub signal_bytes: u64,
    pub workspace: u64,
    /// Addresses of credits from its own node, for which the next round waits.
    pub credits: (u64, u64),
    /// Number of rounds that were over when a launch last began or ended.
    pub finished: u64,
}

impl Shared {
    /// Ends the simulation with an error, unless there was one before.
    pub fn fail(&self, error: SimulatorError) {
        self.violation.borrow_mut().get_or_insert(error);
    }

    /// Ends the simulation for an access outside all allocations.
    pub fn report(&self, outside: Outside, by: &str) {
        let Outside {
            what,
            address,
            bytes,
        } = outside;
        self.fail(SimulatorError::BadAccess {
            seed: self.seed,
            what,
            address,
            bytes,
            by: format!("{}, by {by}", self.machine.whose(address)),
        });
    }

    /// Makes a write of `rank` visible, as its link to the memory's rank lets it.
    pub fn commit(&self, rank: u32, write: Write) {
        let taken = (self.links.borrow_mut()).take(rank, write, self.clock.get());
        if let Fate::Arrives(write) = taken {
            self.make_visible(rank, &write);
        }
    }

    /// Makes writes of a slow link visible: those that have arrived by now, or all of them.
    pub fn arrive(&self, rank: u32, by: u64) {
        while self.links.borrow().next_due().is_some_and(|due| due <= by) {
            let arrived = self.links.borrow_mut().arrive();
            arrived
                .iter()
                .for_each(|write| self.make_visible(rank, write));
        }
    }

    fn make_visible(&self, rank: u32, write: &Write) {
        let written = self.memory.borrow_mut().write(write.address, &write.bytes);
        if let Err(outside) = written {
            self.report(outside, &format!("rank {rank}"));
        }
        match (write.polled, rank_of(write.address)) {
            (Polled::Inline, Some(owner)) => self.bump(owner as u32),
            (Polled::Signal, _) => {
                let value = write.bytes.iter().rev();
                let value = value.fold(0, |value, &byte| value << 8 | u64::from(byte));
                self.signalled(write.address, value);
            }
            _ => {}
        }
    }

    /// Makes a write of the host that races with kernels, if there is one.
    pub fn race(&self, racing: &Racing) {
        let next = racing.next(&mut *self.rng.borrow_mut());
        if let Some((address, content)) = next {
            let written = self.memory.borrow_mut().write(address, &content);
            if let Err(outside) = written {
                self.report(outside, "the host");
            }
        }
    }

    /// Notes that a part of a put has arrived: words among signals are signals.
    pub fn delivered(&self, delivered: &Delivered) {
        let signals = |window: &KnownWindow| window.start..window.start + window.signal_bytes;
        let is_signal = {
            let windows = self.windows.borrow();
            windows
                .iter()
                .any(|window| signals(window).contains(&delivered.to))
        };
        if is_signal {
            for (index, word) in delivered.bytes.as_chunks().0.iter().enumerate() {
                let value = u64::from_le_bytes(*word);
                self.signalled(delivered.to + 8 * index as u64, value);
            }
        }
        if let Some(rank) = rank_of(delivered.to) {
            self.bump(rank as u32);
        }
    }

    /// Checks that the round of a signal that has arrived is not over there. A round waits for all that it is
    /// sent, so nothing may arrive afterwards, except a credit, which may come until the next round is over.
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
        // A tagged word has its round in the upper half.
        let round = if value >> 32 == 0 { value } else { value >> 32 };
        let (first_credit, end) = window.credits;
        let is_late = if (first_credit..end).contains(&address) {
            round < window.finished
        } else {
            round <= window.finished
        };
        if is_late && !self.allow_late_signals {
            let (seed, rank) = (self.seed, window.rank);
            self.fail(SimulatorError::LateSignal { seed, rank, round });
        }
    }

    /// Notes that a launch begins in `window`, whose `finished` is not set.
    pub fn know(&self, mut window: KnownWindow) {
        let mut windows = self.windows.borrow_mut();
        // Memory that was freed may have become another window.
        if let Some(known) = windows.iter().position(|known| known.start == window.start) {
            window.finished = windows.swap_remove(known).finished;
        }
        self.count_rounds(&mut window);
        windows.push(window);
    }

    /// Notes that a launch of `rank` has ended: if it ended a round, no signal of that round may arrive any
    /// more.
    pub fn launch_ended(&self, rank: u32) {
        let mut windows = self.windows.borrow_mut();
        let of_rank = windows.iter_mut().filter(|window| window.rank == rank);
        of_rank.for_each(|window| self.count_rounds(window));
    }

    /// Notes the rounds that a rank has finished, unless it gave up: it may have counted a round then without
    /// waiting for its rows.
    fn count_rounds(&self, window: &mut KnownWindow) {
        if self.counter(window.workspace, Counter::Aborted) == 0 {
            window.finished = self.counter(window.workspace, Counter::Finished);
        }
    }

    fn counter(&self, workspace: u64, counter: Counter) -> u64 {
        let at = workspace + counter.bytes();
        self.memory.borrow().read_u64(at).unwrap_or(0)
    }

    /// Wakes the warps that poll on `rank`.
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
