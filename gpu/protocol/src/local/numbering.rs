//! The rows of a block's own tokens. Every block counts all assignments by itself, so that no block waits for
//! another, and then numbers those of its own tokens:
//!
//! ```text
//! all warps     clear the counts                                               barrier
//! all warps     count all ids: those before the block's tokens, and the rest;
//!               keep those of the block's tokens                               barrier
//! first warp    the experts' first rows, from all counts                       barrier
//! first warp    the rows of the block's assignments, in order                  barrier
//! ```
//!
//! The first barrier is that of [`Launch::begun`]. The first two steps and the third are in `counting.rs`.
//! The rows are kept in the row map, for combine. The block's memory keeps rows and ids if it has room for
//! all of the block's; otherwise these are read again. After the last barrier the first block's first warp
//! [ends](crate::local::tables::end) the user's tables.

use ferry_layout::{
    DispatchArgs, DispatchOptions, MAX_COUNTED_EXPERTS, MAX_TOP_K, NOT_ROUTED, Table,
    scale_placement,
};

use crate::combine::received::read_positions;
use crate::dispatch::launch::Dispatch;
use crate::dispatch::place::overflow;
use crate::dispatch::send::ids::{has_vectors, read_id};
use crate::dispatch::send::numbering::block::{BLOCK_MEMORY_BYTES, count_below};
use crate::machine::{LANES, Machine};
use crate::tactics::local::LocalTactics;
use crate::work::item::Item;
use crate::work::lanes::lane_or_none;

/// Words of a vector, the counts that are cleared at a time.
pub const VECTOR_WORDS: u32 = 4;

/// Words of each expert in the block's memory.
#[derive(Clone, Copy)]
pub enum PerExpert {
    /// Assignments before those of the block's tokens.
    Before,
    /// All others.
    Rest,
    /// The row of the block's next assignment.
    NextRow,
    /// Distance from a row to its place among the rows of all blocks of tiled scales.
    ToScales,
}

/// Number of words of each expert.
const WORDS: u32 = 4;

const _: () = assert!(
    4 * (WORDS * MAX_COUNTED_EXPERTS + MAX_TOP_K) <= BLOCK_MEMORY_BYTES
        && MAX_COUNTED_EXPERTS.is_multiple_of(VECTOR_WORDS),
    "the block's memory holds the words of all experts, and the positions of one token: a block that \
     shares a token has no other, and finds none in the row map, where another block writes them"
);

/// The assignments of all tokens, and those of this block's tokens.
#[derive(Clone, Copy)]
pub struct BlockNumbering {
    /// Assignments of all tokens.
    pub assignments: u32,
    /// First assignment of the block's tokens.
    pub first: u32,
    /// End of those.
    end: u32,
    /// Whether this block keeps their rows for combine.
    keeps: bool,
    /// Whether ids are read as vectors: their table begins and ends at the ends of vectors.
    pub has_vectors: bool,
    /// Whether ids are i64.
    pub is_wide: bool,
    /// Experts of this rank.
    pub experts: u32,
    /// Id of the first of them. It is subtracted from ids; no other rank's expert becomes one of this rank's
    /// by that, as there are far fewer experts than numbers.
    first_expert: u32,
}

impl BlockNumbering {
    /// Numbering for `tokens` tokens, with the block's tokens from `tactics`.
    #[inline(always)]
    pub fn of(
        args: &DispatchArgs,
        options: &DispatchOptions,
        tokens: u32,
        tactics: LocalTactics,
    ) -> Self {
        let shape = &args.common.shape;
        let (top_k, first_token) = (shape.top_k, tactics.first_token);
        let assignments = tokens * top_k;
        Self {
            assignments,
            has_vectors: options.wide_ids == 0 && has_vectors(args, assignments),
            is_wide: options.wide_ids != 0,
            first: first_token * top_k,
            end: (first_token + tactics.own_tokens) * top_k,
            keeps: tactics.keeps,
            experts: shape.experts,
            first_expert: options.first_expert,
        }
    }

    /// The byte of a word.
    #[inline(always)]
    pub fn at(self, word: PerExpert, expert: u32) -> u32 {
        debug_assert!(expert < self.experts, "expert {expert}");
        4 * (word as u32 * self.stride() + expert)
    }

    /// Words from one kind of word to the next, for all experts.
    #[inline(always)]
    fn stride(self) -> u32 {
        (self.experts + VECTOR_WORDS - 1) & !(VECTOR_WORDS - 1)
    }

    /// An id counted from this rank's first expert.
    #[inline(always)]
    pub fn local(self, id: u32) -> u32 {
        id.wrapping_sub(self.first_expert)
    }

    /// Numbers the rows of the block's assignments, in order, and keeps them. One warp, after
    /// [`find_rows`](Self::find_rows); a barrier must follow.
    #[inline(always)]
    pub fn number<M: Machine>(self, dispatch: &Dispatch<M>) {
        let machine = dispatch.machine;
        let mut first = self.first;
        while first < self.end {
            let experts = machine.lanes(|lane| match first + lane < self.end {
                true => self.expert(machine, first + lane).min(self.experts),
                false => self.experts,
            });
            let alike = machine.matching(experts);
            // The first lane of each expert takes the rows of all.
            let starts = machine.lanes(|lane| {
                let (expert, alike) = (machine.own(experts, lane), machine.own(alike, lane));
                match expert < self.experts && count_below(alike, lane) == 0 {
                    true => machine
                        .add_in_block(self.at(PerExpert::NextRow, expert), alike.count_ones()),
                    false => 0,
                }
            });
            let lowest = machine.lanes(|lane| machine.own(alike, lane).trailing_zeros());
            let starts = machine.shuffle(starts, lowest);
            machine.lanes(|lane| {
                if first + lane < self.end {
                    let before = count_below(machine.own(alike, lane), lane);
                    let row = machine.own(starts, lane) + before;
                    let position = self.position(dispatch, machine.own(experts, lane), row);
                    self.keep(dispatch, first + lane, position);
                }
            });
            first += LANES;
        }
    }

