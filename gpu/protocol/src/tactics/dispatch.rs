//! Decisions of dispatch.

use ferry_layout::{Common, ReceiveLayout, Shape, TokenFormat};

use crate::machine::LANES;
use crate::machine::position::Grid;
use crate::machine::rows::ByteRange;
use crate::tactics::{Numbering, Phase, Split, Wire, tuning};
use crate::work::tasks::{expert_groups, tiles};

/// Decisions of a launch of dispatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DispatchTactics {
    /// Parts of each of this rank's rows, a power of two; 1 if rows stay whole.
    pub parts: u32,
    /// Numbering of this rank's assignments.
    pub numbering: Numbering,
    /// Whether headers carry the ranks of assignments within their experts, which number output rows.
    pub numbers_rows: bool,
    /// Whether this rank's rows travel with inline flags.
    is_inline: bool,
    /// Whether some ranks are on other nodes.
    spans_nodes: bool,
    /// This rank's work items.
    items: u32,
    /// Division of the work among the warps.
    pub split: Split,
    /// Warps that notify.
    pub notifiers: u32,
    /// Warps that send, at least one.
    pub senders: u32,
}

impl DispatchTactics {
    /// Decides for a launch in `phase`, on `grid`, with `tokens` tokens of this rank. `common` has the plan's
    /// sizes. `spans_nodes`: whether the kernel is the one that reaches other nodes. `receive`: the layout of
    /// received rows.
    #[inline(always)]
    pub fn decide(
        common: &Common,
        tokens: u32,
        phase: Phase,
        grid: Grid,
        spans_nodes: bool,
        receive: ReceiveLayout,
    ) -> Self {
        let shape = &common.shape;
        let parts = common.row.parts(tokens);
        let is_inline = common.dispatches_inline(parts);
        let numbering = match shape.is_small_batch(tokens) {
            true => Numbering::InBlock,
            false => Numbering::Tiles,
        };
        let work = Work {
            format: shape.format(),
            notifications: notifications(shape, tokens, numbering),
            items: tokens * parts,
            is_whole: parts == 1,
            inline_bytes: match is_inline {
                true => ByteRange::part(common.row.payload_bytes, 0, parts).end,
                false => 0,
            },
            // Rows of a view are where they belong once they have arrived.
            receives: phase == Phase::Fused && receive != ReceiveLayout::View,
        };
        let Warps {
            split,
            notifiers,
            senders,
        } = work.assign(grid);
        Self {
            parts,
            numbering,
            numbers_rows: !receive.keeps_rows(),
            is_inline,
            spans_nodes,
            items: work.items,
            split,
            notifiers,
            senders,
        }
    }

    /// Way in which this rank's rows travel. Receivers decide for each source
    /// ([`Common::dispatches_inline`](ferry_layout::Common::dispatches_inline)). Computed at its use: a value
    /// would occupy a register from the launch's beginning.
    #[inline(always)]
    pub fn wire(self, senders: u32) -> Wire {
        let is_specialised = matches!(self.split, Split::Specialised | Split::SpecialisedBySm);
        if self.is_inline {
            Wire::Inline
        } else if self.spans_nodes {
            Wire::Remote
        } else if self.items <= senders && !is_specialised {
            Wire::FlaggedByBlock
        } else {
            Wire::Flagged
        }
    }
}

/// Warps that notifying keeps busy: one for 32 tokens' presence, one for 32 experts' counts, one for the
/// numbering of a tile.
#[inline(always)]
pub fn notifications(shape: &Shape, tokens: u32, numbering: Numbering) -> u32 {
    let presence = tokens.div_ceil(LANES);
    let experts = expert_groups(shape.experts);
    match numbering {
        Numbering::InBlock => presence + experts,
        Numbering::Tiles => experts.max(presence + tiles(shape.top_k, tokens)),
    }
}

/// Work for the warps of a launch that sends.
#[derive(Clone, Copy)]
struct Work {
    format: TokenFormat,
    /// Warps that notifying keeps busy.
    notifications: u32,
    /// Parts of tokens to be sent.
    items: u32,
    /// Whether they are whole tokens.
    is_whole: bool,
    /// Bytes of the payload of the first item, if it travels with inline flags; else 0.
    inline_bytes: u32,
    /// Whether the launch then moves rows that arrive.
    receives: bool,
}

/// Numbers of warps with each role.
struct Warps {
    split: Split,
    notifiers: u32,
    senders: u32,
}

impl Work {
    #[inline(always)]
    fn assign(self, grid: Grid) -> Warps {
        let (warps, items) = (grid.warps(), self.items);
        let most_notifiers = (warps / tuning::WARPS_PER_NOTIFIER).max(1);
        let notifiers = self.notifications.clamp(1, most_notifiers);
        // A launch of a single warp notifies first, then sends.
        let others = if warps == 1 { 1 } else { warps - notifiers };
        let is_many = items > others || self.is_whole && items >= tuning::SPECIALISE_FROM_ROWS;
        let is_specialised = self.receives && is_many && others > 1;
        let saturating = tuning::saturating_senders(self.format);
        let spared = tuning::spared_senders(self.format, warps);
        let most = tuning::useful_senders(self.format, items);
        let split = if is_specialised && saturating <= spared {
            Split::SpecialisedBySm
        } else if is_specialised {
            Split::Specialised
        } else if self.receives && self.inline_bytes >= tuning::SENDER_HALF_FROM_BYTES {
            Split::SenderHalf
        } else if !self.receives && items > warps {
            // Notifying takes much less time than sending that many items.
            Split::AllSend
        } else {
            Split::Shared
        };
        let senders = match is_specialised {
            true => saturating.min(spared).min(most).clamp(1, others - 1),
            false => others,
        };
        Warps {
            split,
            notifiers,
            senders,
        }
    }
}
