//! A warp's index among the warps that share work, and the tasks that follow from the index.

use crate::machine::Machine;
use crate::machine::position::WarpPosition;

/// Number `index` of `of` warps that share work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Partition {
    pub index: u32,
    pub of: u32,
}

impl Partition {
    /// Panics in debug builds if the index is not below the number of warps.
    #[inline(always)]
    pub fn debug_assert_is_one(self) {
        debug_assert!(self.index < self.of, "{self:?}");
    }

    /// This warp's share of `tasks` tasks.
    #[inline(always)]
    pub fn tasks(self, tasks: u32) -> impl Iterator<Item = u32> {
        self.debug_assert_is_one();
        // Not `step_by`, which divides first.
        let mut next = self.index;
        core::iter::from_fn(move || {
            let task = next;
            next += self.of;
            (task < tasks).then_some(task)
        })
    }
}

/// Number of warps of this one's block among warps `first..first + count`.
#[inline(always)]
pub fn warps_of_block<M: Machine>(machine: &M, first: u32, count: u32) -> u32 {
    let WarpPosition { block, blocks, .. } = machine.warp_position();
    let below = |warp: u32| (warp + blocks - 1 - block) / blocks;
    below(first + count) - below(first)
}

/// Panics unless each index of as many partitions occurs once.
#[cfg(test)]
pub fn each_once(partitions: impl Iterator<Item = Partition>) {
    let mut indices: std::vec::Vec<_> = partitions
        .map(|Partition { index, of }| (of, index))
        .collect();
    indices.sort_unstable();
    let wanted: std::vec::Vec<_> = (0..indices.len() as u32)
        .map(|index| (indices.len() as u32, index))
        .collect();
    assert_eq!(indices, wanted);
}
