//! Combine: expert outputs go back to their tokens and are summed.

use ferry_layout::{
    CombineArgs, CombineMode, Counter, Header, Kernel, NOT_ROUTED, Rank, Region, Table, Tensor,
};

use crate::receive::row_map_entry;
use crate::route::{for_each_bit, lane_or_none, node_of, on_each_rank, ranks_of, reduced_slot};
use crate::send::entry;
use crate::share::{Share, callers};
use crate::units::{Batch, Unit, extent_of_all};
use crate::wait::{Awaited, Launch, Stopped};
use crate::{Gate, LANES, Machine, Put, Row, Span, gather, handshake, slot};

/// Sends this rank's expert outputs back; waits for nothing that a peer does. After the round's
/// dispatch, in stream order. Collective.
#[inline(always)]
pub fn combine_async<M: Machine>(machine: &M, args: &CombineArgs) -> Result<(), Stopped> {
    let launch = Launch::begin(machine, &args.common, Kernel::CombineAsync)?;
    send_back(&launch, args, Crews::apart(machine));
    Ok(())
}

/// Waits for the rows of this rank's tokens and sums them; ends the round. After
/// `combine_async`, in stream order. Collective.
#[inline(always)]
pub fn combine_wait<M: Machine>(machine: &M, args: &CombineArgs) -> Result<(), Stopped> {
    let launch = Launch::begin(machine, &args.common, Kernel::CombineWait)?;
    gather_rows(&launch, args, Crews::apart(machine))
}

/// Both in one launch. Collective. All warps must be resident at once.
#[inline(always)]
pub fn combine<M: Machine>(machine: &M, args: &CombineArgs) -> Result<(), Stopped> {
    let launch = Launch::begin(machine, &args.common, Kernel::Combine)?;
    let crews = Crews::of(&launch, args);
    send_back(&launch, args, crews);
    gather_rows(&launch, args, crews)
}

/// One in how many warps of a block gathers and does nothing else, where there are more units than
/// warps: rows are summed while others are still sent. Found by measuring (BENCHMARKS.md).
const GATHERER_SHARE: u32 = 4;

/// Which warps send back and which gather: all both, or some the one and some the other. As many
/// in every block.
#[derive(Clone, Copy)]
struct Crews {
    sender: Option<Share>,
    gatherer: Option<Share>,
    /// Warps of each block that send.
    senders_in_block: u32,
}

impl Crews {
    /// All warps do both, one after the other. Where there is little to do, the first ones send and the
    /// last ones gather.
    #[inline(always)]
    fn apart<M: Machine>(machine: &M) -> Self {
        let (index, of) = (machine.warp(), machine.warps());
        Self {
            sender: Some(Share { index, of }),
            gatherer: Some(Share {
                index: of - 1 - index,
                of,
            }),
            senders_in_block: machine.warps() / machine.blocks(),
        }
    }

    /// Those of a launch that sends and gathers.
    #[inline(always)]
    fn of<M: Machine>(launch: &Launch<M>, args: &CombineArgs) -> Self {
        let machine = launch.machine;
        let (warp, warps, blocks) = (machine.warp(), machine.warps(), machine.blocks());
        let in_block = warps / blocks;
        let units = args.tokens * launch.common.shape.parts(args.tokens);
        if units <= warps || in_block == 1 {
            return Self::apart(machine);
        }
        let gatherers_in_block = (in_block / GATHERER_SHARE).max(1);
        let gatherers = gatherers_in_block * blocks;
        let gathers = warp < gatherers;
        let share = match gathers {
            true => Share {
                index: warp,
                of: gatherers,
            },
            false => Share {
                index: warp - gatherers,
                of: warps - gatherers,
            },
        };
        Self {
            sender: (!gathers).then_some(share),
            gatherer: gathers.then_some(share),
            senders_in_block: in_block - gatherers_in_block,
        }
    }
}

/// Every row that this rank received, back to where it came from.
#[inline(always)]
fn send_back<M: Machine>(launch: &Launch<M>, args: &CombineArgs, crews: Crews) {
    let Launch {
        machine,
        common,
        epoch,
        ..
    } = launch;
    let shape = &common.shape;
    let Some(share) = crews.sender else { return };
    let mut next = Batch::first(shape, extent_of_all(launch), share);
    while let Some(batch) = next {
        // The dispatch has seen these words arrive, and they stay until this rank says consumed.
        let parts = machine.lanes(|lane| batch.presence(launch, lane).unwrap_or(0));
        let mut here = machine.ballot(machine.lanes(|lane| machine.own(parts, lane) != 0));
        let unit = |lane| {
            let parts = machine.broadcast(parts, lane);
            batch.unit(lane, parts, shape, common.rank())
        };
        let together = together(launch, batch);
        // Where units are flagged together, a warp without one takes part, too.
        while here != 0 || together.is_some() {
            let unit = (here != 0).then(|| unit(here.trailing_zeros()));
            send_unit_back(launch, args, unit, together.map(|units| (share, units)));
            here &= here.wrapping_sub(1);
            if together.is_some() {
                break;
            }
        }
        next = batch.next();
    }
    // Not before every warp is through: until then it reads counts, presence and headers.
    if machine.last_of_block(Gate::Returned, crews.senders_in_block)
        && gather::last_out(*machine, Counter::Returns, machine.blocks())
    {
        let word = common.window.consumed(common.rank());
        on_each_rank(*machine, shape.ranks, |rank| {
            handshake::say_consumed(*machine, rank, word, *epoch);
        });
    }
}

