//! The rank of each assignment within its expert, among all that this source sends to that expert.
//!
//! Every block numbers a small batch for itself ([`block`]), so that nobody waits for others. More
//! assignments are numbered in [`tiles`].

pub mod block;
pub mod tiles;

use ferry_layout::{Counter, Region, assignment_index};

use crate::dispatch::launch::Dispatch;
use crate::dispatch::send::ids::read_id;
use crate::dispatch::send::numbering::block::SmallBatch;
use crate::machine::{LANES, Machine};
use crate::sync::arrivals;
use crate::sync::launch::Aborted;
use crate::tactics::Numbering;
use crate::work::tasks::expert_groups;

impl<M: Machine> Dispatch<'_, M> {
    /// The expert id of an assignment. For one lane.
    #[inline(always)]
    pub fn read_expert_id(&self, numbering: Numbering, index: u64) -> u32 {
        match numbering {
            Numbering::InBlock => {
                SmallBatch::of(self.common, self.tokens).id(self.machine, index as u32)
            }
            Numbering::Tiles => read_id(self.machine, self.wide_ids, index),
        }
    }

    /// The rank of each of a token's assignments within its expert, of a small batch.
    #[inline(always)]
    pub fn count_before(&self, token: u32, experts: M::Lanes<u32>) -> M::Lanes<u32> {
        let (machine, common) = (self.machine, self.common);
        let (shape, batch) = (&common.shape, SmallBatch::of(common, self.tokens));
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
    pub fn wait_until_numbered(&self) -> Result<(), Aborted> {
        let scans = expert_groups(self.common.shape.experts);
        self.wait_local(Counter::ScansDone, Region::RanksInExpert, || {
            arrivals::is_done(self.machine, Counter::ScansDone, self.epoch, scans)
        })
    }

    /// Assignments of a small batch for each of 32 experts, group `group` of them.
    #[inline(always)]
    pub fn count_experts(&self, group: u32) -> M::Lanes<u32> {
        let (machine, shape) = (self.machine, &self.common.shape);
        let batch = SmallBatch::of(self.common, self.tokens);
        machine.lanes(|lane| {
            let expert = (group * LANES + lane).min(shape.experts - 1);
            batch.total(machine, expert)
        })
    }
}
