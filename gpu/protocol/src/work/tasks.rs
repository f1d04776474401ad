//! Numbers of tasks in numbering and counting a rank's assignments.

use ferry_layout::TILE_ASSIGNMENTS;

use crate::machine::LANES;

/// Groups of experts, one per lane.
#[inline(always)]
pub fn expert_groups(experts: u32) -> u32 {
    experts.div_ceil(LANES)
}

/// Tiles in which a source's assignments are numbered.
#[inline(always)]
pub fn tiles(top_k: u32, tokens: u32) -> u32 {
    (tokens * top_k).div_ceil(TILE_ASSIGNMENTS)
}