/// The units of all warps, if none has more than one and the last warp of a block may flag those of
/// all.
#[inline(always)]
fn together<M: Machine>(launch: &Launch<M>, batch: Batch) -> Option<u32> {
    let shape = &launch.common.shape;
    let is_far = M::REACHES_FAR && shape.spans_nodes();
    match shape.mode() {
        CombineMode::Reduced if !is_far => batch.one_each(),
        _ => None,
    }
}

/// Releases what the warps of a block have written, once for all of them, and sets the flags that they
/// hand over. `share` is this warp's, of `units`.
#[inline(always)]
fn publish_together<M: Machine>(launch: &Launch<M>, (share, units): (Share, u32), flag: u64) {
    let Launch { machine, epoch, .. } = launch;
    let callers = callers(*machine, machine.warp() - share.index, units);
    let Some(flags) = machine.hand_over(Gate::Sent, callers, flag) else {
        return;
    };
    machine.release();
    machine.lanes(|lane| {
        let flag = machine.own(flags, lane);
        if flag != 0 {
            let (source, unit, slot) = Flag::of_word(flag);
            let flag = launch.common.window.combine_flag(unit, slot);
            slot::publish(*machine, source, flag, *epoch);
        }
    });
}

/// The flag of a unit that was sent back.
struct Flag {
    unit: Unit,
    slot: u32,
}

impl Flag {
    /// In a word that is not 0. Ranks and their slots are up to 64.
    #[inline(always)]
    fn to_word(&self) -> u64 {
        let (unit, source) = (self.unit.flag(), self.unit.source.0);
        1 << 63 | (unit as u64) << 16 | (self.slot << 8 | source) as u64
    }

    /// The source, the index of the unit among the source's, and the slot.
    #[inline(always)]
    fn of_word(word: u64) -> (Rank, u32, u32) {
        (
            Rank(word as u32 & 0xff),
            (word >> 16) as u32,
            word as u32 >> 8 & 0xff,
        )
    }
}

/// A part of the expert outputs of one token, if there is `unit`. `together`: this warp's share of how
/// many units that are flagged together.
#[inline(always)]
fn send_unit_back<M: Machine>(
    launch: &Launch<M>,
    args: &CombineArgs,
    unit: Option<Unit>,
    together: Option<(Share, u32)>,
) {
    let shape = &launch.common.shape;
    let node = node_of(shape, launch.common.rank());
    let near = |unit: Unit| !M::REACHES_FAR || node >> unit.source.0 & 1 != 0;
    match (shape.mode(), unit) {
        (CombineMode::Reduced, unit) => {
            let mut flag = 0;
            if let Some(unit) = unit {
                let near = near(unit);
                let slot = sum_unit(launch, args, unit, near);
                flag = Flag { unit, slot }.to_word();
                if together.is_none() {
                    publish_reduced(launch, unit, slot, near);
                }
            }
            if let Some(together) = together {
                publish_together(launch, together, flag);
            }
        }
        (CombineMode::Exact, Some(unit)) => send_exact(launch, args, unit, near(unit)),
        (CombineMode::Exact, None) => {}
    }
}

/// The output rows of a unit's token, one a top-k slot.
#[inline(always)]
fn read_positions<M: Machine>(launch: &Launch<M>, unit: Unit) -> M::Lanes<u32> {
    let Launch {
        machine, common, ..
    } = launch;
    let shape = &common.shape;
    machine.lanes(|lane| {
        lane_or_none(lane, shape.top_k, || {
            let entry = row_map_entry(shape, unit.source, unit.token, lane);
            machine.read(Table::RowMap, entry)
        })
    })
}

/// The slots whose rows are here. The dispatch checked the positions against its outputs; these
/// may be smaller.
#[inline(always)]
fn slots_here<M: Machine>(machine: &M, args: &CombineArgs, positions: M::Lanes<u32>) -> u32 {
    machine.ballot(machine.lanes(|lane| {
        let position = machine.own(positions, lane);
        position != NOT_ROUTED && (position as u64) < args.row_capacity
    }))
}

