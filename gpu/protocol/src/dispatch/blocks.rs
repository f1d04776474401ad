//! Padded blocks of experts: rows that they do not hold, and places of scales in them.

use ferry_layout::{DispatchOptions, Fault, FaultKind, Region};

use crate::dispatch::experts::wait_for_experts;
use crate::machine::{LANES, Machine};
use crate::sync::launch::{Aborted, Launch};

/// Whether more rows come for an expert than its block of `block` rows holds. If so, records that of the
/// first such expert. One warp, which has seen all counts arrive.
#[inline(always)]
pub fn overflows_blocks<M: Machine>(launch: &Launch<M>, block: u32) -> Result<bool, Aborted> {
    let (machine, common) = (launch.machine, launch.common);
    let experts = common.shape.local_experts();
    let mut overflows = false;
    let mut first = 0;
    while first < experts && !overflows {
        // The last lanes repeat an expert rather than branch.
        let expert = |lane: u32| (first + lane).min(experts - 1);
        let rows = wait_for_experts(launch, first)?;
        let rows = machine.lanes(|lane| machine.own(rows, lane).unwrap_or(0));
        let above = machine.ballot(machine.lanes(|lane| machine.own(rows, lane) > block));
        machine.lanes(|lane| {
            if above != 0 && lane == above.trailing_zeros() {
                let fault = Fault {
                    region: Region::ExpertBlock,
                    index: (common.rank().0 * experts + expert(lane)) as u64,
                    wanted: block as u64,
                    saw: machine.own(rows, lane) as u64,
                    ..launch.fault()
                };
                launch.record(FaultKind::OutputTooSmall, fault);
            }
        });
        overflows = above != 0;
        first += LANES;
    }
    Ok(overflows)
}

/// Whether row `position` is in the block of local expert `expert`, of `block` rows.
#[inline(always)]
pub const fn is_in_block(block: u32, position: u32, expert: u32) -> bool {
    position.wrapping_sub(expert.wrapping_mul(block)) < block
}

/// First word of the scales of blockwise FP8 of output row `position`, in the block of local expert `expert`.
/// Wraps around, as positions do.
#[inline(always)]
pub fn first_scale_word<M: Machine>(
    machine: &M,
    options: &DispatchOptions,
    position: u32,
    expert: u32,
) -> u32 {
    let row = position.wrapping_mul(machine.late(options.groups.scale_row));
    row.wrapping_add(expert.wrapping_mul(machine.late(options.groups.scale_block)))
}