    /// The expert of an assignment of the block's, counted from this rank's first one. For one lane.
    #[inline(always)]
    fn expert<M: Machine>(self, machine: &M, index: u32) -> u32 {
        match self.keeps_ids() {
            true => machine.load_block(self.at_id(index)),
            false => self.local(read_id(machine, self.is_wide, index as u64)),
        }
    }

    /// Whether an assignment is of the block's tokens.
    #[inline(always)]
    pub fn is_own(self, index: u32) -> bool {
        index.wrapping_sub(self.first) < self.end - self.first
    }

    /// Keeps the position of an assignment. For one lane.
    #[inline(always)]
    fn keep<M: Machine>(self, dispatch: &Dispatch<M>, index: u32, position: u32) {
        let (machine, common) = (dispatch.machine, dispatch.common);
        let first = common.shape.row_map_index(common.rank(), 0, 0);
        if self.keeps {
            machine.write(Table::RowMap, first + index as u64, position);
        }
        if self.keeps_in_block() {
            machine.store_block(self.at_position(index), position);
        }
    }

    /// Whether the block's memory has room for the positions of all of the block's assignments.
    #[inline(always)]
    fn keeps_in_block(self) -> bool {
        // In words: bytes of all assignments may not fit in 32 bits.
        WORDS * self.stride() + (self.end - self.first) <= BLOCK_MEMORY_BYTES / 4
    }

    /// The byte of the position of an assignment of the block: after the words of all experts.
    #[inline(always)]
    fn at_position(self, index: u32) -> u32 {
        4 * (WORDS * self.stride() + index - self.first)
    }

    /// Whether the block's memory also has room for the experts of the block's assignments: they need not be
    /// read again then, which would wait for the payload that is being loaded.
    #[inline(always)]
    pub fn keeps_ids(self) -> bool {
        // Halved rather than doubled: twice all assignments may not fit in 32 bits.
        self.end - self.first <= (BLOCK_MEMORY_BYTES / 4 - WORDS * self.stride()) / 2
    }

    /// The byte of the expert of an assignment of the block: after the positions of all.
    #[inline(always)]
    pub fn at_id(self, index: u32) -> u32 {
        debug_assert!(self.keeps_ids() && self.is_own(index), "assignment {index}");
        4 * (WORDS * self.stride() + self.end - self.first + index - self.first)
    }

    /// The positions of an item's token, one a top-k slot, as in the row map. After [`number`](Self::number).
    #[inline(always)]
    pub fn positions<M: Machine>(self, dispatch: &Dispatch<M>, item: Item) -> M::Lanes<u32> {
        let (machine, top_k) = (dispatch.machine, dispatch.common.shape.top_k);
        if !self.keeps_in_block() {
            return read_positions(dispatch, item);
        }
        machine.lanes(|lane| {
            lane_or_none(lane, top_k, || {
                machine.load_block(self.at_position(item.token * top_k + lane))
            })
        })
    }

    /// Output position of an assignment: `row`, marked if it does not fit in the outputs; not routed if this
    /// rank does not have `expert`. For one lane.
    #[inline(always)]
    fn position<M: Machine>(self, dispatch: &Dispatch<M>, expert: u32, row: u32) -> u32 {
        match self.has_room(dispatch, expert, row) {
            true => row,
            false if expert < self.experts => overflow::mark(row),
            false => NOT_ROUTED,
        }
    }

    /// Whether this rank has `expert`, and the outputs have `row` of it, with its block of tiled scales. For
    /// one lane.
    #[inline(always)]
    pub fn has_room<M: Machine>(self, dispatch: &Dispatch<M>, expert: u32, row: u32) -> bool {
        if expert >= self.experts {
            return false;
        }
        let block = self.scales_row(dispatch, expert, row) / scale_placement::BLOCK_ROWS;
        let has_block = !dispatch.common.shape.has_tiled_scales()
            || (block as u64) < dispatch.args.block_capacity;
        has_block && (row as u64) < dispatch.args.row_capacity
    }

    /// A row of an expert counted in the rows of all blocks of tiled scales, if scales are tiled. After
    /// [`find_rows`](Self::find_rows). For one lane.
    #[inline(always)]
    pub fn scales_row<M: Machine>(self, dispatch: &Dispatch<M>, expert: u32, row: u32) -> u32 {
        match dispatch.common.shape.has_tiled_scales() {
            true => {
                row + dispatch
                    .machine
                    .load_block(self.at(PerExpert::ToScales, expert))
            }
            false => row,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_blocks_memory_holds_as_many_assignments_as_there_is_room_for_and_never_all() {
        let words = BLOCK_MEMORY_BYTES / 4;
        for experts in [1, 4, 256, MAX_COUNTED_EXPERTS] {
            let of = |assignments| BlockNumbering {
                assignments,
                first: 0,
                end: assignments,
                keeps: true,
                has_vectors: false,
                is_wide: false,
                experts,
                first_expert: 0,
            };
            let room = words - WORDS * of(0).stride();
            assert!(of(room).keeps_in_block() && !of(room + 1).keeps_in_block());
            assert!(of(room / 2).keeps_ids() && !of(room / 2 + 1).keeps_ids());
            let last = of(room / 2);
            assert!(room < 2 || last.at_id(room / 2 - 1) < BLOCK_MEMORY_BYTES);
            // All assignments that a plan may have, on one block.
            let all = of(i32::MAX as u32);
            assert!(!all.keeps_in_block() && !all.keeps_ids());
        }
    }
}
