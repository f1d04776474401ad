//! Work that many warps of one GPU share and others wait for.
//!
//! A counter of parts only grows: after round `n` it is `n` times the parts of a round. So it needs no reset
//! between rounds. A counter that parties [`pass`] is reset by the last of them.

use ferry_layout::{Counter, Epoch};

use crate::machine::counters::Counters;

/// Counts one part as done: this warp's writes for the part can be read by everyone that sees [`is_done`].
/// True for the last of the round's `parts`, which sees the writes of all.
#[inline(always)]
pub fn part_done<C: Counters>(counters: &C, counter: Counter, epoch: Epoch, parts: u32) -> bool {
    let (before, end) = (counters.add(counter, 1), epoch.rounds() * parts as u64);
    debug_assert!(
        before < end && end - before <= parts as u64,
        "{counter:?}: {before} parts before one of {epoch:?}, which has {parts}"
    );
    before + 1 == end
}

/// Whether all `parts` of this round are done.
#[inline(always)]
pub fn is_done<C: Counters>(counters: &C, counter: Counter, epoch: Epoch, parts: u32) -> bool {
    counters.load(counter) >= epoch.rounds() * parts as u64
}

/// Passes a point of a launch that `parties` parties pass; the last one, which sees the writes of all others,
/// calls `last` and resets the counter for the next launch of this stream.
#[inline(always)]
pub fn pass<C: Counters>(counters: &C, counter: Counter, parties: u32, last: impl FnOnce()) {
    let before = counters.add(counter, 1);
    debug_assert!(
        before < parties as u64,
        "{counter:?}: {before} before one of {parties}"
    );
    if before + 1 == parties as u64 {
        last();
        counters.store(counter, 0);
    }
}
