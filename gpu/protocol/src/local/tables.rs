//! Entries of the user's tables about the rows.

use ferry_layout::{Counter, DispatchArgs, Table, scale_placement};

use crate::dispatch::overflow::{offsets_word, settle};
use crate::dispatch::shared::SharedGroup;
use crate::machine::Machine;
use crate::sync::launch::Launch;

/// Ends of the outputs.
pub struct Ends {
    /// All rows.
    pub rows: u32,
    /// All blocks of tiled scales.
    pub blocks: u32,
}

/// Writes the tables' entries for a group whose rows begin at `row` and whose tiled scales at `block`. For
/// one lane.
#[inline(always)]
pub fn describe<M: Machine>(launch: &Launch<M>, group: u32, row: u32, block: u32) {
    let machine = launch.machine;
    machine.write(Table::RowOffsets, group as u64, row);
    machine.write(Table::ExpertIds, group as u64, group);
    if launch.common.shape.has_tiled_scales() {
        let offset = scale_placement::scales_offset(block, row);
        machine.write(Table::ScalesOffsets, group as u64, offset);
    }
}

/// Writes the ends of the tables, and publishes them. One warp, which [described](describe) all groups of
/// experts. Not before the block's rows are numbered: the release waits for the payload that is being loaded.
#[inline(always)]
pub fn end<M: Machine>(launch: &Launch<M>, args: &DispatchArgs, shared: SharedGroup, ends: Ends) {
    let machine = launch.machine;
    let groups = shared.groups + launch.common.shape.experts;
    machine.lanes(|lane| {
        if lane == 0 {
            machine.write(Table::RowOffsets, groups as u64, ends.rows);
            shared.describe(launch);
        }
    });
    let Ends { rows, blocks } = ends;
    let overflows = settle(launch, args, groups, rows, blocks);
    machine.store(Counter::OffsetsReady, offsets_word(launch.epoch, overflows));
}
