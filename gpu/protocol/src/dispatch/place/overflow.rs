//! More rows than fit in the outputs. The rows that fit are written, all others count as not routed here:
//! their positions are marked for combine, which takes them for zeros. So a rank whose outputs are too small
//! keeps nobody waiting.
//!
//! Rows, and their blocks of tiled scales, are in the order of positions. So the rows that fit are the first
//! ones, and `row_offsets` that end at the outputs' end describe them: no matrix multiplication that follows
//! the offsets leaves its tensors.

use ferry_layout::{Counter, Epoch, Fault, FaultKind, OVERFLOWED, Region, Table, scale_placement};

use crate::dispatch::launch::Dispatch;
use crate::machine::{LANES, Machine};

impl<M: Machine> Dispatch<'_, M> {
    /// Whether `rows` rows and `blocks` blocks of tiled scales, in `groups` groups, do not fit in the
    /// outputs. If so, records that, and ends the offsets where the outputs end. One warp, which wrote the
    /// offsets.
    #[inline(always)]
    pub fn settle_overflow(&self, groups: u32, rows: u32, blocks: u32) -> bool {
        let is_tiled = self.common.shape.has_tiled_scales();
        let lacks_rows = rows as u64 > self.args.row_capacity;
        let lacks_blocks = is_tiled && blocks as u64 > self.args.block_capacity;
        if !lacks_rows && !lacks_blocks {
            return false;
        }
        let machine = self.machine;
        let (region, wanted, saw) = match lacks_rows {
            true => (Region::Output, self.args.row_capacity, rows),
            false => (Region::ScaleBlocks, self.args.block_capacity, blocks),
        };
        self.report_overflow(region, wanted, saw);
        // Each lane reads words that other lanes wrote.
        machine.converge();
        let mut most = self.args.row_capacity as u32;
        if is_tiled {
            most = most.min(self.rows_with_blocks(groups));
        }
        self.cut_offsets(groups, most);
        true
    }

    /// Records that `region` has room for `wanted`, and that `saw` arrived: in addition to the one input
    /// fault of a round, as results lack rows, and the user must learn of it.
    #[inline(always)]
    pub fn report_overflow(&self, region: Region, wanted: u64, saw: u32) {
        self.machine.lanes(|lane| {
            if lane == 0 {
                let fault = Fault {
                    region,
                    wanted,
                    saw: saw as u64,
                    ..self.fault()
                };
                self.record(FaultKind::OutputTooSmall, fault);
            }
        });
    }

    /// Rows before the first one whose block of scales does not fit in the outputs.
    #[inline(always)]
    fn rows_with_blocks(&self, groups: u32) -> u32 {
        let machine = self.machine;
        let (mut first, mut end) = (0, u32::MAX);
        while first < groups {
            // The last lanes repeat the last group rather than branch.
            let ends = machine.lanes(|lane| {
                let group = (first + lane).min(groups - 1) as u64;
                let start = machine.read(Table::RowOffsets, group);
                let rows = machine
                    .read(Table::RowOffsets, group + 1)
                    .wrapping_sub(start);
                let block =
                    scale_placement::first_block(start, machine.read(Table::ScalesOffsets, group));
                let left = (self.args.block_capacity as u32).saturating_sub(block);
                match scale_placement::blocks(rows) > left {
                    true => start.wrapping_add(left.wrapping_mul(scale_placement::BLOCK_ROWS)),
                    false => u32::MAX,
                }
            });
            let lowest = !machine.max(machine.lanes(|lane| !machine.own(ends, lane)));
            end = end.min(lowest);
            first += LANES;
        }
        end
    }

    /// Clamps the offsets of groups to row `most`.
    #[inline(always)]
    fn cut_offsets(&self, groups: u32, most: u32) {
        let machine = self.machine;
        let is_tiled = self.common.shape.has_tiled_scales();
        let blocks = match is_tiled {
            true => self.blocks_before(groups, most),
            false => 0,
        };
        // All reads of other lanes come before the writes below.
        machine.converge();
        let mut first = 0;
        while first <= groups {
            machine.lanes(|lane| {
                let group = first + lane;
                if group > groups || machine.read(Table::RowOffsets, group as u64) <= most {
                    return;
                }
                if is_tiled && group < groups {
                    let offset = scale_placement::scales_offset(blocks, most);
                    machine.write(Table::ScalesOffsets, group as u64, offset);
                }
                machine.write(Table::RowOffsets, group as u64, most);
            });
            first += LANES;
        }
    }

    /// Blocks of scales of the rows before `most`.
    #[inline(always)]
    fn blocks_before(&self, groups: u32, most: u32) -> u32 {
        let machine = self.machine;
        let (mut first, mut blocks) = (0, 0);
        while first < groups {
            let ends = machine.lanes(|lane| {
                let group = (first + lane).min(groups - 1) as u64;
                let start = machine.read(Table::RowOffsets, group);
                let end = machine.read(Table::RowOffsets, group + 1).min(most);
                match start < end {
                    true => {
                        let offset = machine.read(Table::ScalesOffsets, group);
                        let block = scale_placement::first_block(start, offset);
                        block.wrapping_add(scale_placement::blocks(end - start))
                    }
                    false => 0,
                }
            });
            blocks = machine.max(ends).max(blocks);
            first += LANES;
        }
        blocks
    }
}

/// [`Counter::OffsetsReady`] after a round's offsets are written.
#[inline(always)]
pub const fn offsets_word(epoch: Epoch, overflows: bool) -> u64 {
    2 * epoch.0 + overflows as u64
}

impl<M: Machine> Dispatch<'_, M> {
    /// Whether this round's rows do not fit in the outputs. Waits until that is known; false if that takes
    /// too long.
    #[inline(always)]
    pub fn overflows(&self) -> bool {
        let (machine, epoch) = (self.machine, self.epoch);
        let mut look = 0;
        while machine.load(Counter::OffsetsReady) < offsets_word(epoch, false) {
            look += 1;
            if machine.lane_timed_out(look) {
                break;
            }
        }
        machine.converge();
        // Lanes that left late may see different words.
        machine.ballot(machine.lanes(|_| self.has_overflowed())) != 0
    }

    /// Whether this round's rows do not fit in the outputs, after a wait for the offsets.
    #[inline(always)]
    pub fn has_overflowed(&self) -> bool {
        self.machine.load(Counter::OffsetsReady) == offsets_word(self.epoch, true)
    }
}

/// Position of a row that does not fit in the outputs, as combine reads it.
#[inline(always)]
pub const fn mark(position: u32) -> u32 {
    position | OVERFLOWED
}
