//! What a source tells of its tokens: how many there are, which go where, and how many entries
//! each expert gets. Small words that carry their epoch; no row waits for them at the source.

use ferry_layout::{Counter, DispatchArgs, Rank, Table, Tagged};

use crate::route::{on_each_rank, rank_bit};
use crate::send::entry;
use crate::wait::Launch;
use crate::{LANES, Machine, gather};

/// Expert ids that a lane has in flight while a warp looks for one expert.
const DEPTH: usize = 8;

/// Announcing tasks of a launch.
#[inline(always)]
pub fn tasks(experts: u32, tokens: u32) -> u32 {
    tokens.div_ceil(LANES) + experts
}

/// Announces, as number `announcer` of `announcers` warps that do.
#[inline(always)]
pub fn announce<M: Machine>(
    launch: &Launch<M>,
    args: &DispatchArgs,
    announcer: u32,
    announcers: u32,
) {
    if announcer == 0 {
        announce_tokens(launch, args);
    }
    let groups = args.tokens.div_ceil(LANES);
    let tasks = tasks(launch.common.shape.experts, args.tokens);
    let mut task = announcer;
    while task < tasks {
        if task < groups {
            announce_presence(launch, args, task);
        } else {
            announce_expert(launch, args, task - groups);
        }
        task += announcers;
    }
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
                let expert = machine.read(Table::TopkIds, entry(shape.top_k, token, k));
                ranks |= rank_bit(shape, expert);
            }
        }
        ranks
    });
    let word = common.window.presence(common.rank(), group);
    for rank in 0..shape.ranks {
        let comes = machine.lanes(|lane| machine.own(touched, lane) >> rank & 1 != 0);
        let value = Tagged::new(*epoch, machine.ballot(comes)).0;
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
    let entries = args.tokens * shape.top_k;
    let mut count = 0;
    let mut first = 0;
    while first < entries {
        let ids = machine.lanes(|lane| {
            core::array::from_fn::<u32, DEPTH, _>(|step| {
                // The last lanes read an entry again rather than branch.
                let at = first + step as u32 * LANES + lane;
                machine.read(Table::TopkIds, at.min(entries - 1) as u64)
            })
        });
        // Written as arrays so that they are unrolled. Most strips hold no entry for one expert of
        // many, and are passed over.
        let hits: [u32; DEPTH] = core::array::from_fn(|step| {
            machine.ballot(machine.lanes(|lane| {
                let at = first + step as u32 * LANES + lane;
                at < entries && machine.own(ids, lane)[step] == expert
            }))
        });
        core::array::from_fn::<(), DEPTH, _>(|step| {
            let hit = hits[step];
            if hit == 0 {
                return;
            }
            machine.lanes(|lane| {
                if hit >> lane & 1 != 0 {
                    let earlier = (hit & ((1 << lane) - 1)).count_ones();
                    let at = first + step as u32 * LANES + lane;
                    machine.write(Table::Ordinals, at as u64, count + earlier);
                }
            });
            count += hit.count_ones();
        });
        first += DEPTH as u32 * LANES;
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
