//! The sending half of dispatch.
//!
//! A row goes out payload first; its header needs the ordinals that the announcing warps work out
//! meanwhile. Where entries are few they are known before, and the header of a large bare part goes first.
//! Every part of a row is released and flagged by itself, but those of bare rows, whose words tell of
//! themselves: no word is sent as it was before ([`Machine::encode_row`], [`Machine::copy_row`],
//! [`Entries`](ferry_layout::Entries)).

use ferry_layout::{
    ByteOffset, Counter, DispatchArgs, Fault, FaultKind, Header, NOT_ROUTED, Rank, Region, Table,
    Tensor, TokenFormat, assignment_index, avoid_sentinel,
};

use crate::dispatch::numbering::tiles::read_ranks_in_expert;
use crate::dispatch::numbering::{count_before, expert_groups, read_expert_id};
use crate::machine::Machine;
use crate::machine::counters::BlockCounter;
use crate::machine::position::WarpPosition;
use crate::machine::rows::{Put, Row};
use crate::sync::arrivals;
use crate::sync::launch::{Aborted, Launch};
use crate::wire::flagged;
use crate::work::item::{Item, RowLocation};
use crate::work::partition::{Partition, WorkQueue, warps_of_block};
use crate::work::route::{for_each_bit, lane_or_none, node_of, on_each_rank, p2p_ranks, ranks_of};

/// Sends this warp's share of the units (parts of tokens). `is_specialised`: other warps only receive.
#[inline(always)]
pub fn send_items<M: Machine>(
    launch: &Launch<M>,
    args: &DispatchArgs,
    (partition, is_specialised): (Partition, bool),
) -> Result<(), Aborted> {
    let (machine, common, epoch) = (launch.machine, launch.common, launch.epoch);
    let shape = &common.shape;
    let parts = common.row.parts(common.tokens);
    let is_numbered = || {
        let scans = expert_groups(shape.experts);
        arrivals::is_done(machine, Counter::ScansDone, epoch, scans)
    };
    let items = common.tokens * parts;
    let is_remote = machine.spans_nodes();
    let by_block = items <= partition.of && !is_remote && !is_specialised;
    let mut queue = WorkQueue::new(machine, partition, items, Counter::DispatchTickets);
    while let Some(item) = queue.next_item() {
        let token = item >> parts.trailing_zeros();
        let route = read_route(launch, args, token);
        // Counted before the payload goes out: behind its stores, loads take many times as long.
        let is_small_batch = shape.is_small_batch(common.tokens);
        let words_or_experts = match is_small_batch {
            true => words(
                launch,
                route.experts,
                count_before(launch, token, route.experts),
            ),
            false => route.experts,
        };
        let row_part = Item {
            source: common.rank(),
            token,
            part: item & (parts - 1),
            parts,
        };
        let location = row_part.location(common);
        send_payload(launch, route, location);
        queue.take_ticket();
        if item < partition.of && !is_small_batch {
            launch.wait_local(Counter::ScansDone, Region::RanksInExpert, is_numbered)?;
        }
        let assignments = match (is_small_batch, words_or_experts) {
            (true, counted) => counted,
            (false, experts) => words(
                launch,
                experts,
                read_ranks_in_expert(launch, token, experts),
            ),
        };
        write_header(launch, route, (location, row_part.part), assignments);
        if location.is_inline {
            // Its words say themselves that they have come.
        } else if by_block {
            publish_by_block(launch, (partition, items), route.ranks);
        } else {
            publish(launch, route, item);
        }
    }
    Ok(())
}

/// Flags this warp's only unit, of `items`, where no warp has more: the last warp of a block releases
/// what all of them have written, and sets their flags. `ranks` are those of the unit's token.
#[inline(always)]
fn publish_by_block<M: Machine>(
    launch: &Launch<M>,
    (partition, items): (Partition, u32),
    ranks: u64,
) {
    let (machine, common, epoch) = (launch.machine, launch.common, launch.epoch);
    let first = machine.warp() - partition.index;
    let callers = warps_of_block(machine, first, items);
    let Some(ranks) = machine.hand_to_last(BlockCounter::Sent, callers, ranks) else {
        return;
    };
    machine.release();
    machine.lanes(|lane| {
        // A lane for each warp of the block.
        let warp_position = WarpPosition {
            index: lane,
            ..machine.warp_position()
        };
        let warp = warp_position.warp();
        for_each_bit(machine.own(ranks, lane), |rank| {
            let flag = common.window.dispatch_flag(common.rank(), warp - first);
            flagged::publish(machine, Rank(rank), flag, epoch);
        });
    });
}

