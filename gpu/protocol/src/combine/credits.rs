//! Return of credits: every rank learns that this one has read the rows that it dispatched, with presence
//! words and headers.

use ferry_layout::{Counter, Kernel, Region, StagedEpoch};

use crate::machine::Machine;
use crate::machine::counters::BlockCounter;
use crate::machine::puts::Put;
use crate::sync::arrivals;
use crate::sync::launch::{Aborted, Launch};
use crate::tactics::combine::CombineTactics;
use crate::wire::credit::Credit;
use crate::wire::remote;
use crate::work::lanes::on_each_rank;

/// Counts this warp, which has read all results of dispatch for its items. Each sender calls this once. If
/// senders have one item each, a warp waits for all of them ([`wait_and_return`]), and nobody waits for the
/// rows that they write. Otherwise the last one returns the credits.
#[inline(always)]
pub fn count_read<M: Machine>(launch: &Launch<M>, tactics: CombineTactics) -> Result<(), Aborted> {
    let machine = launch.machine;
    let senders_in_block = machine.warp_position().in_block - tactics.reducers_in_block;
    if !machine.arrives_last(BlockCounter::Read, senders_in_block) {
        return Ok(());
    }
    let mut is_last = false;
    match tactics.one_item_each {
        true => machine.count(Counter::Reads),
        false => arrivals::pass(machine, Counter::Reads, machine.blocks(), || {
            match machine.spans_nodes() {
                // After this closure: with it the launch would live in memory.
                true => is_last = true,
                // Fails only between nodes.
                false => _ = return_credits(launch),
            }
        }),
    }
    match is_last {
        true => return_credits(launch),
        false => Ok(()),
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
    return_credits(launch)?;
    machine.leave(Counter::Reads, 0);
    Ok(())
}

/// Returns a credit to every rank. A launch that is not split thereby ends the round for this rank's later
/// launches: some warp of every block has passed [`count_read`], so all blocks have begun and read the
/// round's number.
#[inline(always)]
pub(super) fn return_credits<M: Machine>(launch: &Launch<M>) -> Result<(), Aborted> {
    let (machine, common, epoch) = (launch.machine, launch.common, launch.epoch);
    let word = common.window.credit(common.rank());
    let staged = common.window.staged_epoch(StagedEpoch::Combine);
    if machine.spans_nodes() {
        machine.lanes(|lane| {
            if lane == 0 {
                machine.stage(staged, epoch.0);
            }
        });
    }
    let credit = Credit::release(machine, word, epoch);
    on_each_rank(machine, common.shape.ranks, |rank| {
        if remote::is_p2p(machine, common, rank) {
            credit.return_to(machine, rank);
        }
    });
    if machine.spans_nodes() {
        remote::put_words(launch, |peer| Put {
            peer,
            from: staged,
            to: word.place(),
            bytes: 8,
        })?;
    }
    if matches!(launch.kernel, Kernel::Combine | Kernel::GiveUp) {
        launch.end_round();
    }
    Ok(())
}
