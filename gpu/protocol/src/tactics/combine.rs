//! The decisions of combine.

use ferry_layout::{CombineMode, Common};

use crate::machine::position::Grid;
use crate::tactics::{Phase, Split, Wire, tuning};
use crate::work::extent::Extent;
use crate::work::sub_warps::SubWarps;

/// What a launch of combine does. The wire is the same on all ranks: what dispatch learnt of all sources
/// decides it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CombineTactics {
    /// How rows travel.
    pub wire: Wire,
    /// Who does what: [`Split::Shared`] or [`Split::Specialised`].
    pub split: Split,
    /// Warps of each block that reduce and do nothing else; 0 where all warps do both.
    pub reducers_in_block: u32,
    /// Whether no sender has more than one item.
    pub one_item_each: bool,
    /// Items that a sender takes at a time, a power of two.
    pub batch: u32,
    /// Parts that the sum of each of this rank's tokens is made in.
    pub reduce_parts: u32,
    /// Whether a reducer polls all vectors of its rows, not only one of a row that is missing: while at most
    /// [`POLL_ALL_UP_TO_WARPS`](tuning::POLL_ALL_UP_TO_WARPS) warps reduce.
    pub polls_all: bool,
}

impl CombineTactics {
    /// Of a launch in `phase`, on `grid`, of `tokens` of this rank, after a dispatch in which
    /// `extent` came. `common` and `spans_nodes`: as for
    /// [`DispatchTactics::decide`](crate::tactics::dispatch::DispatchTactics::decide).
    #[inline(always)]
    pub fn decide(
        common: &Common,
        tokens: u32,
        extent: Extent,
        phase: Phase,
        grid: Grid,
        spans_nodes: bool,
    ) -> Self {
        let shape = &common.shape;
        let items = extent.items(shape);
        let is_specialised = phase == Phase::Fused && items > grid.warps() && grid.in_block > 1;
        let (split, reducers_in_block) = match is_specialised {
            true => (
                Split::Specialised,
                tuning::reducers(grid.in_block, grid.warps()),
            ),
            false => (Split::Shared, 0),
        };
        let senders = grid.warps() - reducers_in_block * grid.blocks;
        let one_item_each = items <= senders;
        let is_reduced = shape.mode() == CombineMode::Reduced;
        // The kernel is asked first: one that spans nodes has no code for inline flags.
        let wire = if !spans_nodes && shape.combines_inline(extent.tokens) {
            Wire::Inline
        } else if spans_nodes {
            Wire::Remote
        } else if one_item_each && is_reduced {
            Wire::FlaggedByBlock
        } else {
            Wire::Flagged
        };
        let is_batched = wire == Wire::Flagged
            && is_reduced
            && extent.parts == 1
            && items / tuning::BATCH_FROM_ITEMS_PER_WARP >= senders;
        let reduce_parts = match wire {
            Wire::Inline => shape.reduce_parts(tokens),
            _ => common.row.parts(tokens),
        };
        Self {
            wire,
            split,
            reducers_in_block,
            one_item_each,
            batch: if is_batched {
                SubWarps::of(shape).most()
            } else {
                1
            },
            reduce_parts,
            polls_all: tokens * reduce_parts <= tuning::POLL_ALL_UP_TO_WARPS,
        }
    }
}
