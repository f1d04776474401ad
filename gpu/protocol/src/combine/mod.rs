//! Combine: expert outputs go back to their tokens and are summed.
//!
//! Entries, and which warp does what; `send_back` is the experts' side, `sum_up` the source's.

mod received;
mod reduce;
mod send;
mod send_batched;

use ferry_layout::{CombineArgs, Counter, Kernel};

use crate::combine::reduce::reduce_rows;
use crate::combine::send::send_back;
use crate::machine::Machine;
use crate::machine::position::WarpPosition;
use crate::sync::launch::{Aborted, Launch};
use crate::work::item::Extent;
use crate::work::partition::Partition;

/// Sends this rank's expert outputs back; waits for nothing that a peer does. After the round's
/// dispatch, in stream order. Collective.
#[inline(always)]
pub fn combine_async<M: Machine>(machine: &M, args: &CombineArgs) -> Result<(), Aborted> {
    let launch = Launch::begin(machine, &args.common, Kernel::CombineAsync);
    launch.check()?;
    launch.end(send_back(&launch, args, CombineRoles::of_half(&launch)))
}

/// Waits for the rows of this rank's tokens and sums them; ends the round. After
/// `combine_async`, in stream order. Collective.
#[inline(always)]
pub fn combine_wait<M: Machine>(machine: &M, args: &CombineArgs) -> Result<(), Aborted> {
    let launch = Launch::begin(machine, &args.common, Kernel::CombineWait);
    launch.check()?;
    launch.end(reduce_rows(&launch, args, CombineRoles::of_half(&launch)))
}

/// Both in one launch. Collective. All warps must be resident at once.
#[inline(always)]
pub fn combine<M: Machine>(machine: &M, args: &CombineArgs) -> Result<(), Aborted> {
    let launch = Launch::begin(machine, &args.common, Kernel::Combine);
    launch.check()?;
    let roles = CombineRoles::of(&launch);
    let sent = send_back(&launch, args, roles);
    launch.end(sent.and_then(|()| reduce_rows(&launch, args, roles)))
}

/// Of so many warps, those that gather can be more: the others fill the wire.
const MANY_WARPS: u32 = 1056;

/// Warps of a block of `in_block` that gather and do nothing else, where there are more units than `warps`:
/// rows are summed while others are still sent. Found by measuring (BENCHMARKS.md).
#[inline(always)]
fn reducers(in_block: u32, warps: u32) -> u32 {
    match warps > MANY_WARPS {
        true => in_block * 3 / 8,
        false => in_block / 4,
    }
    .max(1)
}

/// Which warps send back and which gather: all both, or some the one and some the other. As many
/// in every block.
#[derive(Clone, Copy)]
pub struct CombineRoles {
    pub sender: Option<Partition>,
    /// Warps that gather and do nothing else: the first ones. None where all warps do both.
    reducers: u32,
    /// Warps of each block that send.
    pub senders_in_block: u32,
    /// Whether rows go bare: known from what the dispatch learnt of all sources, the same on all ranks.
    pub is_inline: bool,
}

impl CombineRoles {
    /// Those of a launch that sends or gathers: all warps do.
    #[inline(always)]
    fn of_half<M: Machine>(launch: &Launch<M>) -> Self {
        Self::shared(launch.machine.warp_position(), is_inline(launch))
    }

    /// Those of a launch that sends and gathers.
    #[inline(always)]
    fn of<M: Machine>(launch: &Launch<M>) -> Self {
        let warp_position = launch.machine.warp_position();
        let extent = Extent::of_word(launch.machine.peek(Counter::Extent));
        let is_much = extent.items(&launch.common.shape) > warp_position.warps();
        match is_much && warp_position.in_block > 1 {
            true => Self::specialised(warp_position, is_inline(launch)),
            false => Self::shared(warp_position, is_inline(launch)),
        }
    }

    /// All warps do both, one after the other.
    #[inline(always)]
    fn shared(warp_position: WarpPosition, is_inline: bool) -> Self {
        Self {
            sender: Some(Partition {
                index: warp_position.warp(),
                of: warp_position.warps(),
            }),
            reducers: 0,
            senders_in_block: warp_position.in_block,
            is_inline,
        }
    }

    /// Each does one of them.
    #[inline(always)]
    fn specialised(warp_position: WarpPosition, is_inline: bool) -> Self {
        let (warp, warps) = (warp_position.warp(), warp_position.warps());
        let reducers_in_block = reducers(warp_position.in_block, warps);
        let reducers = reducers_in_block * warp_position.blocks;
        Self {
            sender: (warp >= reducers).then(|| Partition {
                index: warp - reducers,
                of: warps - reducers,
            }),
            reducers,
            senders_in_block: warp_position.in_block - reducers_in_block,
            is_inline,
        }
    }

    /// What the warp in `warp_position` gathers. Where all do both and there is little to do, the first ones send and the
    /// last ones gather.
    #[inline(always)]
    pub fn reducer(self, warp_position: WarpPosition) -> Option<Partition> {
        let (warp, warps) = (warp_position.warp(), warp_position.warps());
        match self.reducers {
            0 => Some(Partition {
                index: warps - 1 - warp,
                of: warps,
            }),
            of => (warp < of).then_some(Partition { index: warp, of }),
        }
    }
}

#[inline(always)]
fn is_inline<M: Machine>(launch: &Launch<M>) -> bool {
    let extent = Extent::of_word(launch.machine.peek(Counter::Extent));
    // Said of the kernel first: one for several nodes has no code for bare rows.
    !launch.machine.spans_nodes() && launch.common.shape.combines_inline(extent.tokens)
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;
    use crate::work::partition::each_once;

    #[test]
    fn every_share_has_one_warp_and_every_block_as_many_senders() {
        for (blocks, in_block) in [(1, 2), (2, 3), (16, 16), (66, 16), (132, 16), (132, 4)] {
            let warps = blocks * in_block;
            let warp_position = |warp| WarpPosition {
                index: warp / blocks,
                in_block,
                block: warp % blocks,
                blocks,
            };
            let roles: Vec<_> = (0..warps)
                .map(|warp| CombineRoles::specialised(warp_position(warp), false))
                .collect();
            each_once(roles.iter().filter_map(|roles| roles.sender));
            let reducer = |warp: u32| roles[warp as usize].reducer(warp_position(warp));
            each_once((0..warps).filter_map(reducer));
            for block in 0..blocks as usize {
                let of_block = roles.iter().skip(block).step_by(blocks as usize);
                let senders = of_block.filter(|roles| roles.sender.is_some()).count();
                assert_eq!(senders as u32, roles[block].senders_in_block);
            }
        }
    }
}
