//! Padded blocks of experts that hold fewer rows than come.

use ferry_layout::{Fault, FaultKind, Region};

use crate::dispatch::launch::Dispatch;
use crate::dispatch::receive::counts::wait_for_experts;
use crate::machine::{LANES, Machine};
use crate::sync::launch::Aborted;

impl<M: Machine> Dispatch<'_, M> {
    /// Whether more rows come for an expert than its block of `block` rows holds. If so, records that of the
    /// first such expert. One warp, which has seen all counts arrive.
    #[inline(always)]
    pub fn overflows_blocks(&self, block: u32) -> Result<bool, Aborted> {
        let (machine, common) = (self.machine, self.common);
        let experts = common.shape.local_experts();
        let mut overflows = false;
        let mut first = 0;
        while first < experts && !overflows {
            // The last lanes repeat an expert rather than branch.
            let expert = |lane: u32| (first + lane).min(experts - 1);
            let rows = wait_for_experts(self, first)?;
            let rows = machine.lanes(|lane| machine.own(rows, lane).unwrap_or(0));
            let above = machine.ballot(machine.lanes(|lane| machine.own(rows, lane) > block));
            machine.lanes(|lane| {
                if above != 0 && lane == above.trailing_zeros() {
                    let fault = Fault {
                        region: Region::ExpertBlock,
                        index: (common.rank().0 * experts + expert(lane)) as u64,
                        wanted: block as u64,
                        saw: machine.own(rows, lane) as u64,
                        ..self.fault()
                    };
                    self.record(FaultKind::OutputTooSmall, fault);
                }
            });
            overflows = above != 0;
            first += LANES;
        }
        Ok(overflows)
    }
}
