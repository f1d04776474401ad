//! What a source tells of its tokens: how many there are, which go where, and how many entries
//! each expert gets. Small words that carry their epoch; no row waits for them at the source.
//!
//! Entries are numbered in two steps: within a chunk by one warp each, then the chunks of every
//! expert are summed, 32 experts a warp. Where they are few, each block has numbered them all when it
//! begins, and nobody waits.

use ferry_layout::{Counter, Rank, Region, Shape, TILE_ASSIGNMENTS, Table, Tagged};

use crate::dispatch::send::assignment;
use crate::sync::arrivals;
use crate::sync::launch::{Aborted, Launch};
use crate::work::partition::Partition;
use crate::work::route::{on_each_rank, rank_bit};
use crate::{LANES, Machine};

/// Words that a lane has in flight.
const DEPTH: usize = 8;

/// Chunks that a source's entries are numbered in.
#[inline(always)]
fn chunks(top_k: u32, tokens: u32) -> u32 {
    (tokens * top_k).div_ceil(TILE_ASSIGNMENTS)
}

/// Groups of experts, a lane each.
#[inline(always)]
pub fn scans(experts: u32) -> u32 {
    experts.div_ceil(LANES)
}

/// Warps that announcing keeps busy.
#[inline(always)]
pub fn tasks(shape: &Shape, tokens: u32) -> u32 {
    let presence = tokens.div_ceil(LANES);
    match shape.is_small_batch(tokens) {
        true => presence + scans(shape.experts),
        false => scans(shape.experts).max(presence + chunks(shape.top_k, tokens)),
    }
}

/// Announces this warp's share.
#[inline(always)]
pub fn notify<M: Machine>(launch: &Launch<M>, partition: Partition) -> Result<(), Aborted> {
    let Launch {
        machine, common, ..
    } = launch;
    let shape = &common.shape;
    let chunks = chunks(shape.top_k, common.tokens);
    if partition.index == 0 {
        notify_tokens(launch);
    }
    let is_small_batch = shape.is_small_batch(common.tokens);
    let numbering = if is_small_batch {
        scans(shape.experts)
    } else {
        chunks
    };
    for task in partition.tasks(numbering + common.tokens.div_ceil(LANES)) {
        if task >= numbering {
            notify_presence(launch, task - numbering);
        } else if is_small_batch {
            let assignments = common.tokens * shape.top_k;
            let totals = machine.lanes(|lane| {
                let expert = (task * LANES + lane).min(shape.experts - 1);
                machine.count_small_batch(expert, assignments)
            });
            notify_experts(launch, task, totals);
        } else {
            number_tile(launch, task);
        }
    }
    if !is_small_batch && partition.index < scans(shape.experts) {
        launch.wait_local(Counter::TilesDone, Region::RanksInExpert, || {
            machine.load(Counter::TilesDone) >= chunks as u64
        })?;
        for task in partition.tasks(scans(shape.experts)) {
            notify_experts(launch, task, scan_tiles(launch, chunks, task));
        }
    }
    Ok(())
}

/// Tells every rank how many tokens this one has.
#[inline(always)]
fn notify_tokens<M: Machine>(launch: &Launch<M>) {
    let Launch {
        machine,
        common,
        epoch,
        ..
    } = launch;
    let word = common.window.token_count(common.rank());
    let value = Tagged::new(*epoch, common.tokens).0;
    on_each_rank(*machine, common.shape.ranks, |rank| {
        machine.signal(rank, word, value)
    });
}

/// Tells every rank which of 32 tokens come to it.
#[inline(always)]
fn notify_presence<M: Machine>(launch: &Launch<M>, group: u32) {
    let Launch {
        machine,
        common,
        epoch,
        ..
    } = launch;
    let shape = &common.shape;
    let is_small_batch = shape.is_small_batch(common.tokens);
    let touched = machine.lanes(|lane| {
        let token = group * LANES + lane;
        let (mut ranks, mut first) = (0, 0);
        while first < shape.top_k {
            // Read again rather than branch.
            let ids = core::array::from_fn::<u32, DEPTH, _>(|step| {
                let k = (first + step as u32).min(shape.top_k - 1);
                let token = token.min(common.tokens - 1);
                read_expert_id(*machine, is_small_batch, assignment(shape.top_k, token, k))
            });
            core::array::from_fn::<(), DEPTH, _>(|step| ranks |= rank_bit(shape, ids[step]));
            first += DEPTH as u32;
        }
        if token < common.tokens { ranks } else { 0 }
    });
    let word = common.window.presence(common.rank(), group);
    for first in (0..shape.ranks).step_by(LANES as usize) {
        let mut bits = machine.lanes(|_| 0);
        for rank in first..shape.ranks.min(first + LANES) {
            let come = machine.lanes(|lane| machine.own(touched, lane) >> rank & 1 != 0);
            let come = machine.ballot(come);
            bits = machine.lanes(|lane| match first + lane == rank {
                true => come,
                false => machine.own(bits, lane),
            });
        }
        machine.lanes(|lane| {
            if first + lane < shape.ranks {
                let value = Tagged::new(*epoch, machine.own(bits, lane)).0;
                machine.signal(Rank(first + lane), word, value);
            }
        });
    }
}

