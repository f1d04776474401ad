//! Places for the scales of received rows. They travel as 32-bit words after the payload; each layout is a
//! first word for a row, and a stride.

use ferry_layout::{
    ByteOffset, Common, SENTINEL, ScaleLayout, Table, restore_sentinel, scale_placement,
};

use crate::dispatch::launch::Dispatch;
use crate::dispatch::place::destination::Destinations;
use crate::machine::miss::TimedOut;
use crate::machine::rows::ByteRange;
use crate::machine::{LANES, Machine};
use crate::sync::wait::wait_for;
use crate::work::item::RowLocation;
use crate::work::lanes::for_each_bit;
use crate::work::partition::Partition;

/// Words of a tile: one a row.
const TILE_WORDS: u32 = scale_placement::TILE_BYTES / 4;

/// Words of a row's scales that belong to a byte range of its payload: the first, and the end.
#[inline(always)]
pub fn words_of(common: &Common, range: ByteRange) -> (u32, u32) {
    let before = |byte| common.row.scale_words_before(byte);
    (before(range.start), before(range.end))
}

impl<M: Machine> Dispatch<'_, M> {
    /// Words between two consecutive words of one row's scales.
    #[inline(always)]
    pub fn scale_stride(&self) -> u64 {
        match self.common.shape.format().scale_layout() {
            None if self.options.groups.block != 0 => {
                self.machine.late(self.options.groups.scale_stride) as u64
            }
            None => self.args.row_capacity,
            Some(ScaleLayout::RowMajor) => 1,
            Some(ScaleLayout::Tiled) => TILE_WORDS as u64,
        }
    }

    /// First word of the scales of blockwise FP8 of output row `position`, in the padded block of local
    /// expert `expert`. Wraps around, as positions do.
    #[inline(always)]
    pub fn first_scale_word_in_block(&self, position: u32, expert: u32) -> u32 {
        let (machine, groups) = (self.machine, &self.options.groups);
        let row = position.wrapping_mul(machine.late(groups.scale_row));
        row.wrapping_add(expert.wrapping_mul(machine.late(groups.scale_block)))
    }

    /// Words `first..` of a row's scales before `end`, one a lane, if there are any.
    #[inline(always)]
    fn read_scales(&self, row: ByteOffset, first: u32, end: u32) -> M::Lanes<u32> {
        let (machine, common) = (self.machine, self.common);
        let from = common.row.scales(row);
        match first < end {
            // The last lanes read the last word again rather than branch.
            true => {
                machine.lanes(|lane| machine.read_window(from.word((first + lane).min(end - 1))))
            }
            false => machine.lanes(|_| 0),
        }
    }

    /// The first words that [`place_scales`](Self::place_scales) needs. They are loaded before the warp waits
    /// for anything.
    #[inline(always)]
    pub fn read_scales_ahead(&self, place: RowLocation) -> M::Lanes<u32> {
        let (first, end) = words_of(self.common, place.range);
        self.read_scales(place.row, first, end)
    }

    /// Puts the scales of a part of a row into their places, after waiting for them. `ahead` is the result of
    /// [`read_scales_ahead`](Self::read_scales_ahead).
    #[inline(always)]
    pub fn place_scales(
        &self,
        from: RowLocation,
        ahead: M::Lanes<u32>,
        destinations: Destinations<M::Lanes<u32>>,
    ) -> Result<(), TimedOut> {
        let machine = self.machine;
        let stride = self.scale_stride();
        self.take_scales(from, ahead, |first, end, values| {
            // Values that all output rows share are computed once.
            let before = machine.lanes(|lane| (first + lane) as u64 * stride);
            for_each_bit(destinations.here, |k| {
                let start = machine.broadcast(destinations.scales, k) as u64;
                machine.lanes(|lane| {
                    if first + lane < end {
                        let index = start + machine.own(before, lane);
                        machine.write(Table::Scales, index, machine.own(values, lane));
                    }
                });
            });
        })
    }

    /// Takes the scales of a part of a row, after waiting for them, and re-arms them: calls `put` with the
    /// number of the first word, the end of the words, and a word for each lane from the first on. `ahead` is
    /// the result of [`read_scales_ahead`](Self::read_scales_ahead).
    #[inline(always)]
    pub fn take_scales(
        &self,
        from: RowLocation,
        ahead: M::Lanes<u32>,
        put: impl Fn(u32, u32, M::Lanes<u32>),
    ) -> Result<(), TimedOut> {
        let (machine, common) = (self.machine, self.common);
        let (mut first, end) = words_of(common, from.range);
        debug_assert!(
            end <= common.row.scale_words,
            "words {first}..{end} of a row"
        );
        let mut words = ahead;
        while first < end {
            let next = self.read_scales(from.row, first + LANES, end);
            let here = || self.read_scales(from.row, first, end);
            if from.is_inline {
                wait_for(machine, &mut words, here, |word| word == SENTINEL)?;
            }
            let values = machine.lanes(|lane| restore_sentinel(machine.own(words, lane)));
            put(first, end, values);
            if from.is_inline {
                let scales = common.row.scales(from.row);
                machine.lanes(|lane| {
                    if first + lane < end {
                        machine.write_window(scales.word(first + lane), SENTINEL);
                    }
                });
            }
            words = next;
            first += LANES;
        }
        Ok(())
    }

    /// Writes a row's own scale, if the format has one, for each of its output rows.
    #[inline(always)]
    pub fn place_row_scale(&self, row: ByteOffset, destinations: Destinations<M::Lanes<u32>>) {
        let (machine, common) = (self.machine, self.common);
        let shape = &common.shape;
        if !shape.sizes().has_row_scale {
            return;
        }
        machine.lanes(|lane| {
            if destinations.here >> lane & 1 != 0 {
                let scale = machine.read_window(row.plus(common.row.row_scale));
                let position = machine.own(destinations.positions, lane) as u64;
                machine.write_half(Table::RowScales, position, scale as u16);
            }
        });
    }

    /// Writes zeros for the scales of the rows that an expert's last block has and the expert has not: a
    /// matrix multiplication reads whole blocks. `groups` groups precede the local experts. After the offsets
    /// are written, which derive from counts received over the wire: a block that does not fit in the outputs
    /// is skipped.
    #[inline(always)]
    pub fn clear_unused_scales(&self, groups: u32, partition: Partition) {
        let (machine, common) = (self.machine, self.common);
        let words = common.row.scale_words;
        let tasks = (groups + common.shape.local_experts()) * words;
        let mut first = partition.index;
        while first < tasks {
            // A task per lane, so that the warp waits once; the last lanes repeat tasks rather than branch.
            let task = |lane| first + lane * partition.of;
            let unused = machine.lanes(|lane| {
                let (expert, word) = (task(lane).min(tasks - 1) / words, task(lane) % words);
                let start = machine.read(Table::RowOffsets, expert as u64);
                let end = machine.read(Table::RowOffsets, expert as u64 + 1);
                let offset = machine.read(Table::ScalesOffsets, expert as u64);
                let rows = end.wrapping_sub(start);
                let first = scale_placement::first_block(start, offset);
                let block = first.wrapping_add(rows / scale_placement::BLOCK_ROWS);
                let used = match (block as u64) < self.args.block_capacity {
                    true => rows % scale_placement::BLOCK_ROWS,
                    false => 0,
                };
                let tile = common
                    .row
                    .first_scale_word_of_block(block)
                    .wrapping_add(word * TILE_WORDS);
                (tile, used)
            });
            let tiles = machine.lanes(|lane| machine.own(unused, lane).0);
            let used = machine.lanes(|lane| machine.own(unused, lane).1);
            let begun = |lane| task(lane) < tasks && machine.own(used, lane) != 0;
            for_each_bit(machine.ballot(machine.lanes(begun)), |lane| {
                let (tile, used) = (
                    machine.broadcast(tiles, lane),
                    machine.broadcast(used, lane),
                );
                clear_tile(machine, tile, used);
            });
            first += LANES * partition.of;
        }
    }
}

/// Writes zeros for all rows of a tile but the first `used`.
#[inline(always)]
fn clear_tile<M: Machine>(machine: &M, tile: u32, used: u32) {
    for first in (0..scale_placement::BLOCK_ROWS).step_by(LANES as usize) {
        machine.lanes(|lane| {
            let row = first + lane;
            if row >= used {
                let at = tile + scale_placement::offset_in_block(row, 0) / 4;
                machine.write(Table::Scales, at as u64, 0);
            }
        });
    }
}
