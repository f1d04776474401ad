//! Combine on the source: what comes back for a token is summed as it arrives.

use ferry_layout::{
    CombineArgs, CombineMode, Counter, Kernel, NOT_ROUTED, Rank, Region, Table, Tensor,
};

use crate::combine::Crews;
use crate::route::{lane_or_none, ranks_of};
use crate::send::entry;
use crate::share::{Seat, Share};
use crate::units::Unit;
use crate::wait::{Awaited, Launch, Stopped};
use crate::{Gate, LANES, Machine, Row, Span, gather, handshake, slot};

/// Warps that may look at all their words again and again: those of many would be in the way of what
/// comes. Found by measuring (BENCHMARKS.md).
const FEW_POLLERS: u32 = 512;

/// Sums what comes back for every token of this rank, and ends the round.
#[inline(always)]
pub fn gather_rows<M: Machine>(
    launch: &Launch<M>,
    args: &CombineArgs,
    crews: Crews,
) -> Result<(), Stopped> {
    let Launch { machine, epoch, .. } = launch;
    let shape = &launch.common.shape;
    let parts = match crews.is_bare {
        true => shape.sum_parts(launch.common.tokens),
        false => launch.common.row.parts(launch.common.tokens),
    };
    if let Some(Share {
        index: mut unit,
        of,
    }) = crews.gatherer(machine.seat())
    {
        while unit < launch.common.tokens * parts {
            let token = unit >> parts.trailing_zeros();
            let part = unit & (parts - 1);
            let unit_of = Unit {
                source: launch.common.rank(),
                token,
                part,
                parts,
            };
            gather_unit(launch, args, unit_of, crews.is_bare)?;
            unit += of;
        }
    }
    if machine.warp() == 0 {
        wait_for_peers(launch)?;
        // This rank is one of them: all warps have begun, and read the counter.
        if launch.kernel == Kernel::Combine {
            machine.store(Counter::Finished, epoch.0);
        }
    }
    let Seat {
        in_block, blocks, ..
    } = machine.seat();
    if launch.kernel != Kernel::Combine && machine.last_of_block(Gate::Left, in_block) {
        gather::pass(*machine, Counter::Exits, blocks, || {
            machine.store(Counter::Finished, epoch.0);
        });
    }
    Ok(())
}

/// Waits until every rank has read what this one dispatched, so that the next round may write
/// there.
#[inline(always)]
fn wait_for_peers<M: Machine>(launch: &Launch<M>) -> Result<(), Stopped> {
    let Launch {
        machine,
        common,
        epoch,
        ..
    } = launch;
    let ranks = common.shape.ranks;
    for first in (0..ranks).step_by(LANES as usize) {
        let peer = |lane: u32| Rank((first + lane).min(ranks - 1));
        let word = |lane| common.window.consumed(peer(lane));
        launch.wait_lanes(
            |lane| handshake::has_consumed(*machine, word(lane), *epoch).then_some(()),
            |lane| Awaited {
                peer: peer(lane),
                region: Region::Consumed,
                index: 0,
                saw: machine.load_signal(word(lane)),
            },
        )?;
    }
    Ok(())
}

