//! Lanes of a token's slots, of bits, and of the group's ranks.

use ferry_layout::{NOT_ROUTED, Rank};

use crate::machine::rows::Bits;
use crate::machine::{LANES, Machine};

/// The result of `read` on the lanes of a token's top-k slots; `NOT_ROUTED` on all others.
#[inline(always)]
pub fn lane_or_none(lane: u32, top_k: u32, read: impl FnOnce() -> u32) -> u32 {
    if lane < top_k { read() } else { NOT_ROUTED }
}

/// Calls `each` for every set bit, lowest first.
#[inline(always)]
pub fn for_each_bit(mut bits: impl Bits, mut each: impl FnMut(u32)) {
    while let Some(lowest) = bits.take_lowest() {
        each(lowest);
    }
}

/// Calls `each(rank)` on one lane for every rank of the group.
#[inline(always)]
pub fn on_each_rank<M: Machine>(machine: &M, ranks: u32, each: impl Fn(Rank)) {
    for first in (0..ranks).step_by(LANES as usize) {
        machine.lanes(|lane| {
            if first + lane < ranks {
                each(Rank(first + lane));
            }
        });
    }
}