/// Where a token goes.
#[derive(Clone, Copy)]
struct Route<L> {
    token: u32,
    /// Its experts, one a lane.
    experts: L,
    /// The router's weights for them, as f32 bits, if it gave any.
    weights: L,
    /// Whether it did.
    is_weighted: bool,
    /// The ranks of its experts, as bits.
    ranks: u64,
}

/// Copies a part of a token to every rank that holds one of its experts.
#[inline(always)]
fn send_payload<M: Machine>(
    launch: &Launch<M>,
    route: Route<M::Lanes<u32>>,
    location: RowLocation,
) {
    let (machine, common) = (launch.machine, launch.common);
    let (shape, window, me) = (&common.shape, &common.window, common.rank());
    let Route { token, ranks, .. } = route;
    let range = location.range;
    // A bit for each rank of the node; for the staging, where far ranks are served from, that of a far rank. Each
    // rank begins with another one, and with another one for each token: else all of them would store to the same
    // rank at the same time.
    let p2p = p2p_ranks(machine, common, ranks);
    let is_remote = p2p != ranks;
    let staging = match is_remote {
        true => (node_of(shape, me).trailing_zeros() + shape.p2p_world_size) % u64::BITS,
        false => 0,
    };
    let targets = p2p | (is_remote as u64) << staging;
    let rotation = (me.0 + token) % shape.ranks;
    let to = |target| match (target + rotation) % u64::BITS {
        rank if is_remote && rank == staging => Row::Window(me, window.dispatch_staging(token)),
        rank => location.of(Rank(rank)),
    };
    let targets = targets.rotate_right(rotation);
    match shape.format() {
        TokenFormat::Bf16 => {
            let from = Row::Tensor(Tensor::Input, token);
            machine.copy_row((range, from), machine.read_ahead(range, from), targets, to);
        }
        _ => machine.encode_row(range, token, targets, to),
    }
}

/// Flags a unit, after its payload and header were written.
#[inline(always)]
fn publish<M: Machine>(launch: &Launch<M>, route: Route<M::Lanes<u32>>, item: u32) {
    let (machine, common, epoch) = (launch.machine, launch.common, launch.epoch);
    let (shape, window, me) = (&common.shape, &common.window, common.rank());
    let Route { token, ranks, .. } = route;
    let p2p = p2p_ranks(machine, common, ranks);
    let remote = ranks & !p2p;
    machine.release();
    let flag = window.dispatch_flag(me, item);
    on_each_rank(machine, shape.ranks, |rank| {
        if p2p >> rank.0 & 1 != 0 {
            flagged::publish(machine, rank, flag, epoch);
        }
    });
    for_each_bit(remote, |rank| {
        machine.put(Put {
            peer: Rank(rank),
            from: window.dispatch_staging(token),
            to: window.dispatch_row(me, token),
            bytes: shape.dispatch_row_bytes(),
            signal: flag,
            value: epoch.0,
        });
    });
}

