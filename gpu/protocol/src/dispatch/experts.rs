//! Numbers of assignments to the local experts, of all sources together.

use core::array::from_fn;

use ferry_layout::{Rank, Region, Tagged};

use crate::machine::Machine;
use crate::sync::launch::{Aborted, Awaited, Launch};

/// Count words that a lane has in flight.
const DEPTH: usize = 8;

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
