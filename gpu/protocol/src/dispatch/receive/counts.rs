//! Counts of the sources: of their tokens, and of assignments to the local experts.

use core::array::from_fn;

use ferry_layout::{Fault, FaultKind, Rank, Region, Tagged};

use crate::machine::{LANES, Machine};
use crate::sync::launch::{Aborted, Awaited, Launch};
use crate::work::extent::Extent;

/// Count words that a lane has in flight.
const DEPTH: usize = 8;

/// Waits for the token counts of all sources, and refuses counts above the plan's.
#[inline(always)]
pub fn wait_for_token_counts<M: Machine>(launch: &Launch<M>) -> Result<Extent, Aborted> {
    let (machine, common, epoch) = (launch.machine, launch.common, launch.epoch);
    let (shape, window) = (&common.shape, &common.window);
    let mut extent = Extent::NONE;
    for first in (0..shape.ranks).step_by(LANES as usize) {
        let source = |lane: u32| Rank((first + lane).min(shape.ranks - 1));
        let word = |lane| machine.load_tagged(window.token_count(source(lane)));
        let counts = launch.wait_lanes(
            |lane| word(lane).value(epoch),
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
            return launch.abort();
        }
        let tokens = machine.lanes(|lane| machine.own(counts, lane).unwrap_or(0));
        let parts = machine.lanes(|lane| common.row.parts(machine.own(tokens, lane)));
        extent = Extent {
            tokens: extent.tokens.max(machine.max(tokens)),
            parts: extent.parts.max(machine.max(parts)),
        };
    }
    Ok(extent)
}

/// Waits for the number of assignments of all sources to 32 experts of this rank from `first` on. The last
/// expert again for lanes after it.
#[inline(always)]
pub fn wait_for_experts<M: Machine>(
    launch: &Launch<M>,
    first: u32,
) -> Result<M::Lanes<Option<u32>>, Aborted> {
    let (machine, common) = (launch.machine, launch.common);
    let (ranks, experts) = (common.shape.ranks, common.shape.local_experts());
    let word = |source: u32, expert| machine.load_tagged(common.window.count(Rank(source), expert));
    let expert = |lane: u32| (first + lane).min(experts - 1);
    let value = |word: Tagged| word.value(launch.epoch);
    launch.wait_lanes(
        |lane| {
            let (mut sum, mut is_missing, mut source) = (0u32, false, 0);
            while source < ranks {
                // The last ones repeat a word rather than branch.
                let words: [Tagged; DEPTH] =
                    from_fn(|step| word((source + step as u32).min(ranks - 1), expert(lane)));
                from_fn::<(), DEPTH, _>(|step| {
                    let count = value(words[step]);
                    is_missing |= count.is_none();
                    if source + (step as u32) < ranks {
                        sum = sum.wrapping_add(count.unwrap_or(0));
                    }
                });
                source += DEPTH as u32;
            }
            (!is_missing).then_some(sum)
        },
        |lane| {
            let missing = (0..ranks).find(|&source| value(word(source, expert(lane))).is_none());
            // If all have arrived by now, only this rank is to blame.
            let peer = missing.unwrap_or(common.rank().0);
            Awaited {
                peer: Rank(peer),
                region: Region::Counts,
                index: expert(lane) as u64,
                saw: word(peer, expert(lane)).0 >> 32,
            }
        },
    )
}
