//! Return of credits: every rank learns that this one has read the rows that it dispatched, with presence
//! words and headers.

use ferry_layout::{Counter, Kernel, Region};

use crate::machine::Machine;
use crate::machine::counters::BlockCounter;
use crate::sync::arrivals;
use crate::sync::launch::{Aborted, Launch};
use crate::tactics::combine::CombineTactics;
use crate::wire::credit::Credit;
use crate::work::lanes::on_each_rank;

/// Counts this warp, which has read all results of dispatch for its items. Each sender calls this once. If
/// senders have one item each, a warp waits for all of them ([`wait_and_return`]), and nobody waits for the
/// rows that they write. Otherwise the last one returns the credits.
#[inline(always)]
pub fn count_read<M: Machine>(launch: &Launch<M>, tactics: CombineTactics) {
    let machine = launch.machine;
    let senders_in_block = machine.warp_position().in_block - tactics.reducers_in_block;
    if !machine.arrives_last(BlockCounter::Read, senders_in_block) {
        return;
    }
    match tactics.one_item_each {
        true => machine.count(Counter::Reads),
        false => arrivals::pass(machine, Counter::Reads, machine.blocks(), || {
            return_credits(launch);
        }),
    }
}

/// Waits until all senders have read, and returns the credits.
#[inline(always)]
pub fn wait_and_return<M: Machine>(launch: &Launch<M>) -> Result<(), Aborted> {
    let machine = launch.machine;
    // The release before the credits turns the last of these loads into an acquire.
    launch.wait_local(Counter::Reads, Region::Credit, || {
        machine.load_relaxed(Counter::Reads) >= machine.blocks() as u64
    })?;
    return_credits(launch);
    machine.leave(Counter::Reads, 0);
    Ok(())
}

/// Returns a credit to every rank. A launch that is not split thereby ends the round for this rank's later
/// launches: some warp of every block has passed [`count_read`], so all blocks have begun and read the
/// round's number.
#[inline(always)]
pub(super) fn return_credits<M: Machine>(launch: &Launch<M>) {
    let (machine, common, epoch) = (launch.machine, launch.common, launch.epoch);
    let word = common.window.credit(common.rank());
    let credit = Credit::release(machine, word, epoch);
    on_each_rank(machine, common.shape.ranks, |rank| {
        credit.return_to(machine, rank);
    });
    if matches!(launch.kernel, Kernel::Combine | Kernel::GiveUp) {
        launch.end_round();
    }
}
