//! Combine on the experts' rank: what it received goes back to where it came from.

use ferry_layout::{
    CombineArgs, CombineMode, Counter, Header, NOT_ROUTED, Rank, Region, Table, Tensor,
};

use crate::combine::Crews;
use crate::groups::Groups;
use crate::pieces::{Deal, Piece};
use crate::places::row_map_entry;
use crate::route::{for_each_bit, lane_or_none, on_each_rank, ranks_of, reduced_slot};
use crate::send_group_back::send_group_back;
use crate::share::{Dealer, Share, callers};
use crate::units::{Extent, Unit};
use crate::wait::{Launch, Stopped};
use crate::{Gate, Machine, Put, Row, Span, gather, handshake, slot};

/// From so many units a warp on, units are sent together.
const MANY_UNITS: u32 = 32;

/// Every row that this rank received, back to where it came from.
#[inline(always)]
pub fn send_back<M: Machine>(
    launch: &Launch<M>,
    args: &CombineArgs,
    crews: Crews,
) -> Result<(), Stopped> {
    let Launch {
        machine, common, ..
    } = launch;
    let shape = &common.shape;
    if machine.warp() == 0 {
        machine.reset(Counter::DispatchDraws);
    }
    let Some(share) = crews.sender else {
        return Ok(());
    };
    let extent = Extent::of_word(machine.peek(Counter::Extent));
    let units = extent.units(shape);
    let at_once = units <= share.of;
    let is_far = M::REACHES_FAR && shape.spans_nodes();
    let deal = match at_once || crews.is_bare || extent.parts > 1 || is_far {
        true => Deal::whole(units),
        false => Deal::in_pieces(
            units,
            share.of,
            together_of(launch, units / MANY_UNITS >= share.of),
        ),
    };
    let mut dealer = Dealer::new(*machine, share, deal.tasks(), Counter::CombineDraws);
    let says = Says { crews, at_once };
    // The last warp of a block flags the units of all.
    let is_reduced = shape.mode() == CombineMode::Reduced;
    let is_together = at_once && !crews.is_bare && !is_far && is_reduced;
    let together = is_together.then_some((share, units));
    let mut has_read = false;
    while let Some(task) = dealer.deal() {
        let (index, piece) = deal.row(task);
        if deal.is_group(task) {
            send_group_back(launch, args, (extent, index), || dealer.draw());
            continue;
        }
        let unit = unit_here(launch, extent, index);
        // Where units are flagged together, a warp without one takes part, too.
        if unit.is_none() && together.is_none() {
            dealer.draw();
            continue;
        }
        let part = unit.map(|unit| Part {
            unit,
            piece,
            is_bare: crews.is_bare,
            is_near: !is_far || shape.same_node(common.rank(), unit.source),
        });
        let read = || {
            // Before the rows are written, which would have to be waited for.
            if at_once {
                has_read = true;
                says.read(launch);
            }
        };
        send_unit_back(launch, args, part, together, (read, || dealer.draw()));
    }
    if !has_read {
        says.read(launch);
    }
    // A warp that gathers late, if at all.
    if at_once && share.index == share.of / 2 {
        says.consumed(launch)?;
    }
    Ok(())
}

/// How many units a warp sends together, of which it has `many`.
#[inline(always)]
fn together_of<M: Machine>(launch: &Launch<M>, many: bool) -> u32 {
    let shape = &launch.common.shape;
    match shape.mode() == CombineMode::Reduced && many {
        true => Groups::of(shape).most(),
        false => 1,
    }
}

/// Unit `index` of all that can come here, if it has.
#[inline(always)]
fn unit_here<M: Machine>(launch: &Launch<M>, extent: Extent, index: u32) -> Option<Unit> {
    let Launch {
        machine, common, ..
    } = launch;
    // The dispatch has seen these words arrive, and they stay until this rank says consumed.
    let parts = machine.lanes(|_| extent.presence(launch, index).unwrap_or(0));
    let parts = machine.broadcast(parts, 0);
    (parts != 0).then(|| extent.unit(&common.shape, common.rank(), (index, parts)))
}

