//! Entries of the user's tables about the rows.

use ferry_layout::{Counter, Table, scale_placement};

use crate::dispatch::launch::Dispatch;
use crate::dispatch::place::overflow::offsets_word;
use crate::dispatch::place::shared::SharedGroup;
use crate::machine::Machine;

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
pub fn describe<M: Machine>(dispatch: &Dispatch<M>, group: u32, row: u32, block: u32) {
    let machine = dispatch.machine;
    machine.write(Table::RowOffsets, group as u64, row);
    machine.write(Table::ExpertIds, group as u64, group);
    if dispatch.common.shape.has_tiled_scales() {
        let offset = scale_placement::scales_offset(block, row);
        machine.write(Table::ScalesOffsets, group as u64, offset);
    }
}

/// Writes the ends of the tables, and publishes them. One warp, which [described](describe) all groups of
/// experts. Not before the block's rows are numbered: the release waits for the payload that is being loaded.
#[inline(always)]
pub fn end<M: Machine>(dispatch: &Dispatch<M>, shared: SharedGroup, ends: Ends) {
    let machine = dispatch.machine;
    let groups = shared.groups + dispatch.common.shape.experts;
    machine.lanes(|lane| {
        if lane == 0 {
            machine.write(Table::RowOffsets, groups as u64, ends.rows);
            shared.describe(dispatch);
        }
    });
    let Ends { rows, blocks } = ends;
    let overflows = dispatch.settle_overflow(groups, rows, blocks);
    machine.store(
        Counter::OffsetsReady,
        offsets_word(dispatch.epoch, overflows),
    );
}
