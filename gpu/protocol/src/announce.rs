//! What a source tells of its tokens: how many there are, which go where, and how many entries
//! each expert gets. Small words that carry their epoch; no row waits for them at the source.
//!
//! Entries are numbered in two steps: within a chunk by one warp each, then the chunks of every
//! expert are summed, 32 experts a warp.

use core::cmp::Ordering::{self, Greater, Less};

use ferry_layout::{CHUNK_ENTRIES, Counter, DispatchArgs, NOT_ROUTED, Rank, Region, Table, Tagged};

use crate::route::{on_each_rank, rank_bit};
use crate::send::entry;
use crate::share::Share;
use crate::wait::{Launch, Stopped};
use crate::{LANES, Machine, gather};

/// Words that a lane has in flight.
const DEPTH: usize = 8;
const _: () = assert!(CHUNK_ENTRIES == DEPTH as u32 * LANES);

/// Chunks that a source's entries are numbered in.
#[inline(always)]
fn chunks(top_k: u32, tokens: u32) -> u32 {
    (tokens * top_k).div_ceil(CHUNK_ENTRIES)
}

/// Groups of experts, a lane each.
#[inline(always)]
pub fn scans(experts: u32) -> u32 {
    experts.div_ceil(LANES)
}

/// Warps that announcing keeps busy.
#[inline(always)]
pub fn tasks(experts: u32, top_k: u32, tokens: u32) -> u32 {
    let first = tokens.div_ceil(LANES) + chunks(top_k, tokens);
    first.max(scans(experts))
}

