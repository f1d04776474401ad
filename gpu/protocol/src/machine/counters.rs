//! Words that the warps of one GPU share, and those of one block.

use ferry_layout::Counter;

/// Words that the warps of one GPU share: device scope.
pub trait Counters {
    /// Adds and returns the value before; releases what this warp wrote and acquires what
    /// earlier adders released. All lanes take part, one adds.
    fn add(&self, counter: Counter, amount: u64) -> u64;

    /// Adds one; releases what this warp wrote, and what it read was read before. All lanes take part.
    fn count(&self, counter: Counter) {
        self.add(counter, 1);
    }

    /// Reads; what was released before it was stored can be read afterwards. All lanes.
    fn load(&self, counter: Counter) -> u64;

    /// Reads what an earlier launch stored. All lanes.
    fn peek(&self, counter: Counter) -> u64 {
        self.load(counter)
    }

    /// Reads, and orders nothing: to be looked at again and again, with a release after the last look. All
    /// lanes.
    fn load_relaxed(&self, counter: Counter) -> u64 {
        self.load(counter)
    }

    /// Stores, and releases what this warp wrote. All lanes take part, one stores.
    fn store(&self, counter: Counter, value: u64);

    /// Raises to `value`: whether the counter was lower. Orders nothing. For one lane.
    fn raise(&self, counter: Counter, value: u64) -> bool;
}

/// What each warp of a block passes at most once in a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockCounter {
    /// The warp has written its rows.
    Sent,
    /// The warp has read what dispatch brought.
    Read,
    /// The warp leaves the launch.
    Left,
}

impl BlockCounter {
    /// How many there are.
    pub const COUNT: usize = 3;
}