/// Numbers the entries of a chunk, for each expert in the order of entries, and counts them.
#[inline(always)]
fn number_tile<M: Machine>(launch: &Launch<M>, chunk: u32) {
    let Launch {
        machine, common, ..
    } = launch;
    let (experts, assignments) = (common.shape.experts, common.tokens * common.shape.top_k);
    let counts = chunk as u64 * experts as u64;
    let count = |id: u32| counts + id as u64;
    for expert in (0..experts).step_by(LANES as usize) {
        machine.lanes(|lane| {
            if expert + lane < experts {
                machine.write(Table::TileCounts, count(expert + lane), 0);
            }
        });
    }
    let end = assignments.min((chunk + 1) * TILE_ASSIGNMENTS);
    let mut first = chunk * TILE_ASSIGNMENTS;
    let mut ahead = read_ids(*machine, first, end);
    while first < end {
        let ids = ahead;
        ahead = read_ids(*machine, first + LANES, end);
        let alike = machine.matching(ids);
        // What the lanes before wrote can be read.
        machine.converge();
        machine.lanes(|lane| {
            let (at, id) = (first + lane, machine.own(ids, lane));
            if at >= end || id >= experts {
                return;
            }
            let alike = machine.own(alike, lane) & valid_lanes(end - first);
            let so_far = machine.read(Table::TileCounts, count(id));
            let before = count_below(alike, lane);
            machine.write(Table::RanksInExpert, at as u64, so_far + before);
            if alike >> lane == 1 {
                machine.write(Table::TileCounts, count(id), so_far + before + 1);
            }
        });
        first += LANES;
    }
    machine.add(Counter::TilesDone, 1);
}

/// The expert ids of 32 entries from `first` on; of the last one before `end` again where there are
/// fewer.
#[inline(always)]
fn read_ids<M: Machine>(machine: &M, first: u32, end: u32) -> M::Lanes<u32> {
    machine.lanes(|lane| {
        let at = (first + lane).min(end - 1);
        machine.read(Table::TopkIds, at as u64)
    })
}

/// The expert id of an entry. For one lane.
#[inline(always)]
pub fn read_expert_id<M: Machine>(machine: &M, is_small_batch: bool, at: u64) -> u32 {
    match is_small_batch {
        true => machine.read_small_batch_id(at as u32),
        false => machine.read(Table::TopkIds, at),
    }
}

/// How many of `lanes` are below `lane`.
#[inline(always)]
pub const fn count_below(lanes: u32, lane: u32) -> u32 {
    // Shifted out at the top rather than masked: a mask would occupy a register all the time.
    (lanes << 1 << (LANES - 1 - lane)).count_ones()
}

/// The lanes that have an entry, where `left` are left.
#[inline(always)]
fn valid_lanes(left: u32) -> u32 {
    if left < LANES {
        (1 << left) - 1
    } else {
        u32::MAX
    }
}

/// Turns the counts of the chunks of 32 experts into those of all chunks before: how many entries
/// each expert gets.
#[inline(always)]
fn scan_tiles<M: Machine>(launch: &Launch<M>, chunks: u32, task: u32) -> M::Lanes<u32> {
    let Launch {
        machine, common, ..
    } = launch;
    let experts = common.shape.experts;
    machine.lanes(|lane| {
        let expert = task * LANES + lane;
        let at = |chunk: u32| chunk as u64 * experts as u64 + expert.min(experts - 1) as u64;
        // Read again rather than branch.
        let read = |first: u32| {
            core::array::from_fn::<u32, DEPTH, _>(|step| {
                machine.read(Table::TileCounts, at((first + step as u32).min(chunks - 1)))
            })
        };
        let (mut total, mut first) = (0, 0);
        let mut write = |first: u32, counts: [u32; DEPTH]| {
            core::array::from_fn::<(), DEPTH, _>(|step| {
                let chunk = first + step as u32;
                if chunk < chunks && expert < experts {
                    machine.write(Table::TileCounts, at(chunk), total);
                    total += counts[step];
                }
            });
        };
        let mut ahead = read(0);
        while first < chunks {
            let counts = ahead;
            ahead = read(first + DEPTH as u32);
            write(first, counts);
            first += DEPTH as u32;
        }
        total
    })
}

/// Tells the ranks of 32 experts how many entries they get.
#[inline(always)]
fn notify_experts<M: Machine>(launch: &Launch<M>, task: u32, totals: M::Lanes<u32>) {
    let Launch {
        machine,
        common,
        epoch,
        ..
    } = launch;
    let shape = &common.shape;
    machine.lanes(|lane| {
        let expert = task * LANES + lane;
        if expert < shape.experts {
            let local = expert % shape.local_experts();
            let word = common.window.count(common.rank(), local);
            let value = Tagged::new(*epoch, machine.own(totals, lane)).0;
            machine.signal(shape.rank_of(expert), word, value);
        }
    });
    let scans = scans(shape.experts);
    if arrivals::part_done(*machine, Counter::ScansDone, *epoch, scans) {
        // Everybody has seen all chunks done: ready for the next round.
        machine.store(Counter::TilesDone, 0);
    }
}
