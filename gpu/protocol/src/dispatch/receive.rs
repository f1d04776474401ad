//! The receiving half of dispatch.
//!
//! One warp turns the counts into row offsets while payload is still in flight; all warps then wait for rows,
//! each for its own, and copy them to the outputs as they arrive.
//!
//! Only one warp reads a part of a row with inline flags, with a header of its own, and re-arms each word
//! after it has read it. All words are re-armed when the launch ends, hence before this rank returns its
//! credit in combine, and before a peer writes there again.

use ferry_layout::{
    Counter, DispatchArgs, DispatchOptions, Fault, FaultKind, Rank, Region, Table, Tensor,
};

use crate::dispatch::batch::Batch;
use crate::dispatch::destination::{Destinations, find_destinations};
use crate::dispatch::offsets::{compute_offsets, wait_for_offsets};
use crate::dispatch::scales;
use crate::dispatch::shared::SharedGroup;
use crate::machine::miss::Miss;
use crate::machine::rows::Row;
use crate::machine::{LANES, Machine};
use crate::sync::launch::{Aborted, Awaited, Launch};
use crate::tactics::roles::computes_offsets;
use crate::wire::flagged;
use crate::work::extent::Extent;
use crate::work::item::Item;
use crate::work::partition::Partition;

#[inline(always)]
pub fn receive_by_expert<M: Machine>(
    launch: &Launch<M>,
    args: &DispatchArgs,
    options: &DispatchOptions,
    partition: Partition,
) -> Result<(), Aborted> {
    let (machine, common) = (launch.machine, launch.common);
    let shared = SharedGroup::of(common, options, launch.tokens);
    if computes_offsets(&common.shape, partition) {
        compute_offsets(launch, args, shared)?;
    }
    // While the peers' rows are on their way.
    shared.write(launch, args, options, partition);
    let extent = wait_for_token_counts(launch)?;
    // A warp that receives nothing, if there is one.
    if partition.index == partition.of - 1 {
        machine.store(Counter::Extent, extent.word());
    }
    let shape = &common.shape;
    let mut batch = Batch::first(shape, extent, partition);
    while batch.is_some() {
        let present = launch.wait_lanes(
            |lane: u32| batch.present(launch, lane),
            |lane| batch.awaited(launch, lane),
        )?;
        let parts = machine.lanes(|lane| machine.own(present, lane).unwrap_or(0));
        let coming = machine.ballot(machine.lanes(|lane| machine.own(parts, lane) != 0));
        receive_batch(launch, args, batch, parts, coming)?;
        batch = batch.next();
    }
    if shape.has_tiled_scales() {
        wait_for_offsets(launch)?;
        scales::clear_unused(launch, args, shared.groups, batch.partition());
    }
    Ok(())
}

/// Waits for the token counts of all sources, and refuses counts above the plan's.
#[inline(always)]
pub(super) fn wait_for_token_counts<M: Machine>(launch: &Launch<M>) -> Result<Extent, Aborted> {
    let (machine, common, epoch) = (launch.machine, launch.common, launch.epoch);
    let (shape, window) = (&common.shape, &common.window);
    let mut extent = Extent::NONE;
    for first in (0..shape.ranks).step_by(LANES as usize) {
        let source = |lane: u32| Rank((first + lane).min(shape.ranks - 1));
        let word = |lane| machine.load_tagged(window.token_count(source(lane)));
        let counts = launch.wait_lanes(
            |lane| word(lane).value(epoch),
            |lane| Awaited {
                peer: source(lane),
                region: Region::Counts,
                index: shape.local_experts() as u64,
                saw: word(lane).0 >> 32,
            },
        )?;
        let too_many = machine.ballot(machine.lanes(|lane| {
            machine
                .own(counts, lane)
                .is_some_and(|count| count > shape.max_tokens_per_rank)
        }));
        if too_many != 0 {
            machine.lanes(|lane| {
                if lane == too_many.trailing_zeros() {
                    let fault = Fault {
                        peer: source(lane),
                        region: Region::Counts,
                        wanted: shape.max_tokens_per_rank as u64,
                        saw: word(lane).0 & 0xffff_ffff,
                        ..launch.fault()
                    };
                    launch.record(FaultKind::TooManyTokens, fault);
                }
            });
            return launch.abort();
        }
        let tokens = machine.lanes(|lane| machine.own(counts, lane).unwrap_or(0));
        let parts = machine.lanes(|lane| common.row.parts(machine.own(tokens, lane)));
        extent = Extent {
            tokens: extent.tokens.max(machine.max(tokens)),
            parts: extent.parts.max(machine.max(parts)),
        };
    }
    Ok(extent)
}

