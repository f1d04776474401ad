//! The rank of each assignment within its expert, among all that this source sends to that expert.
//!
//! Every block numbers a small batch for itself ([`block`]), so that nobody waits for others. More
//! assignments are numbered in [`tiles`].

pub mod block;
pub mod tiles;

use ferry_layout::{Counter, Region, assignment_index};

use crate::dispatch::ids::read_id;
use crate::dispatch::numbering::block::SmallBatch;
use crate::machine::{LANES, Machine};
use crate::sync::arrivals;
use crate::sync::launch::{Aborted, Launch};
use crate::tactics::Numbering;
use crate::work::tasks::expert_groups;

/// The expert id of an assignment. For one lane.
#[inline(always)]
pub fn read_expert_id<M: Machine>(launch: &Launch<M>, numbering: Numbering, index: u64) -> u32 {
    match numbering {
        Numbering::InBlock => {
            SmallBatch::of(launch.common, launch.tokens).id(launch.machine, index as u32)
        }
        Numbering::Tiles => read_id(launch.machine, launch.wide_ids, index),
    }
}

/// The rank of each of a token's assignments within its expert, of a small batch.
#[inline(always)]
pub fn count_before<M: Machine>(
    launch: &Launch<M>,
    token: u32,
    experts: M::Lanes<u32>,
) -> M::Lanes<u32> {
    let (machine, common) = (launch.machine, launch.common);
    let (shape, batch) = (&common.shape, SmallBatch::of(common, launch.tokens));
    machine.lanes(|lane| {
        let expert = machine.own(experts, lane);
        if expert >= shape.experts {
            // No assignment, or one that is not routed.
            return 0;
        }
        let index = assignment_index(shape.top_k, token, lane) as u32;
        batch.expert_index(machine, index, expert)
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

/// Assignments of a small batch for each of 32 experts, group `group` of them.
#[inline(always)]
pub fn count_experts<M: Machine>(launch: &Launch<M>, group: u32) -> M::Lanes<u32> {
    let (machine, shape) = (launch.machine, &launch.common.shape);
    let batch = SmallBatch::of(launch.common, launch.tokens);
    machine.lanes(|lane| {
        let expert = (group * LANES + lane).min(shape.experts - 1);
        batch.total(machine, expert)
    })
}