/// Announces this warp's share.
#[inline(always)]
pub fn announce<M: Machine>(
    launch: &Launch<M>,
    args: &DispatchArgs,
    share: Share,
) -> Result<(), Stopped> {
    let Launch {
        machine, common, ..
    } = launch;
    let shape = &common.shape;
    let chunks = chunks(shape.top_k, args.tokens);
    if share.index == 0 {
        announce_tokens(launch, args);
    }
    for task in share.tasks(chunks + args.tokens.div_ceil(LANES)) {
        if task < chunks {
            number_chunk(launch, args, task);
        } else {
            announce_presence(launch, args, task - chunks);
        }
    }
    if share.index < scans(shape.experts) {
        launch.wait_local(Counter::ChunksDone, Region::Ordinals, || {
            machine.load(Counter::ChunksDone) >= chunks as u64
        })?;
        for task in share.tasks(scans(shape.experts)) {
            announce_experts(launch, chunks, task);
        }
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
        let (mut ranks, mut first) = (0, 0);
        while first < shape.top_k {
            // Read again rather than branch.
            let ids = core::array::from_fn::<u32, DEPTH, _>(|step| {
                let k = (first + step as u32).min(shape.top_k - 1);
                let token = token.min(args.tokens - 1);
                machine.read(Table::TopkIds, entry(shape.top_k, token, k))
            });
            core::array::from_fn::<(), DEPTH, _>(|step| ranks |= rank_bit(shape, ids[step]));
            first += DEPTH as u32;
        }
        if token < args.tokens { ranks } else { 0 }
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
fn number_chunk<M: Machine>(launch: &Launch<M>, args: &DispatchArgs, chunk: u32) {
    let Launch {
        machine, common, ..
    } = launch;
    let shape = &common.shape;
    let (first, entries) = (chunk * CHUNK_ENTRIES, args.tokens * shape.top_k);
    let at = |lane: u32, step: usize| first + step as u32 * LANES + lane;
    let ids = machine.lanes(|lane| {
        core::array::from_fn::<u32, DEPTH, _>(|step| {
            let at = at(lane, step);
            let id = machine.read(Table::TopkIds, at.min(entries - 1) as u64);
            if at < entries && id < shape.experts {
                id
            } else {
                NOT_ROUTED
            }
        })
    });
    let counts = chunk as u64 * shape.experts as u64;
    for expert in (0..shape.experts).step_by(LANES as usize) {
        machine.lanes(|lane| {
            if expert + lane < shape.experts {
                machine.write(Table::ChunkCounts, counts + (expert + lane) as u64, 0);
            }
        });
    }
    let numbers = number_entries(*machine, ids);
    // Spelled out, like all that follows: the compiler does not unroll so much by itself, and
    // arrays that are indexed at run time leave the registers.
    write_step::<M, 0>(launch, (first, entries), ids, numbers);
    write_step::<M, 1>(launch, (first, entries), ids, numbers);
    write_step::<M, 2>(launch, (first, entries), ids, numbers);
    write_step::<M, 3>(launch, (first, entries), ids, numbers);
    write_step::<M, 4>(launch, (first, entries), ids, numbers);
    write_step::<M, 5>(launch, (first, entries), ids, numbers);
    write_step::<M, 6>(launch, (first, entries), ids, numbers);
    write_step::<M, 7>(launch, (first, entries), ids, numbers);
    machine.add(Counter::ChunksDone, 1);
}

/// Writes the ordinals of a step of the chunk that begins with entry `first` of `entries`, and
/// what it adds to the counts: later steps overwrite what earlier ones counted.
#[inline(always)]
fn write_step<M: Machine, const STEP: usize>(
    launch: &Launch<M>,
    (first, entries): (u32, u32),
    ids: M::Lanes<[u32; DEPTH]>,
    numbers: M::Lanes<Numbers>,
) {
    let Launch {
        machine, common, ..
    } = launch;
    let counts = (first / CHUNK_ENTRIES) as u64 * common.shape.experts as u64;
    machine.converge();
    machine.lanes(|lane| {
        let (id, numbers) = (machine.own(ids, lane)[STEP], machine.own(numbers, lane));
        let (at, earlier) = (first + STEP as u32 * LANES + lane, numbers.earlier[STEP]);
        if at < entries {
            machine.write(Table::Ordinals, at as u64, earlier);
        }
        if id != NOT_ROUTED && numbers.followed >> STEP & 1 == 0 {
            machine.write(Table::ChunkCounts, counts + id as u64, earlier + 1);
        }
    });
}

/// What is known of the entries that a lane holds of a chunk, one a step.
#[derive(Clone, Copy)]
struct Numbers {
    /// Earlier entries of the chunk for the same expert.
    earlier: [u32; DEPTH],
    /// Bit `step`: another lane has a later entry for it in that step.
    followed: u32,
}

/// Numbers the entries of a chunk: step by step, within a step lane by lane.
#[inline(always)]
fn number_entries<M: Machine>(machine: &M, ids: M::Lanes<[u32; DEPTH]>) -> M::Lanes<Numbers> {
    let mut numbers = machine.lanes(|_| Numbers {
        earlier: [0; DEPTH],
        followed: 0,
    });
    for other in 0..LANES {
        // What the other lane holds, step by step.
        let theirs: [u32; DEPTH] = core::array::from_fn(|step| {
            let of_step = machine.lanes(|lane| machine.own(ids, lane)[step]);
            machine.broadcast(of_step, other)
        });
        numbers = machine.lanes(|lane| {
            let (own, so_far) = (machine.own(ids, lane), machine.own(numbers, lane));
            so_far.after(&own, &theirs, other.cmp(&lane))
        });
    }
    numbers
}

impl Numbers {
    /// With the entries `theirs` of another lane taken into account, which compares as `other`.
    #[inline(always)]
    fn after(self, own: &[u32; DEPTH], theirs: &[u32; DEPTH], other: Ordering) -> Self {
        let same = |step: usize| (own[step] == theirs[step]) as u32;
        let (before, behind) = ((other == Less) as u32, (other == Greater) as u32);
        let earlier = [
            earlier::<0>(own, theirs),
            earlier::<1>(own, theirs),
            earlier::<2>(own, theirs),
            earlier::<3>(own, theirs),
            earlier::<4>(own, theirs),
            earlier::<5>(own, theirs),
            earlier::<6>(own, theirs),
            earlier::<7>(own, theirs),
        ];
        let mut followed = self.followed;
        core::array::from_fn::<(), DEPTH, _>(|step| followed |= (same(step) & behind) << step);
        Self {
            earlier: core::array::from_fn(|step| {
                self.earlier[step] + earlier[step] + (same(step) & before)
            }),
            followed,
        }
    }
}

/// How many of another lane's entries in the steps before `STEP` are for the expert of this one's.
#[inline(always)]
fn earlier<const STEP: usize>(own: &[u32; DEPTH], theirs: &[u32; DEPTH]) -> u32 {
    let mut count = 0;
    core::array::from_fn::<(), DEPTH, _>(|step| {
        count += (step < STEP && theirs[step] == own[STEP]) as u32;
    });
    count
}

/// Sums the chunks of 32 experts, and tells each one's rank how many entries it gets.
#[inline(always)]
fn announce_experts<M: Machine>(launch: &Launch<M>, chunks: u32, task: u32) {
    let Launch {
        machine,
        common,
        epoch,
        ..
    } = launch;
    let shape = &common.shape;
    let expert = |lane: u32| task * LANES + lane;
    let at = |lane: u32, chunk: u32| {
        let expert = expert(lane).min(shape.experts - 1);
        chunk as u64 * shape.experts as u64 + expert as u64
    };
    let totals = machine.lanes(|lane| {
        let (mut total, mut first) = (0, 0);
        while first < chunks {
            // Read again rather than branch.
            let counts = core::array::from_fn::<u32, DEPTH, _>(|step| {
                let chunk = (first + step as u32).min(chunks - 1);
                machine.read(Table::ChunkCounts, at(lane, chunk))
            });
            core::array::from_fn::<(), DEPTH, _>(|step| {
                let chunk = first + step as u32;
                if chunk < chunks && expert(lane) < shape.experts {
                    machine.write(Table::ChunkCounts, at(lane, chunk), total);
                    total += counts[step];
                }
            });
            first += DEPTH as u32;
        }
        total
    });
    machine.lanes(|lane| {
        let expert = expert(lane);
        if expert < shape.experts {
            let word = common
                .window
                .count(common.rank(), expert % shape.local_experts());
            let value = Tagged::new(*epoch, machine.own(totals, lane)).0;
            machine.signal(shape.rank_of(expert), word, value);
        }
    });
    let scans = scans(shape.experts);
    if gather::part_done(*machine, Counter::ScansDone, *epoch, scans) {
        // Everybody has seen all chunks done: ready for the next round.
        machine.store(Counter::ChunksDone, 0);
    }
}
