//! Rounds without a combine: their end.
//!
//! All ranks give up a round, or none. Between a rank that gives up round `n` and one that combines it,
//! nothing may travel in round `n + 1`: the former never read the combine rows of `n` that the latter has
//! sent, and rows with inline flags among them would pass for those of a later round. So a round that is
//! given up takes two epochs, and its credits are for the second one. A rank that combined is then an epoch
//! behind: each of the two waits for what the other never sends, the one in its next dispatch for credits of
//! `n + 1`, the other in its combine for rows, or in its next dispatch for counts of `n + 1`. Both time out.

use ferry_layout::{Counter, Epoch, GiveUpArgs, Kernel, ReceiveLayout};

use crate::combine::credits::return_credits;
use crate::combine::received::item_here;
use crate::combine::rows::end_view;
use crate::machine::Machine;
use crate::machine::counters::BlockCounter;
use crate::machine::position::WarpPosition;
use crate::sync::arrivals;
use crate::sync::launch::{Aborted, Launch};
use crate::wire::credit::wait_for_credits;
use crate::work::extent::Extent;
use crate::work::tasks::expert_groups;

/// Ends a round instead of combine. Waits for the other ranks only if some are on other nodes. After the
/// round's dispatch, in stream order, which has read all that came. Collective.
#[inline(always)]
pub fn give_up<M: Machine>(machine: &M, args: &GiveUpArgs) -> Result<(), Aborted> {
    let launch = Launch {
        varies: machine.keeps_rows(),
        ..Launch::begin(machine, &args.common, Kernel::GiveUp, false)
    };
    match args.is_local {
        0 => launch.enter()?,
        _ => launch.check()?,
    }
    if machine.warp() == 0 {
        machine.leave(Counter::DispatchTickets, 0);
    }
    end_views(&launch, ReceiveLayout::of_number(args.layout as u32));
    if is_last_to_leave(machine) {
        return launch.end(end_round(&launch, args));
    }
    Ok(())
}

/// Ends this warp's items of a view, if kernels are to check.
#[inline(always)]
fn end_views<M: Machine>(launch: &Launch<M>, layout: ReceiveLayout) {
    let (machine, common) = (launch.machine, launch.common);
    if !machine.keeps_rows() || layout != ReceiveLayout::View || common.debug_checks == 0 {
        return;
    }
    let extent = Extent::of_word(machine.peek(Counter::Extent));
    let mut index = machine.warp();
    while index < extent.items(&common.shape) {
        if let Some(item) = item_here(launch, extent, index) {
            end_view(launch, layout, item);
        }
        index += machine.warp_position().warps();
    }
}

/// Whether this warp leaves the launch last. By then all warps have read the round's number, and all that
/// they have done comes before its next release.
#[inline(always)]
fn is_last_to_leave<M: Machine>(machine: &M) -> bool {
    let WarpPosition {
        in_block, blocks, ..
    } = machine.warp_position();
    let mut is_last = false;
    if machine.arrives_last(BlockCounter::Left, in_block) {
        arrivals::pass(machine, Counter::Arrivals, blocks, || is_last = true);
    }
    is_last
}

/// Ends the round in the epoch after that of its dispatch. One warp.
#[inline(always)]
fn end_round<M: Machine>(launch: &Launch<M>, args: &GiveUpArgs) -> Result<(), Aborted> {
    let (machine, common) = (launch.machine, launch.common);
    let launch = Launch {
        epoch: Epoch::after(launch.epoch.0),
        ..*launch
    };
    // Those that a dispatch of this epoch would have counted.
    let scans = launch.epoch.rounds() * expert_groups(common.shape.experts) as u64;
    machine.leave(Counter::ScansDone, scans);
    if args.is_local != 0 {
        launch.end_round();
        return Ok(());
    }
    return_credits(&launch)?;
    match machine.spans_nodes() {
        true => wait_for_credits(&launch),
        false => Ok(()),
    }
}
