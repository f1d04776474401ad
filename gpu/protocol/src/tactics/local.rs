//! The decisions of a dispatch where nothing travels.

use ferry_layout::{Common, Rank};

use crate::machine::position::WarpPosition;
use crate::work::item::Item;
use crate::work::partition::Partition;

/// What a launch does, and which part of it a warp.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalTactics {
    /// Parts that each token is put into its places in, a power of two.
    pub parts: u32,
    /// The first token of this warp's block.
    pub first_token: u32,
    /// How many the block has.
    pub own_tokens: u32,
    /// Whether this block keeps for combine what it finds out about them: one of those that share them.
    pub keeps: bool,
    /// This warp's partition of their parts.
    partition: Partition,
}

impl LocalTactics {
    /// Of a launch of `tokens`, for the warp at `position`. Every block has tokens that follow each other, so
    /// that it needs no more of all others than how many there are for each expert. Where there are several
    /// blocks a token, these share its parts.
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
                    // As even as can be: blocks that share tokens have one each.
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
