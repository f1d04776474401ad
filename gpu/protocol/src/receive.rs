//! The receiving half of dispatch.
//!
//! One warp turns the counts into row offsets while payload is still in flight; all warps then
//! wait for rows, each for its own, and copy them to their final places as they come.
//!
//! One warp alone reads a part of a bare row, with a header of its own, and makes each word absent again
//! once it has it. All are absent again when the launch ends, hence before this rank says in combine that it
//! has consumed them, and before a peer writes there again.

use ferry_layout::{
    ABSENT, Counter, DispatchArgs, Fault, FaultKind, Header, NOT_ROUTED, Rank, Region, Shape,
    Table, Tagged, Tensor, scale_layout,
};

use crate::scales::{self, is_tiled};
use crate::share::Share;
use crate::units::{Batch, Extent, Place, Unit};
use crate::wait::{Awaited, Launch, Stopped};
use crate::{LANES, Machine, Row, slot};

/// Count words that a lane has in flight.
const DEPTH: u32 = 8;

#[inline(always)]
pub fn receive<M: Machine>(
    launch: &Launch<M>,
    args: &DispatchArgs,
    share: Share,
) -> Result<(), Stopped> {
    let Launch {
        machine, common, ..
    } = launch;
    // One in the middle: in a fused launch the first ones count, and the last ones receive first.
    if share.index == share.of / 2 {
        compute_offsets(launch, args)?;
    }
    let extent = wait_for_token_counts(launch)?;
    // One that has nothing else to do, if there is any.
    if share.index == share.of - 1 {
        machine.store(Counter::Extent, extent.word());
    }
    let shape = &common.shape;
    // Outputs that may be too small are left alone until that is known.
    let needs_offsets = is_tiled(shape) || shape.most_rows(extent.tokens) > args.row_capacity;
    if is_tiled(shape) {
        wait_for_offsets(launch)?;
        scales::clear_unused(launch, share);
    }
    let mut next = Batch::first(shape, extent, share);
    while let Some(batch) = next {
        let present = launch.wait_lanes(
            |lane: u32| batch.presence(launch, lane),
            |lane| batch.awaited(launch, lane),
        )?;
        let parts = machine.lanes(|lane| machine.own(present, lane).unwrap_or(0));
        let coming = machine.ballot(machine.lanes(|lane| machine.own(parts, lane) != 0));
        if needs_offsets && coming != 0 {
            wait_for_offsets(launch)?;
        }
        receive_batch(launch, args, (batch, parts, coming))?;
        next = batch.next();
    }
    Ok(())
}

/// Waits until [`compute_offsets`] is done.
#[inline(always)]
fn wait_for_offsets<M: Machine>(launch: &Launch<M>) -> Result<(), Stopped> {
    let Launch { machine, epoch, .. } = launch;
    launch.wait_local(Counter::OffsetsReady, Region::Offsets, || {
        machine.load(Counter::OffsetsReady) >= epoch.0
    })
}

/// Waits until every source has said how many tokens it has, and refuses more than planned.
#[inline(always)]
fn wait_for_token_counts<M: Machine>(launch: &Launch<M>) -> Result<Extent, Stopped> {
    let Launch {
        machine,
        common,
        epoch,
        ..
    } = launch;
    let (shape, window) = (&common.shape, &common.window);
    let mut extent = Extent::NONE;
    for first in (0..shape.ranks).step_by(LANES as usize) {
        let source = |lane: u32| Rank((first + lane).min(shape.ranks - 1));
        let word = |lane| machine.load_tagged(window.token_count(source(lane)));
        let counts = launch.wait_lanes(
            |lane| word(lane).value(*epoch),
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
            return launch.stop();
        }
        let tokens = machine.lanes(|lane| machine.own(counts, lane).unwrap_or(0));
        extent = extent.and(*machine, shape, tokens);
    }
    Ok(extent)
}

