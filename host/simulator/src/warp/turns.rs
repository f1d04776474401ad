//! Words of the workspace in which each block keeps its last launch.

use ferry_layout::{LastLaunch, Workspace};
use ferry_protocol::{Machine, Turns};

use super::Warp;

impl Warp<'_> {
    /// Address of the word of this warp's block.
    fn last_launch_at(&self) -> u64 {
        let workspace = self.common.workspace;
        let word = Workspace::last_launch(self.warp_position().block);
        self.within(workspace, workspace + word)
    }
}

impl Turns for Warp<'_> {
    fn last_launch(&self) -> LastLaunch {
        let load = || self.with_memory(|memory| memory.read_u64(self.last_launch_at()));
        // All warps of a block look before one of them goes on.
        LastLaunch(*self.block.last_launch.get_or_init(load))
    }

    fn leave_launch(&self, launch: LastLaunch, to_more: bool) {
        self.store_word(self.last_launch_at(), launch.0);
        if to_more {
            let first = self.number % self.blocks;
            let blocks = (first..ferry_layout::MAX_BLOCKS).step_by(self.blocks as usize);
            for block in blocks.skip(1) {
                let at = self.common.workspace + Workspace::last_launch(block);
                self.store_word(at, launch.0);
            }
        }
    }
}
