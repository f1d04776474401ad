//! The sending half of dispatch.
//!
//! Some warps announce: entry counts, and which tokens go where. The others send rows, payload
//! first; only the header waits for the ordinals that the announcing warps compute.

use ferry_layout::{
    Counter, DispatchArgs, Fault, FaultKind, Header, NOT_ROUTED, Rank, Region, Table, Tagged,
    Tensor,
};

use crate::route::{for_each_bit, lane_or_none, node_of, on_each_rank, rank_bit, ranks_of};
use crate::wait::{Launch, Stopped};
use crate::{LANES, Machine, Put, Row, gather, slot};

#[inline(always)]
pub fn send<M: Machine>(launch: &Launch<M>, args: &DispatchArgs) -> Result<(), Stopped> {
    let (warp, warps) = (launch.machine.warp(), launch.machine.warps());
    let groups = args.tokens.div_ceil(LANES);
    let tasks = groups + launch.common.shape.experts;
    let announcers = tasks.min(warps / 2).max(1);
    if warp < announcers {
        if warp == 0 {
            announce_tokens(launch, args);
        }
        for task in (warp..tasks).step_by(announcers as usize) {
            if task < groups {
                announce_presence(launch, args, task);
            } else {
                announce_expert(launch, args, task - groups);
            }
        }
    }
    // A launch of a single warp announces first and sends then.
    let senders = if warps == 1 { 1 } else { warps - announcers };
    let Some(sender) = (warp + senders).checked_sub(warps) else {
        return Ok(());
    };
    for token in (sender..args.tokens).step_by(senders as usize) {
        send_token(launch, args, token)?;
    }
    Ok(())
}

/// Tells every rank how many tokens this one has.
#[inline(always)]
fn announce_tokens<M: Machine>(launch: &Launch<M>, args: &DispatchArgs) {
    let Launch {
        machine,
        common,
        epoch,
        ..
    } = launch;
    let word = common.window.token_count(common.rank());
    let value = Tagged::new(*epoch, args.tokens).0;
    on_each_rank(*machine, common.shape.ranks, |rank| {
        machine.signal(rank, word, value)
    });
}

/// Tells every rank which of 32 tokens come to it.
#[inline(always)]
fn announce_presence<M: Machine>(launch: &Launch<M>, args: &DispatchArgs, group: u32) {
    let Launch {
        machine,
        common,
        epoch,
        ..
    } = launch;
    let shape = &common.shape;
    let touched = machine.lanes(|lane| {
        let token = group * LANES + lane;
        let mut ranks = 0;
        if token < args.tokens {
            for k in 0..shape.top_k {
                ranks |= rank_bit(
                    shape,
                    machine.read(Table::TopkIds, entry(shape.top_k, token, k)),
                );
            }
        }
        ranks
    });
    let word = common.window.presence(common.rank(), group);
    for rank in 0..shape.ranks {
        let bits =
            machine.ballot(machine.lanes(|lane| machine.own(touched, lane) >> rank & 1 != 0));
        let value = Tagged::new(*epoch, bits).0;
        machine.lanes(|lane| {
            if lane == 0 {
                machine.signal(Rank(rank), word, value);
            }
        });
    }
}

/// Numbers the entries for one expert in the order of tokens, and tells its rank how many there
/// are.
#[inline(always)]
fn announce_expert<M: Machine>(launch: &Launch<M>, args: &DispatchArgs, expert: u32) {
    let Launch {
        machine,
        common,
        epoch,
        ..
    } = launch;
    let shape = &common.shape;
    let entries = args.tokens as u64 * shape.top_k as u64;
    let mut count = 0;
    let mut first = 0;
    while first < entries {
        let hit = machine.ballot(machine.lanes(|lane| {
            let at = first + lane as u64;
            at < entries && machine.read(Table::TopkIds, at) == expert
        }));
        machine.lanes(|lane| {
            if hit >> lane & 1 != 0 {
                let earlier = (hit & ((1 << lane) - 1)).count_ones();
                machine.write(Table::Ordinals, first + lane as u64, count + earlier);
            }
        });
        count += hit.count_ones();
        first += LANES as u64;
    }
    let home = shape.rank_of(expert);
    let word = common
        .window
        .count(common.rank(), expert % shape.local_experts());
    machine.lanes(|lane| {
        if lane == 0 {
            machine.signal(home, word, Tagged::new(*epoch, count).0);
        }
    });
    gather::part_done(*machine, Counter::ScansDone);
}

