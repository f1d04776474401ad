//! The rank of each assignment within its expert, among all that this source sends to that expert.
//!
//! A small batch is numbered by each block for itself, in shared memory, so that nobody waits for others. More
//! assignments are numbered in [`tiles`].

pub mod tiles;

use ferry_layout::{Counter, Region, Table, assignment_index};

use crate::machine::{LANES, Machine};
use crate::sync::arrivals;
use crate::sync::launch::{Aborted, Launch};
use crate::tactics::Numbering;

/// Groups of experts, a lane each.
#[inline(always)]
pub fn expert_groups(experts: u32) -> u32 {
    experts.div_ceil(LANES)
}

/// The expert id of an assignment. For one lane.
#[inline(always)]
pub fn read_expert_id<M: Machine>(machine: &M, numbering: Numbering, index: u64) -> u32 {
    match numbering {
        Numbering::InBlock => machine.read_small_batch_id(index as u32),
        Numbering::Tiles => machine.read(Table::TopkIds, index),
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

/// Waits until all assignments of this rank are numbered, in tiles.
#[inline(always)]
pub fn wait_until_numbered<M: Machine>(launch: &Launch<M>) -> Result<(), Aborted> {
    let scans = expert_groups(launch.common.shape.experts);
    launch.wait_local(Counter::ScansDone, Region::RanksInExpert, || {
        arrivals::is_done(launch.machine, Counter::ScansDone, launch.epoch, scans)
    })
}

/// How many assignments each of 32 experts gets, group `group` of them, of a small batch.
#[inline(always)]
pub fn count_experts<M: Machine>(launch: &Launch<M>, group: u32) -> M::Lanes<u32> {
    let (machine, shape) = (launch.machine, &launch.common.shape);
    let assignments = launch.common.tokens * shape.top_k;
    machine.lanes(|lane| {
        let expert = (group * LANES + lane).min(shape.experts - 1);
        machine.count_small_batch(expert, assignments)
    })
}
