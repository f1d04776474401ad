//! Words of a workspace in which each block keeps its last launch.

use ferry_layout::{Arguments, LastLaunch, MAX_BLOCKS, Workspace};
use ferry_protocol::{LANES, Turns};

use super::{Gpu, PEEKED};
use crate::ptx::{memory, thread};

/// Index of the word among those that are read as a launch begins.
const LAST_LAUNCH: u32 = PEEKED.len() as u32;

impl<A: Arguments, const SHMEM: bool> Gpu<'_, A, SHMEM> {
    /// Address of this block's word.
    #[inline(always)]
    pub fn last_launch_at(&self) -> u64 {
        self.common().workspace + Workspace::last_launch(thread::block())
    }
}

impl<A: Arguments, const SHMEM: bool> Turns for Gpu<'_, A, SHMEM> {
    #[inline(always)]
    fn last_launch(&self) -> LastLaunch {
        LastLaunch(self.block.get().word(LAST_LAUNCH))
    }

    #[inline(always)]
    fn leave_launch(&self, launch: LastLaunch, to_more: bool) {
        if to_more {
            let mut block = thread::block() + self.lane * thread::blocks();
            while block < MAX_BLOCKS {
                let at = self.common().workspace + Workspace::last_launch(block);
                // SAFETY: a workspace has a word for each of `MAX_BLOCKS` blocks.
                unsafe { memory::store_u64(at, launch.0) };
                block += thread::blocks() * LANES;
            }
        } else if self.lane == 0 {
            // SAFETY: the host launches at most as many blocks as a workspace has words.
            unsafe { memory::store_u64(self.last_launch_at(), launch.0) };
        }
    }
}
