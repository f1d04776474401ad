//! A warp: the protocol's machine on the CPU.

mod addresses;
mod block_memory;
mod counters;
mod encode;
mod finishing;
mod host;
mod machine;
mod puts;
mod tiles;
mod turns;
mod visibility;

use std::cell::{Cell, OnceCell, RefCell};
use std::rc::Rc;

use corosensei::Yielder;
use ferry_layout::{Args, Common, Counter, Rank, Signal};
use ferry_protocol::{Deadline, Signals, TokenPart};

use crate::block::Block;
use crate::shared::Shared;
use crate::store_buffer::StoreBuffer;
use crate::write::Polled;

/// Number of looks at the same version after which a warp is idle. The first ones may be at values read long
/// before, for as many waits in a row.
const POLLS: u32 = 8;

/// A warp of a launch.
pub struct Warp<'y> {
    pub shared: Rc<Shared>,
    pub buffer: Rc<RefCell<StoreBuffer>>,
    pub idle_at: Rc<Cell<Option<u64>>>,
    /// The version at its last look, and the number of looks at it.
    pub polled: Cell<(u64, u32)>,
    pub yielder: &'y Yielder<(), ()>,
    /// Its rank. With `skip_a2a` kernels see a group of one rank instead, in `common`.
    pub rank: u32,
    pub common: Common,
    pub args: Rc<Args>,
    pub number: u32,
    pub warps: u32,
    pub blocks: u32,
    /// State shared with the other warps of its block.
    pub block: Rc<Block>,
    pub deadline: u64,
    /// Fences among its puts so far.
    pub fences: Cell<u64>,
    /// Its number among all warps that were ever started.
    pub birth: u64,
    /// Puts and fences that it may issue before it looks for room again.
    pub room: Cell<(u32, u32)>,
    /// Number of calls of `Machine::lanes` so far.
    pub lanes_calls: Cell<u64>,
    /// The part of a token that it is loading.
    pub loading: Cell<Option<TokenPart>>,
    /// Start of its rank's window, which it looks up once.
    pub own_window: OnceCell<u64>,
    /// Whether it has loaded a counter, of which lanes of a GPU may see different values, and has neither
    /// voted nor converged since.
    pub lanes_differ: Cell<bool>,
    /// Time at which its current wait times out.
    pub times_out_at: Rc<Cell<u64>>,
}

impl Warp<'_> {
    /// Lets others run.
    fn pause(&self) {
        self.yielder.suspend(());
    }

    fn name(&self) -> String {
        format!("warp {} of rank {}", self.number, self.rank)
    }
}

impl Signals for Warp<'_> {
    fn release(&self) {
        self.release_all();
        self.pause();
    }

    fn signal(&self, to: Rank, at: Signal, value: u64) {
        let window = self.mapped_window(to);
        self.store_bytes(
            self.within(window, window + at.bytes()),
            &value.to_le_bytes(),
            Polled::Signal,
        );
    }

    fn load_signal(&self, at: Signal) -> u64 {
        let address = self.in_window(at.bytes());
        self.with_memory(|memory| memory.read_u64(address))
    }
}

impl Deadline for Warp<'_> {
    fn now(&self) -> u64 {
        self.shared.clock.get()
    }

    fn timed_out_by(&self, deadline: u64) -> bool {
        assert!(
            !self.lanes_differ.get(),
            "{}: lanes that have left a wait for a counter would miss this vote",
            self.name()
        );
        self.is_over(deadline)
    }

    fn lane_timed_out(&self, _look: u32) -> bool {
        self.is_over(u64::MAX)
    }
}

impl Warp<'_> {
    fn is_over(&self, deadline: u64) -> bool {
        let times_out_at = self.deadline.min(deadline);
        self.times_out_at.set(times_out_at);
        let version = self.shared.version(self.rank);
        let (before, polls) = self.polled.get();
        let polls = if version == before { polls + 1 } else { 0 };
        let is_idle = polls > POLLS;
        if is_idle {
            self.idle_at.set(Some(version));
        }
        self.polled.set((version, if is_idle { 0 } else { polls }));
        self.pause();
        self.read_counter(Counter::Aborted) != 0 || self.shared.clock.get() >= times_out_at
    }
}
