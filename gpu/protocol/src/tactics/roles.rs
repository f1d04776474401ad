//! Roles of warps, by the launch's tactics.
//!
//! In dispatch, by [`Split`]:
//! - `Shared`: the first warps notify, all others send, all receive, the last warps first.
//! - `SenderHalf`: the same, but notifiers are on the second half of the multiprocessors, and the senders of
//!   the first half come first.
//! - `AllSend`: the first warps notify, all send, the others first, nobody receives.
//! - `Specialised`: the first warps notify, the next ones send, all but the senders receive.
//! - `SpecialisedBySm`: the same, but neighbours share a multiprocessor.
//!
//! In combine nobody notifies; with `Specialised`, every block has the same number of reducers.

use ferry_layout::Shape;

use crate::machine::position::WarpPosition;
use crate::tactics::Split;
use crate::tactics::combine::CombineTactics;
use crate::tactics::dispatch::DispatchTactics;
use crate::work::partition::Partition;

/// Roles of a warp in a launch of dispatch.
#[derive(Clone, Copy)]
pub struct DispatchRoles {
    /// Its partition of the notifications.
    pub notifier: Option<Partition>,
    /// Its partition of the items to be sent.
    pub sender: Option<Partition>,
    /// Its partition of the items that may arrive.
    pub receiver: Option<Partition>,
}

impl DispatchRoles {
    /// Roles of the warp at `position`.
    #[inline(always)]
    pub fn of(tactics: DispatchTactics, position: WarpPosition, items: u32) -> Self {
        let warps = position.warps();
        let DispatchTactics {
            split,
            notifiers,
            senders,
            ..
        } = tactics;
        let warp = match split {
            Split::SpecialisedBySm => position.warp_by_block(),
            Split::SenderHalf => position.warp_by_half(notifiers, items),
            _ => position.warp(),
        };
        let first_sender = if warps == 1 { 0 } else { notifiers };
        debug_assert!(
            notifiers <= warps && first_sender + senders <= warps || split == Split::AllSend,
            "{notifiers} notifiers and {senders} senders of {warps} warps"
        );
        let from = |first: u32, of: u32| {
            let index = warp.wrapping_sub(first);
            (index < of).then_some(Partition { index, of })
        };
        let sender = match split {
            Split::AllSend => Some(Partition {
                index: (warp + warps - first_sender) % warps,
                of: warps,
            }),
            _ => from(first_sender, senders),
        };
        let receiver = match (split, sender) {
            (Split::Specialised | Split::SpecialisedBySm, Some(_)) => None,
            (Split::Specialised | Split::SpecialisedBySm, None) => {
                let before = if warp < first_sender { 0 } else { senders };
                from(before, warps - senders)
            }
            // The last warps first: the first ones send meanwhile.
            _ => Some(Partition {
                index: warps - 1 - warp,
                of: warps,
            }),
        };
        Self {
            notifier: from(0, notifiers),
            sender,
            receiver,
        }
    }
}

/// Whether the warp with this partition of the items that may arrive turns counts into offsets. Low indices
/// receive first, and high ones notify and send, so it is one in the middle: `of / 2` with small blocks (it
/// has no row to receive), else `of / 4` (never on the sender half).
#[inline(always)]
pub fn computes_offsets(shape: &Shape, receiver: Partition) -> bool {
    let warp = match shape.has_small_blocks() {
        true => receiver.of / 2,
        false => receiver.of / 4,
    };
    receiver.index == warp
}

/// Roles of a warp in a launch of combine.
#[derive(Clone, Copy)]
pub struct CombineRoles {
    /// Its partition of the items that this rank received.
    pub sender: Option<Partition>,
    /// Its partition of the sums of this rank's tokens.
    pub reducer: Option<Partition>,
}

impl CombineRoles {
    /// Roles of the warp at `position`.
    #[inline(always)]
    pub fn of(tactics: CombineTactics, position: WarpPosition) -> Self {
        Self {
            sender: Self::sender(tactics, position),
            reducer: Self::reducer(tactics, position),
        }
    }

    /// [`CombineRoles::sender`] alone.
    #[inline(always)]
    pub fn sender(tactics: CombineTactics, position: WarpPosition) -> Option<Partition> {
        let reducers = tactics.reducers_in_block * position.blocks;
        debug_assert!(
            reducers < position.warps(),
            "{reducers} reducers of {} warps",
            position.warps()
        );
        let index = position.warp().wrapping_sub(reducers);
        let of = position.warps() - reducers;
        (index < of).then_some(Partition { index, of })
    }

