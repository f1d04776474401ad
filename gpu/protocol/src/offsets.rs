//! Where rows begin in the outputs: one warp turns the counts of all sources into row offsets while payload is
//! still in flight.

use ferry_layout::{
    Counter, DispatchArgs, Fault, FaultKind, Rank, Region, Table, Tagged, scale_layout,
};

use crate::scales::is_tiled;
use crate::wait::{Awaited, Launch, Stopped};
use crate::{LANES, Machine};

/// Count words that a lane has in flight.
const DEPTH: u32 = 8;

/// Waits until [`compute_offsets`] is done.
#[inline(always)]
pub fn wait_for_offsets<M: Machine>(launch: &Launch<M>) -> Result<(), Stopped> {
    let Launch { machine, epoch, .. } = launch;
    launch.wait_local(Counter::OffsetsReady, Region::Offsets, || {
        machine.load(Counter::OffsetsReady) >= epoch.0
    })
}

/// Turns all counts into the first row of every expert, `row_offsets`, and of every source
/// within it. A lane takes an expert.
#[inline(always)]
pub fn compute_offsets<M: Machine>(launch: &Launch<M>, args: &DispatchArgs) -> Result<(), Stopped> {
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