/// How every rank is told that its rows were read, with counts, presence and headers.
#[derive(Clone, Copy)]
struct Says {
    crews: Crews,
    /// Every warp has one unit at most: it says so before it writes, which nobody waits for, and one warp
    /// waits for all. Otherwise the last one through tells.
    at_once: bool,
}

impl Says {
    /// This warp has read all that it has to: each that sends back calls this once.
    #[inline(always)]
    fn read<M: Machine>(self, launch: &Launch<M>) {
        let machine = launch.machine;
        if !machine.last_of_block(Gate::Read, self.crews.senders_in_block) {
            return;
        }
        match self.at_once {
            true => machine.count(Counter::Reads),
            false => gather::pass(machine, Counter::Reads, machine.blocks(), || {
                tell_consumed(launch);
            }),
        }
    }

    /// Waits until all warps have read, and tells.
    #[inline(always)]
    fn consumed<M: Machine>(self, launch: &Launch<M>) -> Result<(), Stopped> {
        let machine = launch.machine;
        launch.wait_local(Counter::Reads, Region::Consumed, || {
            machine.load(Counter::Reads) >= machine.blocks() as u64
        })?;
        tell_consumed(launch);
        machine.store(Counter::Reads, 0);
        Ok(())
    }
}

/// Tells every rank that its rows were read.
#[inline(always)]
fn tell_consumed<M: Machine>(launch: &Launch<M>) {
    let Launch {
        machine,
        common,
        epoch,
        ..
    } = launch;
    let word = common.window.consumed(common.rank());
    let consumed = handshake::Consumed::release(*machine, word, *epoch);
    on_each_rank(*machine, common.shape.ranks, |rank| {
        consumed.say(*machine, rank);
    });
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

/// What of the expert outputs of a token a warp sends back.
#[derive(Clone, Copy)]
struct Part {
    unit: Unit,
    /// What of the unit.
    piece: Piece,
    is_bare: bool,
    /// Whether its source is on this node.
    is_near: bool,
}

impl Part {
    /// What of a row of `bytes`.
    #[inline(always)]
    fn span(self, bytes: u32) -> Span {
        match self.unit.parts {
            1 => self.piece.span(bytes),
            parts => Span::part(bytes, self.unit.part, parts),
        }
    }
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
/// many units that are flagged together. `read` is called once all of the unit is read that dispatch
/// has brought, in reduced mode; `written` once its rows, if any, are written.
#[inline(always)]
fn send_unit_back<M: Machine>(
    launch: &Launch<M>,
    args: &CombineArgs,
    part: Option<Part>,
    together: Option<(Share, u32)>,
    (read, written): (impl FnOnce(), impl FnOnce()),
) {
    match (launch.common.shape.mode(), part) {
        (CombineMode::Reduced, part) => {
            let slot = match part {
                Some(part) => sum_part(launch, args, part, read),
                None => 0,
            };
            written();
            let flagged = part.filter(|part| !part.is_bare);
            match (together, flagged) {
                (Some(together), flagged) => {
                    let flag = flagged.map_or(0, |Part { unit, .. }| Flag { unit, slot }.to_word());
                    publish_together(launch, together, flag);
                }
                (None, Some(part)) => publish_reduced(launch, part, slot),
                (None, None) => {}
            }
        }
        (CombineMode::Exact, Some(part)) => send_exact(launch, args, part, written),
        (CombineMode::Exact, None) => written(),
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
pub fn slots_here<M: Machine>(machine: &M, args: &CombineArgs, positions: M::Lanes<u32>) -> u32 {
    machine.ballot(machine.lanes(|lane| {
        let position = machine.own(positions, lane);
        position != NOT_ROUTED && (position as u64) < args.row_capacity
    }))
}

/// Flags the sum that a unit's source gets.
#[inline(always)]
fn publish_reduced<M: Machine>(launch: &Launch<M>, part: Part, slot: u32) {
    let Launch {
        machine,
        common,
        epoch,
        ..
    } = launch;
    let window = &common.window;
    let Part { unit, is_near, .. } = part;
    if !part.piece.completes(*machine) {
        return;
    }
    let flag = window.combine_flag(unit.flag(), slot);
    machine.release();
    if is_near {
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
/// near, into the staging. Gives the slot that the row has there. `read`: as for [`send_unit_back`].
#[inline(always)]
fn sum_part<M: Machine>(
    launch: &Launch<M>,
    args: &CombineArgs,
    work: Part,
    read: impl FnOnce(),
) -> u32 {
    let Launch {
        machine, common, ..
    } = launch;
    let (shape, window, me) = (&common.shape, &common.window, common.rank());
    let unit = work.unit;
    let Unit { source, token, .. } = unit;
    let header = window.dispatch_row(source, token).plus(common.row.header);
    // Everything is read before anything is waited for.
    let positions = read_positions(launch, unit);
    // The last lanes read of an entry again rather than branch.
    let entry = |lane: u32| Header::entry(lane.min(shape.top_k - 1));
    let weight = |lane: u32| Header::weight(shape.top_k, lane.min(shape.top_k - 1));
    let words = machine.lanes(|lane| machine.read_window(header.plus(entry(lane))));
    let weights = machine.lanes(|lane| machine.read_window(header.plus(weight(lane))));
    let experts = machine.lanes(|lane| {
        let entry = shape.entries().entry(machine.own(words, lane));
        lane_or_none(lane, shape.top_k, || entry.expert)
    });
    let here = slots_here(*machine, args, positions);
    let slot_index = reduced_slot(window, ranks_of(*machine, shape, experts), me);
    read();

    let to = if work.is_bare {
        Row::Bare(source, window.bare_combine_row(token, slot_index))
    } else if work.is_near {
        Row::Window(source, window.combine_row(token, slot_index))
    } else {
        Row::Window(me, window.reduced_staging(source, token))
    };
    machine.sum_rows(
        work.span(shape.combine_row_bytes()),
        here,
        |k| {
            let weight = f32::from_bits(machine.broadcast(weights, k));
            (
                Row::Tensor(Tensor::Expert, machine.broadcast(positions, k)),
                weight,
            )
        },
        to,
    );
    slot_index
}

/// Into one row a top-k slot: each as it is.
#[inline(always)]
fn send_exact<M: Machine>(
    launch: &Launch<M>,
    args: &CombineArgs,
    work: Part,
    written: impl FnOnce(),
) {
    let Launch {
        machine,
        common,
        epoch,
        ..
    } = launch;
    let (window, me) = (&common.window, common.rank());
    let Part { unit, is_near, .. } = work;
    let Unit { source, token, .. } = unit;
    let positions = read_positions(launch, unit);
    let here = slots_here(*machine, args, positions);
    let span = work.span(common.shape.combine_row_bytes());
    let home = Rank(if is_near { source.0 } else { me.0 });
    for_each_bit(here, |k| {
        let position = machine.broadcast(positions, k);
        let at = if is_near {
            window.combine_row(token, k)
        } else {
            window.exact_staging(position)
        };
        let row = Row::Tensor(Tensor::Expert, position);
        let to = |_| Row::Window(home, at);
        machine.copy_row((span, row), machine.read_ahead(span, row), 1u32, to);
    });
    written();
    if !work.piece.completes(*machine) {
        return;
    }
    machine.release();
    if is_near {
        machine.lanes(|lane| {
            if here >> lane & 1 != 0 {
                let flag = window.combine_flag(unit.flag(), lane);
                slot::publish(*machine, source, flag, *epoch);
            }
        });
    } else {
        for_each_bit(here, |k| {
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
