//! Every token that names an expert of this rank, from the input straight into the outputs.

use ferry_layout::{
    Counter, DispatchArgs, DispatchOptions, Header, Kernel, NOT_ROUTED, assignment_index,
};

use crate::dispatch::destination::{Destinations, locate};
use crate::dispatch::notify::number;
use crate::dispatch::numbering::tiles::read_ranks_in_expert;
use crate::dispatch::numbering::{count_before, read_expert_id, wait_until_numbered};
use crate::dispatch::offsets::{compute_offsets, wait_for_offsets};
use crate::dispatch::output::write_output;
use crate::dispatch::receive::{describe_rows, refuse_item};
use crate::dispatch::route::{read_weights, report_duplicates, report_invalid};
use crate::dispatch::scales;
use crate::dispatch::shared::SharedGroup;
use crate::dispatch::{begin, keep_tokens};
use crate::machine::Machine;
use crate::machine::rows::OutputRow;
use crate::sync::launch::{Aborted, Launch};
use crate::tactics::Numbering;
use crate::tactics::local::LocalTactics;
use crate::work::item::Item;
use crate::work::partition::Partition;
use crate::work::queue::WorkQueue;
use crate::work::ranks::lane_or_none;

/// Puts this rank's tokens, which are all ranks', in the order of this rank's experts, with offsets and
/// sources. Waits for no other rank.
#[inline(always)]
pub fn dispatch_local<M: Machine>(
    machine: &M,
    args: &DispatchArgs,
    options: &DispatchOptions,
) -> Result<(), Aborted> {
    let launch = begin(machine, args, options, Kernel::LocalDispatch);
    launch.check()?;
    launch.end(number_and_place(&launch, args, options))
}

/// Numbers the assignments, this warp's partition of them, and puts tokens into their places.
#[inline(always)]
fn number_and_place<M: Machine>(
    launch: &Launch<M>,
    args: &DispatchArgs,
    options: &DispatchOptions,
) -> Result<(), Aborted> {
    let machine = launch.machine;
    let position = machine.warp_position();
    if position.warp() == 0 {
        machine.leave(Counter::CombineTickets, 0);
        if options.tokens_on_device != 0 {
            keep_tokens(launch);
        }
    }
    let shared = SharedGroup::of(launch.common, options, launch.tokens);
    let tactics = LocalTactics::decide(launch.common, launch.tokens, position.grid());
    if let Some(partition) = tactics.numberer(position) {
        number(launch, tactics.numbering, partition, 0, |_| {})?;
    }
    let partition = tactics.placer(position);
    if partition.index == 0 {
        compute_offsets(launch, args, shared)?;
    }
    place_items(launch, args, options, tactics, shared, partition)?;
    if launch.common.shape.has_tiled_scales() {
        wait_for_offsets(launch)?;
        // Worked out again, as kept values would occupy registers meanwhile.
        let position = machine.warp_position();
        let partition = Partition {
            index: position.warp(),
            of: position.warps(),
        };
        let groups = options.has_shared_expert() as u32;
        scales::clear_unused(launch, args, groups, partition);
    }
    Ok(())
}

/// This warp's items, into their places.
#[inline(always)]
fn place_items<M: Machine>(
    launch: &Launch<M>,
    args: &DispatchArgs,
    options: &DispatchOptions,
    tactics: LocalTactics,
    shared: SharedGroup,
    partition: Partition,
) -> Result<(), Aborted> {
    let (machine, common) = (launch.machine, launch.common);
    let LocalTactics {
        parts, numbering, ..
    } = tactics;
    let rows = shared.count() + launch.tokens;
    let tasks = rows * parts;
    let mut queue = WorkQueue::new(machine, partition, tasks, Counter::DispatchTickets);
    while let Some(index) = queue.next_item() {
        let row = index >> parts.trailing_zeros();
        // The shared expert's first: while the assignments are numbered.
        let is_shared = row < shared.count();
        let item = Item {
            source: common.rank(),
            token: match is_shared {
                true => shared.token(row),
                false => row - shared.count(),
            },
            part: index & (parts - 1),
            parts,
        };
        let found = match is_shared {
            true => Some(shared_destination(launch, row)),
            false => find(launch, args, options, numbering, item)?,
        };
        if let Some(destinations) = found {
            let to = |k| OutputRow {
                row: machine.broadcast(destinations.positions, k),
                scales: machine.broadcast(destinations.scales, k),
            };
            let range = item.range(common.row.payload_bytes);
            write_output(launch, args, range, item.token, destinations.here, to);
        }
        queue.take_ticket();
    }
    Ok(())
}

