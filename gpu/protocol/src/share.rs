//! Who of the warps that share a piece of work a warp is.

use crate::Machine;

/// Number `index` of `of` warps that share work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    pub index: u32,
    pub of: u32,
}

impl Share {
    /// This one's of `tasks` tasks.
    #[inline(always)]
    pub fn tasks(self, tasks: u32) -> impl Iterator<Item = u32> {
        (self.index..tasks).step_by(self.of as usize)
    }
}

/// How many warps of this one's block are among warps `first..first + count`.
#[inline(always)]
pub fn callers<M: Machine>(machine: &M, first: u32, count: u32) -> u32 {
    let blocks = machine.blocks();
    let block = machine.warp() % blocks;
    let below = |warp: u32| (warp + blocks - 1 - block) / blocks;
    below(first + count) - below(first)
}
