//! Combine: expert outputs go back to their tokens and are summed.
//!
//! Entries, and which warp does what; `send_back` is the experts' side, `sum_up` the source's.

use ferry_layout::{CombineArgs, Counter, Kernel};

use crate::Machine;
use crate::send_back::send_back;
use crate::share::{Seat, Share};
use crate::sum_up::gather_rows;
use crate::units::Extent;
use crate::wait::{Launch, Stopped};

/// Sends this rank's expert outputs back; waits for nothing that a peer does. After the round's
/// dispatch, in stream order. Collective.
#[inline(always)]
pub fn combine_async<M: Machine>(machine: &M, args: &CombineArgs) -> Result<(), Stopped> {
    let launch = Launch::begin(machine, &args.common, Kernel::CombineAsync);
    launch.check()?;
    launch.end(send_back(&launch, args, Crews::of_half(&launch)))
}

/// Waits for the rows of this rank's tokens and sums them; ends the round. After
/// `combine_async`, in stream order. Collective.
#[inline(always)]
pub fn combine_wait<M: Machine>(machine: &M, args: &CombineArgs) -> Result<(), Stopped> {
    let launch = Launch::begin(machine, &args.common, Kernel::CombineWait);
    launch.check()?;
    launch.end(gather_rows(&launch, args, Crews::of_half(&launch)))
}

/// Both in one launch. Collective. All warps must be resident at once.
#[inline(always)]
pub fn combine<M: Machine>(machine: &M, args: &CombineArgs) -> Result<(), Stopped> {
    let launch = Launch::begin(machine, &args.common, Kernel::Combine);
    launch.check()?;
    let crews = Crews::of(&launch);
    let sent = send_back(&launch, args, crews);
    launch.end(sent.and_then(|()| gather_rows(&launch, args, crews)))
}

/// Of so many warps, those that gather can be more: the others fill the wire.
const MANY_WARPS: u32 = 1056;

/// Warps of a block of `in_block` that gather and do nothing else, where there are more units than `warps`:
/// rows are summed while others are still sent. Found by measuring (BENCHMARKS.md).
#[inline(always)]
fn gatherers(in_block: u32, warps: u32) -> u32 {
    match warps > MANY_WARPS {
        true => in_block * 3 / 8,
        false => in_block / 4,
    }
    .max(1)
}

/// Which warps send back and which gather: all both, or some the one and some the other. As many
/// in every block.
#[derive(Clone, Copy)]
pub struct Crews {
    pub sender: Option<Share>,
    /// Warps that gather and do nothing else: the first ones. None where all warps do both.
    gatherers: u32,
    /// Warps of each block that send.
    pub senders_in_block: u32,
    /// Whether rows go bare: known from what the dispatch learnt of all sources, the same on all ranks.
    pub is_bare: bool,
}

impl Crews {
    /// Those of a launch that sends or gathers: all warps do.
    #[inline(always)]
    fn of_half<M: Machine>(launch: &Launch<M>) -> Self {
        Self::both(launch.machine.seat(), is_bare(launch))
    }

    /// Those of a launch that sends and gathers.
    #[inline(always)]
    fn of<M: Machine>(launch: &Launch<M>) -> Self {
        let seat = launch.machine.seat();
        let extent = Extent::of_word(launch.machine.peek(Counter::Extent));
        let is_much = extent.units(&launch.common.shape) > seat.warps();
        match is_much && seat.in_block > 1 {
            true => Self::either(seat, is_bare(launch)),
            false => Self::both(seat, is_bare(launch)),
        }
    }

    /// All warps do both, one after the other.
    #[inline(always)]
    fn both(seat: Seat, is_bare: bool) -> Self {
        Self {
            sender: Some(Share {
                index: seat.warp(),
                of: seat.warps(),
            }),
            gatherers: 0,
            senders_in_block: seat.in_block,
            is_bare,
        }
    }

    /// Each does one of them.
    #[inline(always)]
    fn either(seat: Seat, is_bare: bool) -> Self {
        let (warp, warps) = (seat.warp(), seat.warps());
        let gatherers_in_block = gatherers(seat.in_block, warps);
        let gatherers = gatherers_in_block * seat.blocks;
        Self {
            sender: (warp >= gatherers).then(|| Share {
                index: warp - gatherers,
                of: warps - gatherers,
            }),
            gatherers,
            senders_in_block: seat.in_block - gatherers_in_block,
            is_bare,
        }
    }

    /// What the warp in `seat` gathers. Where all do both and there is little to do, the first ones send and the
    /// last ones gather.
    #[inline(always)]
    pub fn gatherer(self, seat: Seat) -> Option<Share> {
        let (warp, warps) = (seat.warp(), seat.warps());
        match self.gatherers {
            0 => Some(Share {
                index: warps - 1 - warp,
                of: warps,
            }),
            of => (warp < of).then_some(Share { index: warp, of }),
        }
    }
}

#[inline(always)]
fn is_bare<M: Machine>(launch: &Launch<M>) -> bool {
    let extent = Extent::of_word(launch.machine.peek(Counter::Extent));
    // Said of the kernel first: one for several nodes has no code for bare rows.
    !launch.machine.spans_nodes() && launch.common.shape.combines_bare(extent.tokens)
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;
    use crate::share::each_once;

    #[test]
    fn every_share_has_one_warp_and_every_block_as_many_senders() {
        for (blocks, in_block) in [(1, 2), (2, 3), (16, 16), (66, 16), (132, 16), (132, 4)] {
            let warps = blocks * in_block;
            let seat = |warp| Seat {
                index: warp / blocks,
                in_block,
                block: warp % blocks,
                blocks,
            };
            let crews: Vec<_> = (0..warps)
                .map(|warp| Crews::either(seat(warp), false))
                .collect();
            each_once(crews.iter().filter_map(|crews| crews.sender));
            let gatherer = |warp: u32| crews[warp as usize].gatherer(seat(warp));
            each_once((0..warps).filter_map(gatherer));
            for block in 0..blocks as usize {
                let of_block = crews.iter().skip(block).step_by(blocks as usize);
                let senders = of_block.filter(|crews| crews.sender.is_some()).count();
                assert_eq!(senders as u32, crews[block].senders_in_block);
            }
        }
    }
}
