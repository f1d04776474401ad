//! Data for ranks of other nodes: it is written into staging areas of the own window, from which puts carry
//! it. Nothing but puts crosses: no atomic operation, and two puts for all counts of a rank.
//!
//! ```text
//! words:     stage them ; release ; put                    each carries its epoch, and is awaited by itself
//! rows:      stage the row ; release ; put ; ... ; stage the epoch ; release ; fence ; put a flag for each
//! ```
//!
//! Puts arrive in any order, and are read from the staging area as late as they arrive. Three rules keep them
//! apart:
//!
//! - A put carries only words that its target awaits in the round, by themselves or by a flag behind a fence,
//!   before it returns its credit, or for combine before its next counts. So no put of a round is under way
//!   in the next one. The culprit alone is awaited by nobody: it is written once, and windows of aborted
//!   communicators are never freed.
//! - What is staged is written again after all [credits](crate::wire::credit) of the round, or for combine
//!   after all counts of the next one.
//! - Whoever stages something releases it before the put is issued, by itself or handed on to a warp that
//!   does.
//!
//! An aligned word of 8 bytes is never torn. A flag is put from one word that has the round's epoch.

use ferry_layout::{ByteOffset, Common, Kernel, OVERFLOWED, Rank, Shape, Signal, StagedEpoch};

use crate::machine::Machine;
use crate::machine::puts::{PUTS_AT_ONCE, Put};
use crate::machine::rows::{Bits, Row};
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

/// Puts of rows by a warp, whose flags are not put yet: a flag a lane, with its place, and above it its rank;
/// 0 for none, as no flag is at the start of a window.
pub struct RowPuts<M: Machine>(M::Lanes<u64>);

impl<M: Machine> Copy for RowPuts<M> {}

impl<M: Machine> Clone for RowPuts<M> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

/// Bits of a flag's place in its word.
const PLACE_BITS: u32 = 56;

impl<M: Machine> RowPuts<M> {
    /// No puts.
    #[inline(always)]
    pub fn none(machine: &M) -> Self {
        Self(machine.lanes(|_| 0))
    }

    /// Number of flags that are not put yet.
    #[inline(always)]
    fn count(self, machine: &M) -> u32 {
        machine
            .ballot(machine.lanes(|lane| machine.own(self.0, lane) != 0))
            .count()
    }

    /// Puts a row that is staged and released. Its flag follows with those of other rows of the same `half`,
    /// at the latest in [`flush`](Self::flush). A value in, a value out: through a reference it would live in
    /// memory.
    #[inline(always)]
    pub fn put(
        self,
        launch: &Launch<M>,
        half: StagedEpoch,
        put: Put,
        flag: Signal,
    ) -> Result<Self, Aborted> {
        let machine = launch.machine;
        let Self(flags) = match self.count(machine) {
            PUTS_AT_ONCE => self.flush(launch, half)?,
            _ => self,
        };
        launch.wait_for_room()?;
        machine.put_row(put);
        let count = Self(flags).count(machine);
        let word = (put.peer.0 as u64) << PLACE_BITS | flag.bytes();
        Ok(Self(machine.lanes(|lane| match lane == count {
            true => word,
            false => machine.own(flags, lane),
        })))
    }

    /// Puts the flags of all rows so far, behind a fence.
    #[inline(always)]
    pub fn flush(self, launch: &Launch<M>, half: StagedEpoch) -> Result<Self, Aborted> {
        let (machine, Self(flags)) = (launch.machine, self);
        if self.count(machine) == 0 {
            return Ok(self);
        }
        launch.wait_for_room()?;
        let epoch = launch.common.window.staged_epoch(half);
        // All warps store the same word.
        machine.lanes(|lane| {
            if lane == 0 {
                machine.stage(epoch, launch.epoch.0);
            }
        });
        machine.release();
        machine.fence_puts();
        machine.lanes(|lane| {
            let word = machine.own(flags, lane);
            if word != 0 {
                machine.put_words(Put {
                    peer: Rank((word >> PLACE_BITS) as u32),
                    from: epoch,
                    to: ByteOffset::of_bytes(word & ((1 << PLACE_BITS) - 1)),
                    bytes: 8,
                });
            }
        });
        Ok(Self::none(machine))
    }
}

/// Puts words to each rank of other nodes, a lane each: they are staged, and released by this warp.
#[inline(always)]
pub fn put_words<M: Machine>(
    launch: &Launch<M>,
    words: impl Fn(Rank) -> Put,
) -> Result<(), Aborted> {
    let (machine, common) = (launch.machine, launch.common);
    let ranks = common.shape.ranks;
    for first in (0..ranks).step_by(PUTS_AT_ONCE as usize) {
        launch.wait_for_room()?;
        machine.lanes(|lane| {
            let rank = Rank(first + lane);
            if lane < PUTS_AT_ONCE && rank.0 < ranks && !is_p2p(machine, common, rank) {
                machine.put_words(words(rank));
            }
        });
    }
    Ok(())
}

/// Puts a staged row of dispatch to `remote` ranks, with the flag of its item.
#[inline(always)]
pub fn put_dispatched<M: Machine>(
    launch: &Launch<M>,
    mut puts: RowPuts<M>,
    remote: RankSet,
    token: u32,
    item: u32,
) -> Result<RowPuts<M>, Aborted> {
    let common = launch.common;
    let (shape, window, me) = (&common.shape, &common.window, common.rank());
    let mut left = remote;
    while let Some(rank) = left.take_lowest() {
        let put = Put {
            peer: rank,
            from: window.dispatch_staging(token),
            to: window.dispatch_row(me, token),
            bytes: shape.dispatch_row_bytes(),
        };
        puts = puts.put(
            launch,
            StagedEpoch::Dispatch,
            put,
            window.dispatch_flag(me, item),
        )?;
    }
    Ok(puts)
}

/// Puts the staged sum of an item to slot `slot` at its source, with its flag. `bytes`: those of the row.
#[inline(always)]
pub fn put_reduced<M: Machine>(
    launch: &Launch<M>,
    puts: RowPuts<M>,
    item: Item,
    slot: u32,
    bytes: u32,
) -> Result<RowPuts<M>, Aborted> {
    let window = &launch.common.window;
    let put = Put {
        peer: item.source,
        from: window.reduced_staging(item.source, item.token),
        to: window.combine_row(item.token, slot),
        bytes,
    };
    puts.put(
        launch,
        StagedEpoch::Combine,
        put,
        window.combine_flag(item.flag(), slot),
    )
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
pub fn put_exact<M: Machine>(
    launch: &Launch<M>,
    puts: RowPuts<M>,
    item: Item,
    slot: u32,
    from: ByteOffset,
) -> Result<RowPuts<M>, Aborted> {
    let (shape, window) = (&launch.common.shape, &launch.common.window);
    let put = Put {
        peer: item.source,
        from,
        to: window.combine_row(item.token, slot),
        bytes: shape.combine_row_bytes(),
    };
    puts.put(
        launch,
        StagedEpoch::Combine,
        put,
        window.combine_flag(item.flag(), slot),
    )
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