/// Receives the items of a batch that come to this rank, as they arrive.
#[inline(always)]
fn receive_batch<M: Machine>(
    launch: &Launch<M>,
    args: &DispatchArgs,
    batch: Batch,
    parts: M::Lanes<u32>,
    coming: u32,
) -> Result<(), Aborted> {
    let (machine, common, epoch) = (launch.machine, launch.common, launch.epoch);
    let (shape, window, me) = (&common.shape, &common.window, common.rank());
    let item = |lane: u32, parts| batch.item(lane, parts, shape, me);
    let flags = machine.lanes(|lane| {
        let Item { source, .. } = item(lane, 1);
        let parts = machine.own(parts, lane);
        window.dispatch_flag(source, item(lane, parts).flag())
    });
    let mut left = coming;
    while left != 0 {
        let arrived = launch.wait_any(
            left,
            |lane| {
                // A row with inline flags has no flag of its own: its words are polled.
                common.dispatches_inline(machine.own(parts, lane))
                    || flagged::is_full(machine, machine.own(flags, lane), epoch)
            },
            |lane| Awaited {
                peer: item(lane, 1).source,
                region: Region::DispatchRow,
                index: item(lane, 1).token as u64,
                saw: machine.load_signal(machine.own(flags, lane)),
            },
        )?;
        left &= !arrived;
        let mut arrived = arrived;
        while arrived != 0 {
            let lane = arrived.trailing_zeros();
            let parts = machine.broadcast(parts, lane);
            receive_item(launch, args, item(lane, parts))?;
            arrived &= arrived - 1;
        }
    }
    Ok(())
}

/// Copies an item to each of its rows in the output. The item has arrived, or has inline flags.
#[inline(always)]
fn receive_item<M: Machine>(
    launch: &Launch<M>,
    args: &DispatchArgs,
    item: Item,
) -> Result<(), Aborted> {
    let destinations = match place_item(launch, args, item) {
        Ok(destinations) => destinations,
        Err(miss) => return refuse_item(launch, args, item, miss),
    };
    if item.part == 0 {
        describe_rows(launch, args, item, destinations);
    }
    Ok(())
}

/// Writes the sources of the rows of an item's token, for the user, and their positions, for combine.
#[inline(always)]
fn describe_rows<M: Machine>(
    launch: &Launch<M>,
    args: &DispatchArgs,
    item: Item,
    destinations: Destinations<M::Lanes<u32>>,
) {
    let (machine, shape) = (launch.machine, &launch.common.shape);
    let Destinations {
        positions, here, ..
    } = destinations;
    let Item { source, token, .. } = item;
    machine.lanes(|lane| {
        let position = machine.own(positions, lane);
        if here >> lane & 1 != 0 {
            debug_assert!((position as u64) < args.row_capacity, "row {position}");
            machine.write(Table::SrcInfo, 2 * position as u64, token);
            machine.write(Table::SrcInfo, 2 * position as u64 + 1, lane);
        }
        if lane < shape.top_k {
            machine.write(
                Table::RowMap,
                shape.row_map_index(source, token, lane),
                position,
            );
        }
    });
}

/// Puts payload and scales of an item into their places.
#[inline(always)]
fn place_item<M: Machine>(
    launch: &Launch<M>,
    args: &DispatchArgs,
    item: Item,
) -> Result<Destinations<M::Lanes<u32>>, Miss> {
    let (machine, common) = (launch.machine, launch.common);
    let from = item.location(common);
    let row = from.of(common.rank());
    // All loads are issued before any is waited for. The header of a row with inline flags, which has the
    // row's destinations and is kept for combine, its payload and its scales are then awaited and re-armed in
    // turn. Other rows have arrived already.
    let scales = scales::read_ahead(launch, from);
    let ahead = machine.read_ahead(from.range, row);
    let destinations = find_destinations(launch, args, item, from)?;
    let to = |k| Row::Tensor(Tensor::Output, machine.broadcast(destinations.positions, k));
    machine.copy_row(from.range, row, ahead, destinations.here, to)?;
    scales::place(launch, args, from, scales, destinations)?;
    if item.part == 0 {
        scales::place_row_scale(launch, from.row, destinations);
    }
    Ok(destinations)
}

/// Records the reason why an item was not placed.
#[inline(always)]
fn refuse_item<M: Machine>(
    launch: &Launch<M>,
    args: &DispatchArgs,
    item: Item,
    miss: Miss,
) -> Result<(), Aborted> {
    // A timeout of the counts is recorded there.
    wait_for_offsets(launch)?;
    let position = match miss {
        Miss::OutOfBounds { position } => position,
        Miss::TimedOut(_) => {
            return launch.time_out_on(Awaited {
                peer: item.source,
                region: Region::DispatchRow,
                index: item.token as u64,
                saw: 0,
            });
        }
    };
    // If only its scales are outside, the position is inside.
    let saw = match position as u64 {
        inside if inside < args.row_capacity => u64::MAX,
        outside => outside,
    };
    launch.machine.lanes(|lane| {
        if lane == 0 {
            let fault = Fault {
                peer: item.source,
                region: Region::DispatchRow,
                index: item.token as u64,
                wanted: args.row_capacity,
                saw,
                ..launch.fault()
            };
            launch.record(FaultKind::RowOutOfBounds, fault);
        }
    });
    launch.abort()
}
