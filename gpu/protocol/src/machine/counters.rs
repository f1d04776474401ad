//! Words that the warps of one GPU share, and those of one block.

use ferry_layout::Counter;

/// Words that the warps of one GPU share: device scope.
pub trait Counters {
    /// Adds and returns the value before; releases this warp's writes and acquires those that earlier adders
    /// released. All lanes take part, one adds.
    fn add(&self, counter: Counter, amount: u64) -> u64;

    /// Adds one; releases this warp's writes, and comes after its reads. All lanes take part.
    fn count(&self, counter: Counter) {
        self.add(counter, 1);
    }

    /// Reads; data released before the value was stored can be read afterwards. All lanes.
    fn load(&self, counter: Counter) -> u64;

    /// Reads a value that an earlier launch stored. All lanes.
    fn peek(&self, counter: Counter) -> u64 {
        self.load(counter)
    }

    /// Reads, and orders nothing: for repeated reads, with a release after the last. All lanes.
    fn load_relaxed(&self, counter: Counter) -> u64 {
        self.load(counter)
    }

    /// Stores, and releases this warp's writes. All lanes take part, one stores.
    fn store(&self, counter: Counter, value: u64);

    /// Raises the counter to `value`, and returns whether it was lower. Orders nothing. For one lane.
    fn raise(&self, counter: Counter, value: u64) -> bool;
}

/// Points that each warp of a block passes at most once in a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockCounter {
    /// The warp has written its rows.
    Sent,
    /// The warp has read the results of dispatch.
    Read,
    /// The warp leaves the launch.
    Left,
}

impl BlockCounter {
    /// Number of block counters.
    pub const COUNT: usize = 3;
}
