//! Every token that names an expert of this rank, from the input straight into the outputs.

use ferry_layout::{
    Counter, DispatchArgs, DispatchOptions, Header, Kernel, NOT_ROUTED, Tensor, TokenFormat,
    assignment_index,
};

use crate::dispatch::destination::{Destinations, locate};
use crate::dispatch::notify::number;
use crate::dispatch::numbering::tiles::read_ranks_in_expert;
use crate::dispatch::numbering::{count_before, read_expert_id, wait_until_numbered};
use crate::dispatch::offsets::{compute_offsets, wait_for_offsets};
use crate::dispatch::receive::{describe_rows, needs_offsets, refuse_item};
use crate::dispatch::route::{read_weights, report_duplicates, report_invalid};
use crate::dispatch::scales;
use crate::dispatch::shared::SharedGroup;
use crate::dispatch::{begin, keep_tokens};
use crate::machine::Machine;
use crate::machine::rows::{OutputRow, Row};
use crate::sync::launch::{Aborted, Launch};
use crate::tactics::Numbering;
use crate::tactics::local::LocalTactics;
use crate::work::item::Item;
use crate::work::partition::Partition;
use crate::work::queue::WorkQueue;
use crate::work::route::lane_or_none;

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
    let tactics = LocalTactics::decide(launch.common, launch.tokens, position.grid());
    if let Some(partition) = tactics.numberer(position) {
        number(launch, tactics.numbering, partition, 0, |_| {})?;
    }
    let partition = tactics.placer(position);
    let shared = SharedGroup::of(launch.common, options, launch.tokens);
    if partition.index == 0 {
        compute_offsets(launch, args, shared)?;
    }
    // While the assignments are numbered.
    shared.write(launch, args, partition);
    place_items(launch, args, options, tactics, shared, partition)?;
    if launch.common.shape.has_tiled_scales() {
        wait_for_offsets(launch)?;
        scales::clear_unused(launch, args, shared.groups, partition);
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
    let items = launch.tokens * parts;
    // Outputs that may be too small are left alone until that is known.
    if items != 0 && needs_offsets(&common.shape, args, shared.rows, launch.tokens) {
        wait_for_offsets(launch)?;
    }
    let mut queue = WorkQueue::new(machine, partition, items, Counter::DispatchTickets);
    while let Some(index) = queue.next_item() {
        let item = Item {
            source: common.rank(),
            token: index >> parts.trailing_zeros(),
            part: index & (parts - 1),
            parts,
        };
        let experts = read_experts(launch, options, numbering, item.token);
        place_item(launch, args, numbering, item, experts)?;
        queue.take_ticket();
    }
    Ok(())
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

/// Puts an item into its places, if it has some, and keeps its weights and its places for combine.
#[inline(always)]
fn place_item<M: Machine>(
    launch: &Launch<M>,
    args: &DispatchArgs,
    numbering: Numbering,
    item: Item,
    experts: M::Lanes<u32>,
) -> Result<(), Aborted> {
    let (machine, common) = (launch.machine, launch.common);
    let shape = &common.shape;
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
        return Ok(());
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
    let range = item.range(common.row.payload_bytes);
    let from = Row::Tensor(Tensor::Input, item.token);
    // On its way while the bases are waited for.
    let ahead = (shape.format() == TokenFormat::Bf16).then(|| machine.read_ahead(range, from));
    let destinations = match locate(launch, args, item.source, experts, ranks_in_expert) {
        Ok(destinations) => destinations,
        Err(miss) => return refuse_item(launch, args, item, miss),
    };
    // Before the payload: nothing of it must be kept meanwhile.
    if item.part == 0 {
        describe_rows(launch, args, item, destinations);
    }
    match ahead {
        Some(ahead) => {
            let to = |k| Row::Tensor(Tensor::Output, machine.broadcast(destinations.positions, k));
            let copied = machine.copy_row(range, from, ahead, here, to);
            debug_assert_eq!(copied, Ok(()), "the input is there");
        }
        None => {
            let to = |k| OutputRow {
                row: machine.broadcast(destinations.positions, k),
                scales: machine.broadcast(destinations.scales, k),
            };
            let stride = scales::stride(shape, args);
            machine.encode_output(range, item.token, stride, here, to);
        }
    }
    Ok(())
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
