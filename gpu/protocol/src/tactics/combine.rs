//! Decisions of combine.

use ferry_layout::{CombineMode, Common};

use crate::machine::position::Grid;
use crate::tactics::{Phase, Split, Wire, tuning};
use crate::work::extent::Extent;
use crate::work::sub_warps::SubWarps;

/// Decisions of a launch of combine. Whether rows have inline flags is the same on all ranks, because it
/// follows from the extent that dispatch found over all sources. Everything else may differ between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CombineTactics {
    /// Way in which rows travel.
    pub wire: Wire,
    /// Division of the work among the warps: [`Split::Shared`] or [`Split::Specialised`].
    pub split: Split,
    /// Warps of each block that only reduce; 0 if all warps do both.
    pub reducers_in_block: u32,
    /// Whether no sender has more than one item.
    pub one_item_each: bool,
    /// Items that a sender takes at a time, a power of two.
    pub batch: u32,
    /// Parts in which the sum of each of this rank's tokens is computed.
    pub reduce_parts: u32,
    /// Whether a reducer polls all vectors of its rows, rather than one of a row that is missing: if at most
    /// [`POLL_ALL_UP_TO_WARPS`](tuning::POLL_ALL_UP_TO_WARPS) warps reduce.
    pub polls_all: bool,
}

impl CombineTactics {
    /// Decides for a launch in `phase`, on `grid`, with `tokens` tokens of this rank, after a dispatch of
    /// `extent`. `common` and `spans_nodes`: as for
    /// [`DispatchTactics::decide`](crate::tactics::dispatch::DispatchTactics::decide). `keeps_rows`: whether
    /// a received row has one expert row.
    #[inline(always)]
    pub fn decide(
        common: &Common,
        tokens: u32,
        extent: Extent,
        phase: Phase,
        grid: Grid,
        spans_nodes: bool,
        keeps_rows: bool,
    ) -> Self {
        let shape = &common.shape;
        let items = extent.items(shape);
        let can_specialise =
            phase == Phase::Fused && (!keeps_rows || tuning::reduces_rows_beside(grid.warps()));
        let is_specialised = can_specialise && items > grid.warps() && grid.in_block > 1;
        let (split, reducers_in_block) = match is_specialised {
            true => (
                Split::Specialised,
                tuning::reducers(grid.in_block, grid.warps(), keeps_rows),
            ),
            false => (Split::Shared, 0),
        };
        let senders = grid.warps() - reducers_in_block * grid.blocks;
        let one_item_each = items <= senders;
        let is_reduced = shape.mode() == CombineMode::Reduced;
        // The kernel is compared first: one that spans nodes has no code for inline flags.
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
