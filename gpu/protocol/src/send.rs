//! The sending half of dispatch.
//!
//! Some warps announce. The others send rows, payload first; only the headers wait for the
//! ordinals that the announcing warps compute. Rows that were sent before then share one release.

use ferry_layout::{
    ByteOffset, Counter, DispatchArgs, Fault, FaultKind, Header, NOT_ROUTED, Rank, Region, Table,
    Tensor, TokenFormat,
};

use crate::announce::{announce, tasks};
use crate::route::{for_each_bit, lane_or_none, node_of, on_each_rank, ranks_of};
use crate::wait::{Launch, Stopped};
use crate::{Machine, Put, Row, Span, gather, slot};

/// One in how many warps sends, where there are more units than warps and the launch receives
/// as well: the wire is full all the same, and the others put rows in their places meanwhile.
/// Encoding takes more warps than copying. Found by measuring (BENCHMARKS.md).
#[inline(always)]
const fn sender_share(format: TokenFormat) -> u32 {
    match format {
        TokenFormat::Bf16 => 8,
        TokenFormat::BlockwiseFp8 => 3,
    }
}

/// Announces and sends. `receives`: the launch goes on to receive.
#[inline(always)]
pub fn send<M: Machine>(
    launch: &Launch<M>,
    args: &DispatchArgs,
    receives: bool,
) -> Result<(), Stopped> {
    let (warp, warps) = (launch.machine.warp(), launch.machine.warps());
    let shape = &launch.common.shape;
    let announcers = tasks(shape.experts, args.tokens).min(warps / 2).max(1);
    if warp < announcers {
        announce(launch, args, warp, announcers);
    }
    // A launch of a single warp announces first and sends then.
    let free = if warps == 1 { 1 } else { warps - announcers };
    let units = args.tokens * shape.parts(args.tokens);
    let senders = match receives && units > free {
        true => (warps / sender_share(shape.format())).clamp(1, free),
        false => free,
    };
    match (warp + free).checked_sub(warps) {
        Some(sender) if sender < senders => send_units(launch, args, sender, senders),
        _ => Ok(()),
    }
}

/// Sends units `sender`, `sender + senders`, ...: payloads as fast as they go, headers and flags
/// once the ordinals are there.
#[inline(always)]
fn send_units<M: Machine>(
    launch: &Launch<M>,
    args: &DispatchArgs,
    sender: u32,
    senders: u32,
) -> Result<(), Stopped> {
    let Launch {
        machine,
        common,
        epoch,
        ..
    } = launch;
    let shape = &common.shape;
    let parts = shape.parts(args.tokens);
    let units = args.tokens * parts;
    let mut numbered = false;
    let mut unflagged = sender;
    let mut unit = sender;
    while unit < units {
        send_payload(launch, unit / parts, unit % parts, parts);
        let next = unit + senders;
        let is_last = next >= units;
        let is_numbered = || gather::is_done(*machine, Counter::ScansDone, *epoch, shape.experts);
        if is_last && !numbered {
            launch.wait_local(Counter::ScansDone, Region::Ordinals, is_numbered)?;
            numbered = true;
        }
        numbered = numbered || is_numbered();
        if numbered {
            publish_units(launch, args, (unflagged, next), senders, parts);
            unflagged = next;
        }
        unit = next;
    }
    Ok(())
}

/// Copies a part of a token to every rank that holds one of its experts.
#[inline(always)]
fn send_payload<M: Machine>(launch: &Launch<M>, token: u32, part: u32, parts: u32) {
    let Launch {
        machine, common, ..
    } = launch;
    let (shape, window, me) = (&common.shape, &common.window, common.rank());
    let experts = read_route(launch, token);
    let ranks = ranks_of(*machine, shape, experts);
    let near = ranks & node_of(shape, me);
    let span = Span::part(shape.payload_bytes(), part, parts);
    let row = window.dispatch_row(me, token);
    let to = |rank| Row::Window(Rank(rank), row);
    let staged = |_| Row::Window(me, window.dispatch_staging(token));
    let from = Row::Tensor(Tensor::Input, token);
    match shape.format() {
        TokenFormat::Bf16 => machine.copy_row(span, from, near, to),
        TokenFormat::BlockwiseFp8 => machine.encode_fp8(span, token, near, to),
    }
    if M::REACHES_FAR && ranks != near {
        match shape.format() {
            TokenFormat::Bf16 => machine.copy_row(span, from, 1, staged),
            TokenFormat::BlockwiseFp8 => machine.encode_fp8(span, token, 1, staged),
        }
    }
}

/// Writes the headers of units whose payload was sent, and then flags them.
#[inline(always)]
fn publish_units<M: Machine>(
    launch: &Launch<M>,
    args: &DispatchArgs,
    (first, end): (u32, u32),
    senders: u32,
    parts: u32,
) {
    let Launch {
        machine,
        common,
        epoch,
        ..
    } = launch;
    let (shape, window, me) = (&common.shape, &common.window, common.rank());
    let header_start = shape.header_start();
    let node = node_of(shape, me);
    let mut unit = first;
    while unit < end {
        let token = unit / parts;
        let ranks = routed_ranks(launch, token);
        let header = window.dispatch_row(me, token).plus(header_start);
        // Every part brings the header: whoever sees the part's flag sees the header, too.
        for_each_bit(ranks & node, |rank| {
            write_header(launch, args, token, Rank(rank), header)
        });
        if M::REACHES_FAR && ranks & !node != 0 {
            write_header(
                launch,
                args,
                token,
                me,
                window.dispatch_staging(token).plus(header_start),
            );
        }
        unit += senders;
    }
    machine.release();
    let mut unit = first;
    while unit < end {
        let token = unit / parts;
        let ranks = routed_ranks(launch, token);
        let flag = window.dispatch_flag(me, unit);
        on_each_rank(*machine, shape.ranks, |rank| {
            if (ranks & node) >> rank.0 & 1 != 0 {
                slot::publish(*machine, rank, flag, *epoch);
            }
        });
        let far = if M::REACHES_FAR { ranks & !node } else { 0 };
        for_each_bit(far, |rank| {
            machine.put(Put {
                peer: Rank(rank),
                from: window.dispatch_staging(token),
                to: window.dispatch_row(me, token),
                bytes: shape.dispatch_row_bytes(),
                signal: flag,
                value: epoch.0,
            });
        });
        unit += senders;
    }
}

/// The ranks that a token goes to, as bits, from what [`read_route`] kept.
#[inline(always)]
fn routed_ranks<M: Machine>(launch: &Launch<M>, token: u32) -> u64 {
    let Launch {
        machine, common, ..
    } = launch;
    let shape = &common.shape;
    let experts = machine.lanes(|lane| {
        lane_or_none(lane, shape.top_k, || {
            machine.read(Table::Routes, entry(shape.top_k, token, lane))
        })
    });
    ranks_of(*machine, shape, experts)
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
    header: ByteOffset,
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
