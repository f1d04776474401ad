//! The rank of each assignment within its expert, among all that this source sends to that expert.
//!
//! A small batch is numbered by each block for itself, in shared memory, so that nobody waits for others. More
//! assignments are numbered in [`tiles`].

pub mod tiles;

use ferry_layout::{Table, assignment_index};

use crate::machine::{LANES, Machine};
use crate::sync::launch::Launch;

/// Groups of experts, a lane each.
#[inline(always)]
pub fn expert_groups(experts: u32) -> u32 {
    experts.div_ceil(LANES)
}

/// The expert id of an assignment. For one lane.
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

/// The rank of each of a token's assignments within its expert, of a small batch.
#[inline(always)]
pub fn count_before<M: Machine>(
    launch: &Launch<M>,
    token: u32,
    experts: M::Lanes<u32>,
) -> M::Lanes<u32> {
    let (machine, common) = (launch.machine, launch.common);
    let (shape, assignments) = (&common.shape, common.tokens * common.shape.top_k);
    machine.lanes(|lane| {
        let expert = machine.own(experts, lane);
        if expert >= shape.experts {
            // No assignment, or one that goes nowhere.
            return 0;
        }
        let index = assignment_index(shape.top_k, token, lane) as u32;
        machine.number_small_batch(index, expert, assignments)
    })
}
