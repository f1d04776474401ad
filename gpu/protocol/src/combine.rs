//! Combine: expert outputs go back to their tokens and are summed.
//!
//! Entries, and which warp does what; `send_back` is the experts' side, `sum_up` the source's.

use ferry_layout::{CombineArgs, Counter, Kernel};

use crate::Machine;
use crate::send_back::send_back;
use crate::share::Share;
use crate::sum_up::gather_rows;
use crate::units::Extent;
use crate::wait::{Launch, Stopped};

/// Sends this rank's expert outputs back; waits for nothing that a peer does. After the round's
/// dispatch, in stream order. Collective.
#[inline(always)]
pub fn combine_async<M: Machine>(machine: &M, args: &CombineArgs) -> Result<(), Stopped> {
    let launch = Launch::begin(machine, &args.common, Kernel::CombineAsync);
    launch.check()?;
    send_back(&launch, args, Crews::apart(&launch))
}

/// Waits for the rows of this rank's tokens and sums them; ends the round. After
/// `combine_async`, in stream order. Collective.
#[inline(always)]
pub fn combine_wait<M: Machine>(machine: &M, args: &CombineArgs) -> Result<(), Stopped> {
    let launch = Launch::begin(machine, &args.common, Kernel::CombineWait);
    launch.check()?;
    gather_rows(&launch, args, Crews::apart(&launch))
}

/// Both in one launch. Collective. All warps must be resident at once.
#[inline(always)]
pub fn combine<M: Machine>(machine: &M, args: &CombineArgs) -> Result<(), Stopped> {
    let launch = Launch::begin(machine, &args.common, Kernel::Combine);
    launch.check()?;
    let crews = Crews::of(&launch);
    send_back(&launch, args, crews)?;
    gather_rows(&launch, args, crews)
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
    pub gatherer: Option<Share>,
    /// Warps of each block that send.
    pub senders_in_block: u32,
    /// Whether rows go bare: known from what the dispatch learnt of all sources, the same on all ranks.
    pub is_bare: bool,
}

impl Crews {
    /// All warps do both, one after the other. Where there is little to do, the first ones send and the
    /// last ones gather.
    #[inline(always)]
    fn apart<M: Machine>(launch: &Launch<M>) -> Self {
        let machine = launch.machine;
        let (index, of) = (machine.warp(), machine.warps());
        Self {
            sender: Some(Share { index, of }),
            gatherer: Some(Share {
                index: of - 1 - index,
                of,
            }),
            senders_in_block: machine.warps() / machine.blocks(),
            is_bare: is_bare(launch),
        }
    }

    /// Those of a launch that sends and gathers.
    #[inline(always)]
    fn of<M: Machine>(launch: &Launch<M>) -> Self {
        let machine = launch.machine;
        let (warp, warps, blocks) = (machine.warp(), machine.warps(), machine.blocks());
        let in_block = warps / blocks;
        let extent = Extent::of_word(machine.peek(Counter::Extent));
        if extent.units(&launch.common.shape) <= warps || in_block == 1 {
            return Self::apart(launch);
        }
        let gatherers_in_block = gatherers(in_block, warps);
        let gatherers = gatherers_in_block * blocks;
        let gathers = warp < gatherers;
        let share = match gathers {
            true => Share {
                index: warp,
                of: gatherers,
            },
            false => Share {
                index: warp - gatherers,
                of: warps - gatherers,
            },
        };
        Self {
            sender: (!gathers).then_some(share),
            gatherer: gathers.then_some(share),
            senders_in_block: in_block - gatherers_in_block,
            is_bare: is_bare(launch),
        }
    }
}

#[inline(always)]
fn is_bare<M: Machine>(launch: &Launch<M>) -> bool {
    let extent = Extent::of_word(launch.machine.peek(Counter::Extent));
    launch.common.shape.combines_bare(extent.tokens)
}