/// Flags the sum that a unit's source gets.
#[inline(always)]
fn publish_reduced<M: Machine>(launch: &Launch<M>, unit: Unit, slot: u32, near: bool) {
    let Launch {
        machine,
        common,
        epoch,
        ..
    } = launch;
    let window = &common.window;
    let flag = window.combine_flag(unit.flag(), slot);
    machine.release();
    if near {
        machine.lanes(|lane| {
            if lane == 0 {
                slot::publish(*machine, unit.source, flag, *epoch);
            }
        });
    } else {
        machine.put(Put {
            peer: unit.source,
            from: window.reduced_staging(unit.source, unit.token),
            to: window.combine_row(unit.token, slot),
            bytes: common.shape.combine_row_bytes(),
            signal: flag,
            value: epoch.0,
        });
    }
}

/// Sums a token's expert outputs on this rank, weighted, into the row at the source, or if that is not
/// `near`, into the staging. Gives the slot that the row has there.
#[inline(always)]
fn sum_unit<M: Machine>(launch: &Launch<M>, args: &CombineArgs, unit: Unit, near: bool) -> u32 {
    let Launch {
        machine, common, ..
    } = launch;
    let (shape, window, me) = (&common.shape, &common.window, common.rank());
    let Unit {
        source,
        token,
        part,
        parts,
    } = unit;
    let header = window
        .dispatch_row(source, token)
        .plus(shape.header_start());
    // Everything is read before anything is waited for.
    let positions = read_positions(launch, unit);
    let entries = machine.lanes(|lane| {
        // The last lanes read an entry again rather than branch.
        let k = lane.min(shape.top_k - 1);
        machine.read_entry(header.plus(Header::entry(k)))
    });
    let experts =
        machine.lanes(|lane| lane_or_none(lane, shape.top_k, || machine.own(entries, lane).expert));
    let weights = machine.lanes(|lane| machine.own(entries, lane).weight);
    let here = slots_here(*machine, args, positions);
    let slot_index = reduced_slot(ranks_of(*machine, shape, experts), me);

    let to = window.combine_row(token, slot_index);
    let staging = window.reduced_staging(source, token);
    let home = Rank(if near { source.0 } else { me.0 });
    let at = if near { to } else { staging };
    machine.sum_rows(
        Span::part(shape.combine_row_bytes(), part, parts),
        here,
        |k| {
            let weight = f32::from_bits(machine.broadcast(weights, k));
            (
                Row::Tensor(Tensor::Expert, machine.broadcast(positions, k)),
                weight,
            )
        },
        Row::Window(home, at),
    );
    slot_index
}

/// Into one row a top-k slot: each as it is.
#[inline(always)]
fn send_exact<M: Machine>(launch: &Launch<M>, args: &CombineArgs, unit: Unit, near: bool) {
    let Launch {
        machine,
        common,
        epoch,
        ..
    } = launch;
    let (window, me) = (&common.window, common.rank());
    let Unit {
        source,
        token,
        part,
        parts,
    } = unit;
    let positions = read_positions(launch, unit);
    let here = slots_here(*machine, args, positions);
    let span = Span::part(common.shape.combine_row_bytes(), part, parts);
    let home = Rank(if near { source.0 } else { me.0 });
    for_each_bit(here as u64, |k| {
        let position = machine.broadcast(positions, k);
        let at = if near {
            window.combine_row(token, k)
        } else {
            window.exact_staging(position)
        };
        let row = Row::Tensor(Tensor::Expert, position);
        machine.copy_row(span, row, || (1, |_| Row::Window(home, at)));
    });
    machine.release();
    if near {
        machine.lanes(|lane| {
            if here >> lane & 1 != 0 {
                let flag = window.combine_flag(unit.flag(), lane);
                slot::publish(*machine, source, flag, *epoch);
            }
        });
    } else {
        for_each_bit(here as u64, |k| {
            machine.put(Put {
                peer: source,
                from: window.exact_staging(machine.broadcast(positions, k)),
                to: window.combine_row(token, k),
                bytes: common.shape.combine_row_bytes(),
                signal: window.combine_flag(unit.flag(), k),
                value: epoch.0,
            });
        });
    }
}

/// Sums what comes back for every token of this rank, and ends the round.
#[inline(always)]
fn gather_rows<M: Machine>(
    launch: &Launch<M>,
    args: &CombineArgs,
    crews: Crews,
) -> Result<(), Stopped> {
    let Launch { machine, epoch, .. } = launch;
    let parts = launch.common.shape.parts(args.tokens);
    if let Some(Share {
        index: mut unit,
        of,
    }) = crews.gatherer
    {
        while unit < args.tokens * parts {
            let (token, part) = (unit / parts, unit % parts);
            let unit_of = Unit {
                source: launch.common.rank(),
                token,
                part,
                parts,
            };
            gather_unit(launch, args, unit_of)?;
            unit += of;
        }
    }
    if machine.warp() == 0 {
        wait_for_peers(launch)?;
    }
    let (warps, blocks) = (machine.warps(), machine.blocks());
    if machine.last_of_block(Gate::Left, warps / blocks)
        && gather::last_out(*machine, Counter::Exits, blocks)
    {
        machine.store(Counter::Finished, epoch.0);
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
            machine.copy_row(span, from, || (1, |_| to));
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