/// Where a row of the shared expert goes.
#[inline(always)]
fn shared_destination<M: Machine>(launch: &Launch<M>, row: u32) -> Destinations<M::Lanes<u32>> {
    let (machine, common) = (launch.machine, launch.common);
    let scales = common.row.first_scale_word(common.shape.format(), row, row);
    Destinations {
        positions: machine.lanes(|_| row),
        scales: machine.lanes(|_| scales),
        here: 1,
    }
}

/// The experts of a token, counted from this rank's first one: of other ranks' experts, and where nothing is
/// routed, a number that this rank has no expert for. Ids that do not exist are reported.
#[inline(always)]
fn read_experts<M: Machine>(
    launch: &Launch<M>,
    options: &DispatchOptions,
    numbering: Numbering,
    token: u32,
) -> M::Lanes<u32> {
    let (machine, common) = (launch.machine, launch.common);
    let top_k = common.shape.top_k;
    let experts = machine.lanes(|lane| {
        lane_or_none(lane, top_k, || {
            read_expert_id(launch, numbering, assignment_index(top_k, token, lane))
        })
    });
    let given = machine.lanes(|lane| match lane < top_k {
        true => machine.own(experts, lane).wrapping_add(launch.first_expert),
        false => NOT_ROUTED,
    });
    if common.debug_checks != 0 {
        report_duplicates(launch, token, given);
    }
    report_invalid(launch, token, options.all_experts, given);
    experts
}

/// Where an item goes, if anywhere; keeps its token's weights and places for combine.
#[inline(always)]
fn find<M: Machine>(
    launch: &Launch<M>,
    args: &DispatchArgs,
    options: &DispatchOptions,
    numbering: Numbering,
    item: Item,
) -> Result<Option<Destinations<M::Lanes<u32>>>, Aborted> {
    let (machine, shape) = (launch.machine, &launch.common.shape);
    let experts = read_experts(launch, options, numbering, item.token);
    let here = machine.ballot(machine.lanes(|lane| machine.own(experts, lane) < shape.experts));
    if here == 0 {
        let nowhere = Destinations {
            positions: machine.lanes(|_| NOT_ROUTED),
            scales: machine.lanes(|_| 0),
            here,
        };
        if item.part == 0 {
            describe_rows(launch, args, item, nowhere);
        }
        return Ok(None);
    }
    if item.part == 0 {
        keep_weights(launch, args, item.token);
    }
    let ranks_in_expert = match numbering {
        Numbering::InBlock => count_before(launch, item.token, experts),
        Numbering::Tiles => {
            wait_until_numbered(launch)?;
            read_ranks_in_expert(launch, item.token, experts)
        }
    };
    match locate(launch, args, item.source, experts, ranks_in_expert) {
        Ok(destinations) => {
            // Before the payload: nothing of this must be kept meanwhile.
            if item.part == 0 {
                describe_rows(launch, args, item, destinations);
            }
            Ok(Some(destinations))
        }
        Err(miss) => refuse_item(launch, args, item, miss).map(|()| None),
    }
}

/// Keeps a token's weights where combine reads those of any row.
#[inline(always)]
fn keep_weights<M: Machine>(launch: &Launch<M>, args: &DispatchArgs, token: u32) {
    let (machine, common) = (launch.machine, launch.common);
    let top_k = common.shape.top_k;
    let is_weighted = args.topk_weights != 0;
    let weights = read_weights(launch, is_weighted, token);
    let row = common.window.dispatch_row(common.rank(), token);
    let header = row.plus(common.row.header);
    machine.lanes(|lane| {
        if lane < top_k {
            let bits = match is_weighted {
                true => machine.own(weights, lane),
                false => 1f32.to_bits(),
            };
            machine.write_window(header.plus(Header::weight(top_k, lane)), bits);
        }
    });
}
