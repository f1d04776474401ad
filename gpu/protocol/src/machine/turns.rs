//! Word in which a block keeps its last launch.

use ferry_layout::LastLaunch;

/// Word of this warp's block, which no other block reads or writes.
pub trait Turns {
    /// Last launch that this block was a part of before this one. All lanes.
    fn last_launch(&self) -> LastLaunch;
    /// Leaves this launch to the next one. `to_more`: also to blocks that only the next one has, each of
    /// which gets it from one block of this one. By one warp of the block, all lanes.
    fn leave_launch(&self, launch: LastLaunch, to_more: bool);
}
