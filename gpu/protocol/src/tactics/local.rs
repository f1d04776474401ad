//! Decisions of a dispatch with `skip_a2a`.

use ferry_layout::{Common, Rank};

use crate::machine::position::WarpPosition;
use crate::work::item::Item;
use crate::work::partition::Partition;

/// Decisions of a launch, and a warp's share of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalTactics {
    /// Parts in which each token is copied to its rows, a power of two.
    pub parts: u32,
    /// First token of this warp's block.
    pub first_token: u32,
    /// Number of the block's tokens.
    pub own_tokens: u32,
    /// Whether this block keeps the rows of its tokens for combine: one of the blocks that share them does.
    pub keeps: bool,
    /// This warp's partition of the parts of the block's tokens.
    partition: Partition,
}

impl LocalTactics {
    /// Decides for a launch with `tokens` tokens and the warp at `position`. The tokens of a block are
    /// consecutive, so all it needs of the other tokens is their number for each expert. If there are several
    /// blocks per token, they share its parts.
    #[inline(always)]
    pub fn decide(common: &Common, tokens: u32, position: WarpPosition) -> Self {
        let WarpPosition {
            index,
            in_block,
            block,
            blocks,
        } = position;
        let parts = common.row.parts(tokens);
        let sharers = (blocks / tokens.max(1)).clamp(1, parts);
        let (groups, group, sharer) = (blocks / sharers, block / sharers, block % sharers);
        let (each, more) = (tokens / groups, tokens % groups);
        let (first_token, own_tokens) = match group < groups {
            true => (group * each + group.min(more), each + (group < more) as u32),
            false => (tokens, 0),
        };
        Self {
            parts,
            first_token,
            own_tokens,
            keeps: sharer == 0,
            partition: Partition {
                index: index * sharers + sharer,
                of: in_block * sharers,
            },
        }
    }

    /// The items of this warp: parts of the block's tokens. `source`: this rank.
    #[inline(always)]
    pub fn items(self, source: Rank) -> impl Iterator<Item = Item> {
        let tasks = self.partition.tasks(self.own_tokens * self.parts);
        tasks.map(move |task| Item {
            source,
            token: self.first_token + (task >> self.parts.trailing_zeros()),
            part: task & (self.parts - 1),
            parts: self.parts,
        })
    }
}

#[cfg(test)]
mod tests {
    use ferry_layout::{Shape, TokenFormat};

    use super::*;

    #[test]
    fn every_part_of_every_token_is_one_warps_and_every_token_is_kept_once() {
        for tokens in [0, 1, 5, 16, 65, 128, 1000, 1024, 4096] {
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
            for (in_block, blocks) in [(1, 1), (4, 2), (16, 132), (8, 7)] {
                let parts = common.row.parts(tokens);
                let mut items = std::vec![0; (tokens * parts) as usize];
                let mut kept = std::vec![0; tokens as usize];
                for warp in 0..in_block * blocks {
                    let position = WarpPosition {
                        index: warp / blocks,
                        in_block,
                        block: warp % blocks,
                        blocks,
                    };
                    let tactics = LocalTactics::decide(&common, tokens, position);
                    let own = tactics.first_token..tactics.first_token + tactics.own_tokens;
                    assert!(own.end <= tokens, "{tokens} tokens, {position:?}");
                    // As even as possible: blocks that share tokens have one each.
                    let most = tokens.div_ceil(blocks);
                    assert!(own.len() as u32 <= most, "{tokens} tokens, {position:?}");
                    for item in tactics.items(Rank(0)) {
                        assert!(own.contains(&item.token), "{item:?} of {own:?}");
                        items[(item.token * parts + item.part) as usize] += 1;
                    }
                    if tactics.keeps && position.index == 0 {
                        own.for_each(|token| kept[token as usize] += 1);
                    }
                }
                let about = || std::format!("{tokens} tokens, {in_block} warps, {blocks} blocks");
                assert!(items.iter().all(|&times| times == 1), "{}", about());
                assert!(kept.iter().all(|&times| times == 1), "{}", about());
            }
        }
    }
}