    /// [`CombineRoles::reducer`] alone: called after the sending, so that it occupies no registers before.
    #[inline(always)]
    pub fn reducer(tactics: CombineTactics, position: WarpPosition) -> Option<Partition> {
        let (warp, warps) = (position.warp(), position.warps());
        match tactics.reducers_in_block * position.blocks {
            // With little to do, the first warps send and the last ones reduce.
            0 => Some(Partition {
                index: warps - 1 - warp,
                of: warps,
            }),
            of => (warp < of).then_some(Partition { index: warp, of }),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use ferry_layout::{Common, ReceiveLayout, ScaleLayout, Shape, TokenFormat};

    use super::*;
    use crate::machine::position::Grid;
    use crate::tactics::Phase;
    use crate::work::extent::Extent;
    use crate::work::partition::each_once;

    const FORMATS: [TokenFormat; 3] = [
        TokenFormat::Bf16,
        TokenFormat::BlockwiseFp8,
        TokenFormat::Mxfp4(ScaleLayout::Tiled),
    ];

    /// Four ranks with `tokens` tokens each.
    fn common(tokens: u32, format: TokenFormat) -> Common {
        Common {
            tokens,
            ..Common::of(&Shape {
                ranks: 4,
                p2p_world_size: 4,
                experts: 256,
                top_k: 8,
                hidden: 7168,
                max_tokens_per_rank: tokens.max(1),
                combine_mode: 0,
                token_format: format.number(),
            })
        }
    }

    fn positions(grid: Grid) -> impl Iterator<Item = WarpPosition> {
        (0..grid.warps()).map(move |warp| WarpPosition {
            index: warp / grid.blocks,
            in_block: grid.in_block,
            block: warp % grid.blocks,
            blocks: grid.blocks,
        })
    }

    fn grids() -> impl Iterator<Item = Grid> {
        let blocks = [1, 2, 16, 66, 132];
        blocks
            .into_iter()
            .flat_map(|blocks| [1, 4, 16].map(|in_block| Grid { in_block, blocks }))
    }

    fn dispatch_roles(common: &Common, phase: Phase, grid: Grid) -> (Split, Vec<DispatchRoles>) {
        let tactics = DispatchTactics::decide(
            common,
            common.tokens,
            phase,
            grid,
            false,
            ReceiveLayout::ByExpert,
        );
        let items = common.tokens * tactics.parts;
        let roles = positions(grid).map(|position| DispatchRoles::of(tactics, position, items));
        (tactics.split, roles.collect())
    }

    #[test]
    fn every_partition_of_every_role_of_dispatch_has_one_warp() {
        for grid in grids() {
            for tokens in [0, 1, 13, 128, 511, 512, 4096] {
                for format in FORMATS {
                    for phase in [Phase::Send, Phase::Fused] {
                        let common = common(tokens, format);
                        let (_, roles) = dispatch_roles(&common, phase, grid);
                        each_once(roles.iter().filter_map(|roles| roles.notifier));
                        each_once(roles.iter().filter_map(|roles| roles.sender));
                        each_once(roles.iter().filter_map(|roles| roles.receiver));
                    }
                }
            }
        }
    }

    #[test]
    fn a_large_launch_keeps_senders_and_receivers_on_different_multiprocessors() {
        let grid = Grid {
            in_block: 16,
            blocks: 132,
        };
        let (split, roles) =
            dispatch_roles(&common(4096, TokenFormat::BlockwiseFp8), Phase::Fused, grid);
        assert_eq!(split, Split::SpecialisedBySm);
        let both = (0..132).filter(|block| {
            let of_block = || roles.iter().skip(*block).step_by(132);
            of_block().any(|roles| roles.sender.is_some())
                && of_block().any(|roles| roles.receiver.is_some())
        });
        assert_eq!(both.count(), 0, "528 senders fill 33 blocks");
    }

    #[test]
    fn where_blocks_are_small_who_computes_offsets_receives_nothing() {
        let (shape, of) = (common(8, TokenFormat::Bf16).shape, 8 * 132);
        let items = 8 * shape.ranks * shape.parts(8);
        let warp = (0..of).find(|&index| computes_offsets(&shape, Partition { index, of }));
        assert!(warp.is_some_and(|index| index >= items), "{warp:?}");
    }

    #[test]
    fn large_parts_are_sent_by_one_half_of_the_multiprocessors_and_offsets_computed_by_the_other() {
        let common = common(128, TokenFormat::Bf16);
        let grid = Grid {
            in_block: 16,
            blocks: 132,
        };
        let (split, roles) = dispatch_roles(&common, Phase::Fused, grid);
        assert_eq!(split, Split::SenderHalf);
        let items = 128 * common.row.parts(128);
        for (warp, roles) in roles.iter().enumerate() {
            let sends = roles
                .sender
                .is_some_and(|partition| partition.index < items);
            let receiver = roles.receiver.expect("all warps receive");
            let computes_offsets = computes_offsets(&common.shape, receiver);
            assert!(!sends || warp % 132 < 66, "warp {warp} sends");
            assert!(
                !computes_offsets || warp % 132 >= 66,
                "warp {warp} computes offsets"
            );
        }
    }

    #[test]
    fn every_partition_of_every_role_of_combine_has_one_warp_and_every_block_as_many_senders() {
        let common = common(4096, TokenFormat::Bf16);
        for grid in grids() {
            for tokens in [0, 1, 128, 4096] {
                let parts = common.row.parts(tokens);
                let extent = Extent { tokens, parts };
                let phases = [Phase::Send, Phase::Wait, Phase::Fused];
                for (phase, keeps_rows) in
                    phases.map(|phase| [(phase, false), (phase, true)]).concat()
                {
                    let tactics = CombineTactics::decide(
                        &common, tokens, extent, phase, grid, false, keeps_rows,
                    );
                    let roles: Vec<_> = positions(grid)
                        .map(|position| CombineRoles::of(tactics, position))
                        .collect();
                    each_once(roles.iter().filter_map(|roles| roles.sender));
                    each_once(roles.iter().filter_map(|roles| roles.reducer));
                    for block in 0..grid.blocks as usize {
                        let of_block = roles.iter().skip(block).step_by(grid.blocks as usize);
                        let senders = of_block.filter(|roles| roles.sender.is_some()).count();
                        assert_eq!(senders as u32, grid.in_block - tactics.reducers_in_block);
                    }
                }
            }
        }
    }
}