/// Turns all counts into the first row of every expert, `row_offsets`, and of every source
/// within it. A lane takes an expert.
#[inline(always)]
fn compute_offsets<M: Machine>(launch: &Launch<M>, args: &DispatchArgs) -> Result<(), Stopped> {
    let Launch {
        machine,
        common,
        epoch,
        ..
    } = launch;
    let (shape, window) = (&common.shape, &common.window);
    let (ranks, experts) = (shape.ranks, shape.local_experts());
    let (mut rows, mut blocks) = (0, 0);
    let mut first = 0;
    while first < experts {
        let word = |lane: u32, source: u32| {
            let expert = (first + lane).min(experts - 1);
            machine.load_tagged(window.count(Rank(source.min(ranks - 1)), expert))
        };
        let counted = launch.wait_lanes(
            |lane| {
                let (mut total, mut source, mut missing) = (0, 0, false);
                let mut last = [0; DEPTH as usize];
                while source < ranks {
                    let words: [Tagged; DEPTH as usize] =
                        core::array::from_fn(|step| word(lane, source + step as u32));
                    // Written as an array so that it is unrolled, and the words stay in registers.
                    core::array::from_fn::<(), { DEPTH as usize }, _>(|step| {
                        if source + (step as u32) < ranks {
                            let count = words[step].value(*epoch);
                            missing |= count.is_none();
                            last[step] = count.unwrap_or(0);
                            total += last[step];
                        }
                    });
                    source += DEPTH;
                }
                (!missing).then_some((total, last))
            },
            |lane| {
                let missing = |&source: &u32| word(lane, source).value(*epoch).is_none();
                let source = (0..ranks).find(missing).unwrap_or(0);
                Awaited {
                    peer: Rank(source),
                    region: Region::Counts,
                    index: (first + lane).min(experts - 1) as u64,
                    saw: word(lane, source).0 >> 32,
                }
            },
        )?;
        let padded = machine.lanes(|lane| match machine.own(counted, lane) {
            Some((total, _)) if first + lane < experts => {
                total.next_multiple_of(shape.row_alignment())
            }
            _ => 0,
        });
        let (starts, total) = machine.exclusive_sum(padded);
        machine.lanes(|lane| {
            let expert = first + lane;
            if expert < experts {
                let start = rows + machine.own(starts, lane);
                // Those of few sources are still at hand.
                let last = machine
                    .own(counted, lane)
                    .map_or([0; DEPTH as usize], |(_, last)| last);
                publish_starts(launch, (expert, start), |source| match ranks <= DEPTH {
                    true => last,
                    false => core::array::from_fn(|step| word(lane, source + step as u32).0 as u32),
                });
                machine.write(Table::RowOffsets, expert as u64, start);
                machine.write(Table::ExpertIds, expert as u64, expert);
            }
        });
        if is_tiled(shape) {
            let padded = |lane| machine.own(padded, lane);
            let needed = machine.lanes(|lane| scale_layout::blocks(padded(lane)));
            let (before, more) = machine.exclusive_sum(needed);
            machine.lanes(|lane| {
                let expert = first + lane;
                if expert < experts {
                    let start = rows + machine.own(starts, lane);
                    let block = blocks + machine.own(before, lane);
                    let offset = scale_layout::scales_offset(block, start);
                    machine.write(Table::ScalesOffsets, expert as u64, offset);
                }
            });
            blocks += more;
        }
        rows += total;
        first += LANES;
    }
    machine.lanes(|lane| {
        if lane == 0 {
            machine.write(Table::RowOffsets, experts as u64, rows);
        }
    });
    check_capacity(launch, rows as u64, args.row_capacity)?;
    if is_tiled(shape) {
        check_capacity(launch, blocks as u64, args.block_capacity)?;
    }
    machine.store(Counter::OffsetsReady, epoch.0);
    Ok(())
}

