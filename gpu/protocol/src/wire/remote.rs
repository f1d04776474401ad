//! Rows to ranks of other nodes: a row is written into a staging area of the own window, from which a put
//! carries it to each remote rank, with its flag after it.
//!
//! A staged row stays until it was delivered: see [`credit`](crate::wire::credit).

use ferry_layout::{ByteOffset, Common, Kernel, OVERFLOWED, Rank, Shape};

use crate::machine::Machine;
use crate::machine::rows::{Put, Row};
use crate::sync::launch::{Aborted, Launch};
use crate::wire::credit::wait_for_credits;
use crate::work::item::Item;
use crate::work::rank_set::RankSet;

/// Ranks among `ranks` that are on this rank's node: all of them if there is no other node.
#[inline(always)]
pub fn p2p_ranks<M: Machine>(machine: &M, common: &Common, ranks: RankSet) -> RankSet {
    match machine.spans_nodes() {
        true => ranks.among(RankSet::of_node(&common.shape, common.rank())),
        false => ranks,
    }
}

/// Whether `rank` is on this rank's node.
#[inline(always)]
pub fn is_p2p<M: Machine>(machine: &M, common: &Common, rank: Rank) -> bool {
    !machine.spans_nodes() || common.shape.same_node(common.rank(), rank)
}

/// The number that stands for the staging area among the ranks to which a row is dispatched: that of a rank
/// of another node.
#[inline(always)]
pub fn staging_number(shape: &Shape, me: Rank) -> u32 {
    (RankSet::of_node(shape, me).lowest().0 + shape.p2p_world_size) % u64::BITS
}

/// Puts a staged row of dispatch to `remote` ranks, with the flag of its item.
#[inline(always)]
pub fn put_dispatched<M: Machine>(launch: &Launch<M>, remote: RankSet, token: u32, item: u32) {
    let (machine, common) = (launch.machine, launch.common);
    let (shape, window, me) = (&common.shape, &common.window, common.rank());
    remote.for_each(|rank| {
        machine.put(Put {
            peer: rank,
            from: window.dispatch_staging(token),
            to: window.dispatch_row(me, token),
            bytes: shape.dispatch_row_bytes(),
            signal: window.dispatch_flag(me, item),
            value: launch.epoch.0,
        });
    });
}

/// Puts the staged sum of an item to slot `slot` at its source, with its flag. `bytes`: those of the row.
#[inline(always)]
pub fn put_reduced<M: Machine>(launch: &Launch<M>, item: Item, slot: u32, bytes: u32) {
    let window = &launch.common.window;
    launch.machine.put(Put {
        peer: item.source,
        from: window.reduced_staging(item.source, item.token),
        to: window.combine_row(item.token, slot),
        bytes,
        signal: window.combine_flag(item.flag(), slot),
        value: launch.epoch.0,
    });
}

/// Place of an expert row of exact mode in the staging area. `before`: rows of the outputs that are not
/// staged, which precede the others.
#[inline(always)]
pub fn exact_staging(common: &Common, position: u32, before: u32) -> ByteOffset {
    let row = (position & !OVERFLOWED).wrapping_sub(before);
    let last = common.shape.max_rows() as u32 - 1;
    common.window.exact_staging(row.min(last))
}

/// Puts a staged row of exact mode to slot `slot` at its source, with its flag.
#[inline(always)]
pub fn put_exact<M: Machine>(launch: &Launch<M>, item: Item, slot: u32, from: ByteOffset) {
    let (shape, window) = (&launch.common.shape, &launch.common.window);
    launch.machine.put(Put {
        peer: item.source,
        from,
        to: window.combine_row(item.token, slot),
        bytes: shape.combine_row_bytes(),
        signal: window.combine_flag(item.flag(), slot),
        value: launch.epoch.0,
    });
}

/// Place of the sum of an item whose source is remote.
#[inline(always)]
pub fn staged_sum(common: &Common, item: Item) -> Row {
    let staging = common.window.reduced_staging(item.source, item.token);
    Row::Window(common.rank(), staging)
}

/// Waits at the end of combine until all that this rank has sent is delivered: data on a network outlives the
/// kernel that sent it, and none may be under way when windows are freed.
#[inline(always)]
pub fn wait_until_delivered<M: Machine>(launch: &Launch<M>) -> Result<(), Aborted> {
    let machine = launch.machine;
    let spans_nodes = match launch.kernel {
        Kernel::Combine => machine.spans_nodes(),
        // The machine answers no, as this kernel sends nothing.
        _ => launch.common.shape.spans_nodes(),
    };
    match spans_nodes && machine.warp() == 0 {
        true => wait_for_credits(launch),
        false => Ok(()),
    }
}
