//! The decisions of a dispatch where nothing travels.

use ferry_layout::Common;

use crate::machine::position::{Grid, WarpPosition};
use crate::tactics::{Numbering, tuning};
use crate::work::partition::Partition;
use crate::work::tasks::{expert_groups, tiles};

/// What a launch does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalTactics {
    /// Parts that each token is put into its places in, a power of two.
    pub parts: u32,
    /// How the assignments are numbered.
    pub numbering: Numbering,
    /// Warps that number.
    numberers: u32,
}

impl LocalTactics {
    /// Of a launch on `grid`, of `tokens`.
    #[inline(always)]
    pub fn decide(common: &Common, tokens: u32, grid: Grid) -> Self {
        let shape = &common.shape;
        let experts = expert_groups(shape.experts);
        let (numbering, tasks) = match shape.is_small_batch(tokens) {
            true => (Numbering::InBlock, experts),
            false => (Numbering::Tiles, experts.max(tiles(shape.top_k, tokens))),
        };
        let most = (grid.warps() / tuning::WARPS_PER_NOTIFIER).max(1);
        Self {
            parts: common.row.parts(tokens),
            numbering,
            numberers: tasks.clamp(1, most),
        }
    }

    /// The partition of the numbering of the warp at `position`: the first warps have one.
    #[inline(always)]
    pub fn numberer(self, position: WarpPosition) -> Option<Partition> {
        let (index, of) = (position.warp(), self.numberers);
        (index < of).then_some(Partition { index, of })
    }

    /// Its partition of the items: all warps place some, those that number the last ones. The first one
    /// computes offsets.
    #[inline(always)]
    pub fn placer(self, position: WarpPosition) -> Partition {
        let of = position.warps();
        Partition {
            index: (position.warp() + of - self.numberers) % of,
            of,
        }
    }
}

#[cfg(test)]
mod tests {
    use ferry_layout::{Shape, TokenFormat};

    use super::*;
    use crate::work::partition::each_once;

    #[test]
    fn every_partition_has_one_warp() {
        for tokens in [0, 1, 128, 1024, 4096] {
            let common = Common::of(&Shape {
                ranks: 1,
                p2p_world_size: 1,
                experts: 64,
                top_k: 8,
                hidden: 7168,
                max_tokens_per_rank: 4096,
                combine_mode: 0,
                token_format: TokenFormat::Bf16.number(),
            });
            for (in_block, blocks) in [(1, 1), (4, 2), (16, 132)] {
                let tactics = LocalTactics::decide(&common, tokens, Grid { in_block, blocks });
                let positions = || {
                    (0..in_block * blocks).map(|warp| WarpPosition {
                        index: warp / blocks,
                        in_block,
                        block: warp % blocks,
                        blocks,
                    })
                };
                each_once(positions().filter_map(|position| tactics.numberer(position)));
                each_once(positions().map(|position| tactics.placer(position)));
            }
        }
    }
}