/// Says for each source where its rows of a local expert begin, whose first row is `start`. `counts` gives
/// how many come from a source and those after it. For one lane.
#[inline(always)]
fn publish_starts<M: Machine>(
    launch: &Launch<M>,
    (expert, start): (u32, u32),
    counts: impl Fn(u32) -> [u32; DEPTH as usize],
) {
    let Launch {
        machine,
        common,
        epoch,
        ..
    } = launch;
    let ranks = common.shape.ranks;
    let (mut at, mut source) = (start, 0);
    while source < ranks {
        let counts = counts(source);
        core::array::from_fn::<(), { DEPTH as usize }, _>(|step| {
            let source = Rank(source + step as u32);
            if source.0 < ranks {
                let value = Tagged::new(*epoch, at).0;
                machine.signal(common.rank(), common.window.start(source, expert), value);
                at += counts[step];
            }
        });
        source += DEPTH;
    }
}

/// Stops if the outputs hold fewer rows (or blocks of them) than `needed`.
#[inline(always)]
fn check_capacity<M: Machine>(
    launch: &Launch<M>,
    needed: u64,
    capacity: u64,
) -> Result<(), Stopped> {
    if needed <= capacity {
        return Ok(());
    }
    launch.machine.lanes(|lane| {
        if lane == 0 {
            let fault = Fault {
                wanted: capacity,
                saw: needed,
                ..launch.fault()
            };
            launch.record(FaultKind::OutputTooSmall, fault);
        }
    });
    launch.stop()
}

/// Receives the units of a batch that come here, as they arrive.
#[inline(always)]
fn receive_batch<M: Machine>(
    launch: &Launch<M>,
    args: &DispatchArgs,
    (batch, parts, coming): (Batch, M::Lanes<u32>, u32),
) -> Result<(), Stopped> {
    let Launch {
        machine,
        common,
        epoch,
        ..
    } = launch;
    let (shape, window, me) = (&common.shape, &common.window, common.rank());
    let unit = |lane: u32, parts| batch.unit(lane, parts, shape, me);
    let flags = machine.lanes(|lane| {
        let Unit { source, .. } = unit(lane, 1);
        let parts = machine.own(parts, lane);
        window.dispatch_flag(source, unit(lane, parts).flag())
    });
    let mut left = coming;
    while left != 0 {
        let arrived = launch.wait_any(
            left,
            |lane| {
                // Nothing tells of a bare one: its words are waited for.
                shape.dispatches_bare(machine.own(parts, lane))
                    || slot::is_full(*machine, machine.own(flags, lane), *epoch)
            },
            |lane| Awaited {
                peer: unit(lane, 1).source,
                region: Region::DispatchRow,
                index: unit(lane, 1).token as u64,
                saw: machine.load_signal(machine.own(flags, lane)),
            },
        )?;
        left &= !arrived;
        let mut arrived = arrived;
        while arrived != 0 {
            let lane = arrived.trailing_zeros();
            let parts = machine.broadcast(parts, lane);
            receive_unit(launch, args, unit(lane, parts))?;
            arrived &= arrived - 1;
        }
    }
    Ok(())
}

/// Copies one part of a row to each of its places in the output. It has arrived, or goes bare.
#[inline(always)]
fn receive_unit<M: Machine>(
    launch: &Launch<M>,
    args: &DispatchArgs,
    unit: Unit,
) -> Result<(), Stopped> {
    let Launch {
        machine, common, ..
    } = launch;
    let shape = &common.shape;
    let placed = place_unit(launch, args, unit);
    let Some(places) = placed.filter(|places| places.outside == 0) else {
        return refuse_unit(launch, args, unit, placed);
    };
    let Places {
        positions, here, ..
    } = places;
    let Unit {
        source,
        token,
        part,
        ..
    } = unit;
    if part != 0 {
        return Ok(());
    }
    machine.lanes(|lane| {
        let position = machine.own(positions, lane);
        if here >> lane & 1 != 0 {
            machine.write(Table::SrcInfo, 2 * position as u64, token);
            machine.write(Table::SrcInfo, 2 * position as u64 + 1, lane);
        }
        if lane < shape.top_k {
            machine.write(
                Table::RowMap,
                row_map_entry(shape, source, token, lane),
                position,
            );
        }
    });
    Ok(())
}

