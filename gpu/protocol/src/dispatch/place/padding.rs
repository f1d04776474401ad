//! Tables of groups and of their rows, and the rows that pad groups, if the user asks for any of them. A
//! group is a local expert, or the shared expert before them.

use ferry_layout::{Rank, Table, Tagged, scale_placement};

use crate::dispatch::launch::Dispatch;
use crate::dispatch::place::fill::fill_words;
use crate::dispatch::place::shared::SharedGroup;
use crate::machine::{LANES, Machine};
use crate::work::lanes::for_each_bit;
use crate::work::partition::Partition;

/// Entry of a row without a token: -1.
const ABSENT: u32 = u32::MAX;

/// Groups of a launch's rows. `count` returns the rows of a local expert, without padding, for one lane.
pub struct Groups<'a, M, C> {
    /// The launch, whose offsets are written.
    pub dispatch: &'a Dispatch<'a, M>,
    /// The shared expert's group.
    pub shared: SharedGroup,
    /// See the struct.
    pub count: C,
}

/// Rows of a group. They wrap around, as sums of counts received over the wire may.
#[derive(Clone, Copy)]
struct Bounds {
    /// First row.
    start: u32,
    /// Row after the last one, without padding.
    end: u32,
    /// First row of the next group.
    next: u32,
}

impl<M: Machine> Dispatch<'_, M> {
    /// Assignments of all sources to a local expert, from the source bases and the last source's count, which
    /// stay until this rank returns its credit. For one lane, after the offsets are written.
    #[inline(always)]
    pub fn assignments(&self, expert: u32) -> u32 {
        let (machine, window) = (self.machine, &self.common.window);
        let last = Rank(self.common.shape.ranks - 1);
        // All are loaded before any is used.
        let first = machine.load_tagged(window.source_base(Rank(0), expert));
        let base = machine.load_tagged(window.source_base(last, expert));
        let count = machine.load_tagged(window.count(last, expert));
        let value = |word: Tagged| word.0 as u32;
        value(base)
            .wrapping_add(value(count))
            .wrapping_sub(value(first))
    }
}