/// Waits for a part of one token's rows and writes that part of its output.
#[inline(always)]
fn gather_unit<M: Machine>(
    launch: &Launch<M>,
    args: &CombineArgs,
    unit: Unit,
    is_bare: bool,
) -> Result<(), Stopped> {
    let Launch {
        machine, common, ..
    } = launch;
    let (shape, window, me) = (&common.shape, &common.window, common.rank());
    let Unit {
        token, part, parts, ..
    } = unit;
    let experts = machine.lanes(|lane| {
        lane_or_none(lane, shape.top_k, || {
            machine.read(Table::Routes, entry(shape.top_k, token, lane))
        })
    });
    let span = Span::part(shape.combine_row_bytes(), part, parts);
    let at = |slot| Row::Window(me, window.combine_row(token, slot));
    match shape.mode() {
        CombineMode::Reduced => {
            let ranks = ranks_of(*machine, shape, experts);
            let slots = low_bits(ranks.count_ones());
            if is_bare {
                let bare = |slot| window.bare_combine_row(token, slot);
                let to = Row::Tensor(Tensor::Combined, token);
                let few = launch.common.tokens * parts <= FEW_POLLERS;
                return machine
                    .sum_bare_rows(span, (slots, few), bare, to)
                    .or_else(|slot| {
                        launch.give_up_on(Awaited {
                            peer: nth_rank(ranks, slot),
                            region: Region::CombineRow,
                            index: token as u64,
                            saw: 0,
                        })
                    });
            }
            wait_for_slots(launch, unit, slots, |slot| nth_rank(ranks, slot))?;
            machine.sum_rows(
                span,
                slots,
                |slot| (at(slot), 1.0),
                Row::Tensor(Tensor::Combined, token),
            );
        }
        CombineMode::Exact => {
            let slots =
                machine.ballot(machine.lanes(|lane| machine.own(experts, lane) != NOT_ROUTED));
            wait_for_slots(launch, unit, slots, |slot| {
                shape.rank_of(machine.read(Table::Routes, entry(shape.top_k, token, slot)))
            })?;
            if args.topk_weights == 0 {
                keep_apart(launch, unit, slots);
            } else {
                let weights = machine.lanes(|lane| {
                    lane_or_none(lane, shape.top_k, || {
                        machine.read(Table::TopkWeights, entry(shape.top_k, token, lane))
                    })
                });
                let weighted = |slot| (at(slot), f32::from_bits(machine.broadcast(weights, slot)));
                machine.sum_rows(span, slots, weighted, Row::Tensor(Tensor::Combined, token));
            }
        }
    }
    Ok(())
}

/// Waits until the rows in `slots` of a token are whole; `sender` says who fills a slot.
#[inline(always)]
fn wait_for_slots<M: Machine>(
    launch: &Launch<M>,
    unit: Unit,
    slots: u32,
    sender: impl Fn(u32) -> Rank,
) -> Result<(), Stopped> {
    let Launch {
        machine,
        common,
        epoch,
        ..
    } = launch;
    let flag = |slot| common.window.combine_flag(unit.flag(), slot);
    launch.wait_lanes(
        |lane| {
            let full = slots >> lane & 1 == 0 || slot::is_full(*machine, flag(lane), *epoch);
            full.then_some(())
        },
        |lane| Awaited {
            peer: sender(lane),
            region: Region::CombineRow,
            index: unit.token as u64,
            saw: machine.load_signal(flag(lane)),
        },
    )?;
    Ok(())
}

/// Every slot's row as it came, zeros where nothing was routed.
#[inline(always)]
fn keep_apart<M: Machine>(launch: &Launch<M>, unit: Unit, slots: u32) {
    let Launch {
        machine, common, ..
    } = launch;
    let (shape, window, me) = (&common.shape, &common.window, common.rank());
    let Unit {
        token, part, parts, ..
    } = unit;
    let span = Span::part(shape.combine_row_bytes(), part, parts);
    for k in 0..shape.top_k {
        let to = Row::Tensor(Tensor::Combined, token * shape.top_k + k);
        if slots >> k & 1 != 0 {
            let from = Row::Window(me, window.combine_row(token, k));
            machine.copy_row((span, from), machine.read_ahead(span, from), 1u32, |_| to);
        } else {
            machine.sum_rows(span, 0, |_| (to, 0.0), to);
        }
    }
}

/// The lowest `count` bits, at most 32.
#[inline(always)]
fn low_bits(count: u32) -> u32 {
    ((1u64 << count) - 1) as u32
}

/// The rank of the `slot`-th set bit.
#[inline(always)]
fn nth_rank(mut ranks: u64, slot: u32) -> Rank {
    for _ in 0..slot {
        ranks &= ranks - 1;
    }
    Rank(ranks.trailing_zeros())
}