/// Puts payload and scales of a unit into their places, if they are inside the outputs. `None` where this
/// launch should give up on its source.
#[inline(always)]
fn place_unit<M: Machine>(
    launch: &Launch<M>,
    args: &DispatchArgs,
    unit: Unit,
) -> Option<Places<M::Lanes<u32>>> {
    let Launch {
        machine, common, ..
    } = launch;
    let from = unit.place(common);
    let ahead = scales::read_ahead(launch, from);
    let mut found = None;
    let is_copied = machine.copy_row(from.span, from.of(common.rank()), || {
        let places = find_places(launch, args, (unit, from))?;
        found = Some(places);
        let targets = if places.outside == 0 { places.here } else { 0 };
        let to = move |k| Row::Tensor(Tensor::Output, machine.broadcast(places.positions, k));
        Some((targets as u64, to))
    });
    let places = found.filter(|_| is_copied)?;
    if places.outside == 0 {
        scales::place(launch, args, (from, ahead), places)?;
        if unit.part == 0 {
            scales::place_row_scale(launch, from.row, places);
        }
    }
    Some(places)
}

/// `values`, or what `read` gives later, once none of them is absent. `None` where this launch should
/// give up.
#[inline(always)]
pub fn wait_for<M: Machine, T: Copy>(
    machine: &M,
    mut values: M::Lanes<T>,
    read: impl Fn() -> M::Lanes<T>,
    is_absent: impl Fn(T) -> bool,
) -> Option<M::Lanes<T>> {
    loop {
        let absent = machine.lanes(|lane| is_absent(machine.own(values, lane)));
        if machine.ballot(absent) == 0 {
            return Some(values);
        }
        if machine.expired() {
            return None;
        }
        values = read();
    }
}

/// The words of the entries in a unit's header, once they have come. If it is bare, they are made absent again,
/// and the first part's put where combine reads them, with the weights.
#[inline(always)]
fn read_entries<M: Machine>(
    launch: &Launch<M>,
    (unit, from): (Unit, Place),
) -> Option<M::Lanes<u32>> {
    let Launch {
        machine, common, ..
    } = launch;
    let shape = &common.shape;
    let top_k = shape.top_k;
    let header = from.row.plus(from.header);
    // The last lanes read of some entry rather than branch.
    let entry = |lane: u32| Header::entry(lane.min(top_k - 1));
    let weight = |lane: u32| Header::weight(top_k, lane.min(top_k - 1));
    let read = || machine.lanes(|lane| machine.read_window(header.plus(entry(lane))));
    if !from.is_bare {
        return Some(read());
    }
    let is_absent = |word| word == ABSENT;
    let read_weights = || machine.lanes(|lane| machine.read_window(header.plus(weight(lane))));
    // Both are on their way before one is waited for.
    let (words, weights) = (read(), read_weights());
    let words = wait_for(*machine, words, read, is_absent)?;
    let weights = match unit.part {
        0 => wait_for(*machine, weights, read_weights, is_absent)?,
        _ => weights,
    };
    let kept = common.window.dispatch_row(unit.source, unit.token);
    let kept = kept.plus(shape.header_start());
    machine.lanes(|lane| {
        if lane < top_k {
            machine.write_window(header.plus(entry(lane)), ABSENT);
            if unit.part == 0 {
                machine.write_window(header.plus(weight(lane)), ABSENT);
                machine.write_window(kept.plus(entry(lane)), machine.own(words, lane));
                machine.write_window(kept.plus(weight(lane)), machine.own(weights, lane));
            }
        }
    });
    Some(words)
}