/// The experts of a token, with every id that does not exist reported and left out; kept for
/// combine.
#[inline(always)]
fn read_route<M: Machine>(
    launch: &Launch<M>,
    args: &DispatchArgs,
    token: u32,
) -> Route<M::Lanes<u32>> {
    let (machine, common) = (launch.machine, launch.common);
    let shape = &common.shape;
    let given = machine.lanes(|lane| {
        lane_or_none(lane, shape.top_k, || {
            let is_small_batch = shape.is_small_batch(common.tokens);
            read_expert_id(
                machine,
                is_small_batch,
                assignment_index(shape.top_k, token, lane),
            )
        })
    });
    // Always read, of the ids if there are no weights, and looked at only where it is written: a load that may not take
    // place would be waited for before the payload is read.
    let is_weighted = args.topk_weights != 0;
    let table = match is_weighted {
        true => Table::TopkWeights,
        false => Table::TopkIds,
    };
    let weights = machine.lanes(|lane| {
        machine.read(
            table,
            assignment_index(shape.top_k, token, lane.min(shape.top_k - 1)),
        )
    });
    if common.debug_checks != 0 {
        report_duplicates(launch, token, given);
    }
    let is_invalid = |id: u32| id >= shape.experts && id != NOT_ROUTED;
    let invalid = machine.ballot(machine.lanes(|lane| is_invalid(machine.own(given, lane))));
    if invalid != 0 {
        launch.record_input(FaultKind::InvalidExpert, invalid, |lane| Fault {
            peer: Rank(lane),
            region: Region::TopkIds,
            index: token as u64,
            wanted: shape.experts as u64,
            saw: machine.own(given, lane) as u64,
            ..launch.fault()
        });
    }
    let experts = machine.lanes(|lane| {
        let id = machine.own(given, lane);
        let id = if id < shape.experts { id } else { NOT_ROUTED };
        if lane < shape.top_k {
            machine.write(
                Table::Routes,
                assignment_index(shape.top_k, token, lane),
                id,
            );
        }
        id
    });
    Route {
        token,
        experts,
        weights,
        is_weighted,
        ranks: ranks_of(machine, shape, experts),
    }
}

/// Reports an expert that a token lists twice.
#[inline(always)]
fn report_duplicates<M: Machine>(launch: &Launch<M>, token: u32, experts: M::Lanes<u32>) {
    let (machine, common) = (launch.machine, launch.common);
    for k in 1..common.shape.top_k {
        let id = machine.broadcast(experts, k);
        let same = machine.ballot(machine.lanes(|lane| machine.own(experts, lane) == id));
        if id == NOT_ROUTED || same & ((1 << k) - 1) == 0 {
            continue;
        }
        launch.record_input(FaultKind::DuplicateExpert, 1 << k, |_| Fault {
            peer: Rank(k),
            region: Region::TopkIds,
            index: token as u64,
            saw: id as u64,
            ..launch.fault()
        });
    }
}

/// Entries as they travel, one a lane.
#[inline(always)]
fn words<M: Machine>(
    launch: &Launch<M>,
    experts: M::Lanes<u32>,
    ranks_in_expert: M::Lanes<u32>,
) -> M::Lanes<u32> {
    let machine = launch.machine;
    machine.lanes(|lane| {
        let (expert, rank_in_expert) = (
            machine.own(experts, lane),
            machine.own(ranks_in_expert, lane),
        );
        launch
            .common
            .shape
            .assignment_words()
            .encode(expert, rank_in_expert)
    })
}

/// Writes a token's header behind its payload, an entry a lane: to its ranks of this node, and into
/// the staging if the row also goes to others. Every part brings the entries: whoever sees the part's
/// flag sees them, too. Bare parts have theirs each. The weights, which combine reads, go with the first one.
#[inline(always)]
fn write_header<M: Machine>(
    launch: &Launch<M>,
    route: Route<M::Lanes<u32>>,
    (location, part): (RowLocation, u32),
    words: M::Lanes<u32>,
) {
    let (machine, common) = (launch.machine, launch.common);
    let (shape, window, me) = (&common.shape, &common.window, common.rank());
    let Route { token, ranks, .. } = route;
    let p2p = p2p_ranks(machine, common, ranks);
    let staging = window.dispatch_staging(token).plus(common.row.header);
    let write = |to, header: ByteOffset| {
        machine.lanes(|lane| {
            if lane < shape.top_k {
                let word = header.plus(Header::assignment(lane));
                machine.write_word(to, word, machine.own(words, lane));
                if part == 0 {
                    let weight = header.plus(Header::weight(shape.top_k, lane));
                    let bits = match route.is_weighted {
                        true => machine.own(route.weights, lane),
                        false => 1f32.to_bits(),
                    };
                    machine.write_word(to, weight, avoid_sentinel(bits));
                }
            }
        });
    };
    for_each_bit(p2p, |rank| {
        write(Rank(rank), location.row.plus(location.header))
    });
    if ranks != p2p {
        write(me, staging);
    }
}