impl<M: Machine, C: Fn(u32) -> u32> Groups<'_, M, C> {
    /// Number of groups.
    #[inline(always)]
    fn groups(&self) -> u32 {
        self.shared.groups + self.dispatch.common.shape.local_experts()
    }

    /// Bounds of a group. Groups that outputs cut short have no padding. For one lane.
    #[inline(always)]
    fn bounds(&self, group: u32) -> Bounds {
        let machine = self.dispatch.machine;
        let start = machine.read(Table::RowOffsets, group as u64);
        let next = machine.read(Table::RowOffsets, group as u64 + 1);
        let rows = match group < self.shared.groups {
            true => self.shared.tokens(),
            false => (self.count)(group - self.shared.groups),
        };
        Bounds {
            start,
            end: start.wrapping_add(rows).min(next),
            next,
        }
    }

    /// Writes the number of rows of each group, and their ends. One warp, which wrote the offsets.
    #[inline(always)]
    pub fn describe(&self) {
        if self.dispatch.options.groups.counts == 0 {
            return;
        }
        let (machine, groups) = (self.dispatch.machine, self.groups());
        // Each lane reads words that other lanes wrote.
        machine.converge();
        for first in (0..groups).step_by(LANES as usize) {
            machine.lanes(|lane| {
                let group = first + lane;
                if group < groups {
                    let Bounds { start, end, .. } = self.bounds(group);
                    let count = end.saturating_sub(start);
                    machine.write(Table::GroupCounts, group as u64, count);
                    machine.write(Table::GroupEnds, group as u64, end);
                }
            });
        }
        if self.dispatch.options.groups.ranges != 0 {
            self.describe_ranges();
        }
    }

    /// Writes where the rows of each source begin in each expert's block, and their number. One warp, which
    /// wrote the offsets.
    #[inline(always)]
    fn describe_ranges(&self) {
        let (machine, common) = (self.dispatch.machine, self.dispatch.common);
        let (ranks, block) = (common.shape.ranks, self.dispatch.options.groups.block);
        let ranges = common.shape.local_experts() * ranks;
        let mut first = 0;
        while first < ranges {
            machine.lanes(|lane| {
                let index = first + lane;
                if index >= ranges {
                    return;
                }
                let (expert, source) = (index / ranks, Rank(index % ranks));
                let base = machine.load_tagged(common.window.source_base(source, expert));
                let count = machine.load_tagged(common.window.count(source, expert));
                let begin = (base.0 as u32).wrapping_sub(expert.wrapping_mul(block));
                let begin = begin.min(block);
                let count = (count.0 as u32).min(block - begin);
                machine.write(Table::SourceRanges, 2 * index as u64, count);
                machine.write(Table::SourceRanges, 2 * index as u64 + 1, begin);
            });
            first += LANES;
        }
    }

    /// Writes this warp's share of the rows of no token, and of the entries of the shared expert's rows.
    #[inline(always)]
    pub fn pad(&self, partition: Partition) {
        let tables = &self.dispatch.options.groups;
        self.pad_groups(partition);
        if !tables.describes_rows() {
            return;
        }
        self.describe_shared(partition);
        let (machine, capacity) = (self.dispatch.machine, self.dispatch.args.row_capacity);
        let end = machine.lanes(|_| machine.read(Table::RowOffsets, self.groups() as u64));
        let end = (machine.broadcast(end, 0) as u64).min(capacity);
        let words = |each: u64| end * each..capacity * each;
        let fill = |table, words, value| fill_words(machine, table, words, value, partition);
        if tables.m_indices != 0 {
            fill(Table::GroupsOfRows, words(1), ABSENT);
        }
        if tables.weights != 0 {
            fill(Table::WeightsOfRows, words(1), 0);
            fill(Table::SrcInfo, words(3), ABSENT);
        }
    }

    /// Writes the rows that pad groups: this warp's share.
    #[inline(always)]
    fn pad_groups(&self, partition: Partition) {
        let (machine, common) = (self.dispatch.machine, self.dispatch.common);
        let alignment = common.row.alignment();
        // Most rows that can pad a group.
        let most = match self.dispatch.options.groups.block {
            0 => alignment,
            block => block,
        };
        let tasks = self.groups() * most;
        let clears = self.dispatch.options.groups.clears_padding != 0;
        let stride = self.dispatch.scale_stride();
        let mut first = partition.index;
        while first < tasks {
            // A row a lane, so that the warp waits once; the last lanes repeat a group rather than branch.
            let found = machine.lanes(|lane| {
                let task = first + lane * partition.of;
                let group = task.min(tasks - 1) / most;
                let Bounds { start, end, next } = self.bounds(group);
                let row = end.wrapping_add(task % most);
                let (scales, has_room) = self.place_of_scales(group, start, row);
                let is_inside =
                    row < next && (row as u64) < self.dispatch.args.row_capacity && has_room;
                (row, scales, task < tasks && is_inside)
            });
            let rows = machine.lanes(|lane| machine.own(found, lane).0);
            let places = machine.lanes(|lane| machine.own(found, lane).1);
            let is_padding = machine.ballot(machine.lanes(|lane| machine.own(found, lane).2));
            machine.lanes(|lane| {
                if is_padding >> lane & 1 != 0 {
                    let row = machine.own(rows, lane) as u64;
                    self.write_entries(row, ABSENT, 0, [ABSENT; 3]);
                }
            });
            if clears {
                for_each_bit(is_padding, |lane| {
                    let (row, scales) = (
                        machine.broadcast(rows, lane),
                        machine.broadcast(places, lane),
                    );
                    self.dispatch.clear_row(row, scales as u64, stride);
                });
            }
            first += LANES * partition.of;
        }
    }

    /// First word of the scales of a row of a group whose rows begin at `start`, and whether the outputs have
    /// them. For one lane.
    #[inline(always)]
    fn place_of_scales(&self, group: u32, start: u32, row: u32) -> (u32, bool) {
        let common = self.dispatch.common;
        let has_words = common.shape.format().scale_layout().is_none();
        if self.dispatch.options.groups.block != 0 && has_words {
            return (self.dispatch.first_scale_word_in_block(row, group), true);
        }
        let (mut in_blocks, mut has_room) = (row, true);
        if common.shape.has_tiled_scales() {
            let offset = self
                .dispatch
                .machine
                .read(Table::ScalesOffsets, group as u64);
            in_blocks = scale_placement::first_block(start, offset)
                .wrapping_mul(scale_placement::BLOCK_ROWS)
                .wrapping_add(row.wrapping_sub(start));
            let block = in_blocks / scale_placement::BLOCK_ROWS;
            has_room = (block as u64) < self.dispatch.args.block_capacity;
        }
        let first = common
            .row
            .first_scale_word(common.shape.format(), row, in_blocks);
        (first, has_room)
    }

    /// Writes the entries of the shared expert's rows: this warp's share.
    #[inline(always)]
    fn describe_shared(&self, partition: Partition) {
        if self.shared.groups == 0 {
            return;
        }
        let machine = self.dispatch.machine;
        let rows = self.shared.tokens();
        let mut first = partition.index * LANES;
        while first < rows {
            machine.lanes(|lane| {
                let row = first + lane;
                if row < rows {
                    let source = [
                        self.dispatch.own_number(),
                        self.shared.first_token() + row,
                        ABSENT,
                    ];
                    self.write_entries(row as u64, 0, 1f32.to_bits(), source);
                }
            });
            first += partition.of * LANES;
        }
    }

    /// Writes a row's entries of the tables that there are. For one lane.
    #[inline(always)]
    fn write_entries(&self, row: u64, group: u32, weight: u32, source: [u32; 3]) {
        self.dispatch.write_entries(row, group, weight, source);
    }
}