/// Where a row goes in the outputs.
#[derive(Clone, Copy)]
pub struct Places<L: Copy> {
    /// For each top-k slot its output row, or `NOT_ROUTED`.
    pub positions: L,
    /// For each, where the first word of its scales goes.
    pub scales: L,
    /// The slots whose experts live here.
    pub here: u32,
    /// Those of them whose rows lie outside the outputs.
    pub outside: u32,
}

/// Reads a row's header and works out its places, once the starts of its experts' rows are known. `None` as
/// for [`place_unit`].
#[inline(always)]
fn find_places<M: Machine>(
    launch: &Launch<M>,
    args: &DispatchArgs,
    (unit, from): (Unit, Place),
) -> Option<Places<M::Lanes<u32>>> {
    let Launch {
        machine,
        common,
        epoch,
        ..
    } = launch;
    let shape = &common.shape;
    let source = unit.source;
    let (top_k, experts) = (shape.top_k, shape.local_experts());
    let first_expert = common.rank * experts;
    let words = read_entries(launch, (unit, from))?;
    let entry = |lane| shape.entries().entry(machine.own(words, lane));
    // Lanes of foreign experts read of some expert rather than branch.
    let local = |lane| entry(lane).expert.wrapping_sub(first_expert);
    let read = || {
        machine.lanes(|lane| {
            let expert = local(lane).min(experts - 1);
            machine.load_tagged(common.window.start(source, expert))
        })
    };
    let is_missing = |word: Tagged| word.value(*epoch).is_none();
    let starts = wait_for(*machine, read(), read, is_missing)?;
    let places = machine.lanes(|lane| {
        let start = machine.own(starts, lane).0 as u32;
        let position = start.wrapping_add(entry(lane).ordinal);
        let local = local(lane);
        match lane < top_k && local < experts {
            true => (position, scales::first_word(launch, local, position)),
            false => (NOT_ROUTED, 0),
        }
    });
    let positions = machine.lanes(|lane| machine.own(places, lane).0);
    let here = machine.ballot(machine.lanes(|lane| machine.own(positions, lane) != NOT_ROUTED));
    let outside = machine.ballot(machine.lanes(|lane| {
        here >> lane & 1 != 0 && machine.own(positions, lane) as u64 >= args.row_capacity
    }));
    Some(Places {
        positions,
        scales: machine.lanes(|lane| machine.own(places, lane).1),
        here,
        outside,
    })
}

/// Says why a unit was not put into its places: what it needs did not come, or one of its rows lies outside
/// the outputs.
#[inline(always)]
fn refuse_unit<M: Machine>(
    launch: &Launch<M>,
    args: &DispatchArgs,
    unit: Unit,
    placed: Option<Places<M::Lanes<u32>>>,
) -> Result<(), Stopped> {
    // If counts are missing, or the outputs are too small, that is said there.
    wait_for_offsets(launch)?;
    let Some(places) = placed else {
        return launch.give_up_on(Awaited {
            peer: unit.source,
            region: Region::DispatchRow,
            index: unit.token as u64,
            saw: 0,
        });
    };
    let k = places.outside.trailing_zeros();
    let saw = launch.machine.broadcast(places.positions, k) as u64;
    launch.machine.lanes(|lane| {
        if lane == 0 {
            let fault = Fault {
                peer: unit.source,
                region: Region::DispatchRow,
                index: unit.token as u64,
                wanted: args.row_capacity,
                saw,
                ..launch.fault()
            };
            launch.record(FaultKind::RowOutOfBounds, fault);
        }
    });
    launch.stop()
}

/// Index of entry `k` of `source`'s token in the row map.
#[inline(always)]
pub fn row_map_entry(shape: &Shape, source: Rank, token: u32, k: u32) -> u64 {
    let row = source.0 as u64 * shape.max_tokens_per_rank as u64 + token as u64;
    row * shape.top_k as u64 + k as u64
}