/// Sends one token to every rank that holds one of its experts.
#[inline(always)]
fn send_token<M: Machine>(
    launch: &Launch<M>,
    args: &DispatchArgs,
    token: u32,
) -> Result<(), Stopped> {
    let Launch {
        machine,
        common,
        epoch,
        ..
    } = launch;
    let (shape, window, me) = (&common.shape, &common.window, common.rank());
    let experts = read_route(launch, token);
    let ranks = ranks_of(*machine, shape, experts);
    let near = ranks & node_of(shape, me);
    let far = ranks & !near;

    let row = window.dispatch_row(me, token);
    let staging = window.dispatch_staging(token);
    let payload = shape.payload_bytes();
    machine.copy_row(payload, Row::Tensor(Tensor::Input, token), near, |rank| {
        Row::Window(Rank(rank), row)
    });
    if far != 0 {
        machine.copy_row(payload, Row::Tensor(Tensor::Input, token), 1, |_| {
            Row::Window(me, staging)
        });
    }

    launch.wait_local(Counter::ScansDone, Region::Ordinals, || {
        gather::is_done(*machine, Counter::ScansDone, *epoch, shape.experts)
    })?;
    for_each_bit(near, |rank| {
        write_header(launch, args, token, Rank(rank), row.plus(payload))
    });
    if far != 0 {
        write_header(launch, args, token, me, staging.plus(payload));
    }

    let flag = window.dispatch_flag(me, token);
    machine.release();
    on_each_rank(*machine, shape.ranks, |rank| {
        if near >> rank.0 & 1 != 0 {
            slot::publish(*machine, rank, flag, *epoch);
        }
    });
    for_each_bit(far, |rank| {
        machine.put(Put {
            peer: Rank(rank),
            from: staging,
            to: row,
            bytes: shape.dispatch_row_bytes(),
            signal: flag,
            value: epoch.0,
        });
    });
    Ok(())
}

/// The experts of a token, with every id that does not exist reported and left out; kept for
/// combine.
#[inline(always)]
fn read_route<M: Machine>(launch: &Launch<M>, token: u32) -> M::Lanes<u32> {
    let Launch {
        machine, common, ..
    } = launch;
    let shape = &common.shape;
    let given = machine.lanes(|lane| {
        lane_or_none(lane, shape.top_k, || {
            machine.read(Table::TopkIds, entry(shape.top_k, token, lane))
        })
    });
    if common.debug_checks != 0 {
        report_duplicates(launch, token, given);
    }
    machine.lanes(|lane| {
        let id = machine.own(given, lane);
        let valid = id < shape.experts;
        if !valid && id != NOT_ROUTED {
            let fault = Fault {
                peer: Rank(lane),
                region: Region::TopkIds,
                index: token as u64,
                wanted: shape.experts as u64,
                saw: id as u64,
                ..launch.fault()
            };
            launch.record(FaultKind::InvalidExpert, fault);
        }
        let id = if valid { id } else { NOT_ROUTED };
        if lane < shape.top_k {
            machine.write(Table::Routes, entry(shape.top_k, token, lane), id);
        }
        id
    })
}

/// Reports an expert that a token lists twice.
#[inline(always)]
fn report_duplicates<M: Machine>(launch: &Launch<M>, token: u32, experts: M::Lanes<u32>) {
    let Launch {
        machine, common, ..
    } = launch;
    for k in 1..common.shape.top_k {
        let id = machine.broadcast(experts, k);
        let same = machine.ballot(machine.lanes(|lane| machine.own(experts, lane) == id));
        if id == NOT_ROUTED || same & ((1 << k) - 1) == 0 {
            continue;
        }
        machine.lanes(|lane| {
            if lane == k {
                let fault = Fault {
                    peer: Rank(k),
                    region: Region::TopkIds,
                    index: token as u64,
                    saw: id as u64,
                    ..launch.fault()
                };
                launch.record(FaultKind::DuplicateExpert, fault);
            }
        });
    }
}

/// Writes a token's header behind its payload, a word a lane.
#[inline(always)]
fn write_header<M: Machine>(
    launch: &Launch<M>,
    args: &DispatchArgs,
    token: u32,
    to: Rank,
    header: ferry_layout::ByteOffset,
) {
    let Launch {
        machine, common, ..
    } = launch;
    let top_k = common.shape.top_k;
    machine.lanes(|lane| {
        if lane == 0 {
            machine.write_window(to, header.word(Header::TOKEN), token);
        }
        if lane < top_k {
            let at = entry(top_k, token, lane);
            let weight = match args.topk_weights {
                0 => 1f32.to_bits(),
                _ => machine.read(Table::TopkWeights, at),
            };
            let expert = machine.read(Table::Routes, at);
            let ordinal = machine.read(Table::Ordinals, at);
            machine.write_window(to, header.word(Header::expert(lane)), expert);
            machine.write_window(to, header.word(Header::weight(top_k, lane)), weight);
            machine.write_window(to, header.word(Header::ordinal(top_k, lane)), ordinal);
        }
    });
}

/// Index of entry `k` of a token in a `[token, K]` table.
#[inline(always)]
pub fn entry(top_k: u32, token: u32, k: u32) -> u64 {
    token as u64 * top_k as u64 + k as u64
}
