//! The receive window: the memory of a rank that its peers write.

use bytemuck::{Pod, Zeroable};

use crate::plan::shape::{CombineMode, Rank, Shape};

/// Regions and rows start at multiples of this, in bytes: an L2 cache line.
const ALIGN: u64 = 128;

/// A place in a window, in bytes from its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteOffset(pub(crate) u64);

impl ByteOffset {
    /// Bytes from the start of the window.
    pub const fn bytes(self) -> u64 {
        self.0
    }

    /// The 4-byte word `word` after this place.
    pub const fn word(self, word: u32) -> Self {
        Self(self.0 + 4 * word as u64)
    }

    /// The place `bytes` bytes from the start of a window.
    pub const fn of_bytes(bytes: u64) -> Self {
        Self(bytes)
    }

    /// The place `bytes` bytes further on.
    pub const fn plus(self, bytes: u32) -> Self {
        Self(self.0 + bytes as u64)
    }
}

/// A 64-bit word in a window that peers store and the owner polls: system scope, always.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signal(pub(crate) u64);

impl Signal {
    /// Bytes from the start of the window.
    pub const fn bytes(self) -> u64 {
        self.0
    }

    /// The place of the word, for a put.
    pub const fn place(self) -> ByteOffset {
        ByteOffset(self.0)
    }
}

/// Words that a put of this rank carries; each place is written again only in a later round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StagedEpoch {
    /// The epoch in the flags of dispatch rows.
    Dispatch,
    /// The epoch in the flags of combine rows, and in credits.
    Combine,
}

/// Layout of a receive window, equal on every rank of a group.
///
/// A flagged row has a word that is written after the whole row. A row with **inline flags** has none: each
/// of its words holds [`SENTINEL`](crate::SENTINEL) until it is written. The reader stores the sentinel
/// again.
///
/// The regions, with their index, contents and writer:
///
/// - counts, `[source, local expert]`: [`Tagged`](crate::Tagged) assignments for an expert; at
///   `local_experts` the source's tokens. Every source, every round.
/// - presence, `[source, token / 32]`: [`Tagged`](crate::Tagged) bits of 32 tokens, set for those that come
///   to this rank. Every source, as far as its tokens go.
/// - expert bases, `[local expert, 2]`: [`Tagged`](crate::Tagged) first row of an expert, and first block of
///   its tiled scales. The owner, every round, if scales are tiled.
/// - source bases, `[source, local expert]`: [`Tagged`](crate::Tagged) first row of a source's assignments
///   for an expert. The owner, every round.
/// - dispatch flags, `[source, token × part]`: epoch: the part is complete. The source.
/// - credits, `[peer]`: epoch: the peer has read its dispatch rows. Every peer, every round.
/// - culprits, `[peer]`: the rank at fault, all ones in the upper half: the peer has aborted because of it.
///   Every peer, once.
/// - combine flags, `[token × part, slot]`: epoch: the part is complete. The experts' rank.
/// - dispatch rows, `[source, token]`: payload and [`Header`](crate::Header). The source; headers of inline
///   rows: the owner.
/// - combine rows, `[token, slot]`: BF16 payload; then, if weights travel, a weight for each top-k slot. The
///   experts' rank.
/// - inline dispatch rows, `[source, token]`, if rows are cut: payload, scales, and a header for each part.
///   The source, and the owner.
/// - inline combine rows, `[token, slot]`, up to `Shape::max_inline_tokens`: BF16 payload. The experts' rank,
///   and the owner.
/// - dispatch staging, `[token]`: dispatch row, for puts to unmapped ranks. The owner.
/// - combine staging, `[source, token]` or output row: combine row, for puts to unmapped ranks. The owner.
/// - staged notices, `[rank]`, last rank first: its counts as they stand in its window, and then presence,
///   for puts to unmapped ranks. The owner.
/// - staged epochs: see [`StagedEpoch`]. The owner.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Window {
    counts: u64,
    presence: u64,
    expert_bases: u64,
    source_bases: u64,
    dispatch_flags: u64,
    credit: u64,
    culprit: u64,
    combine_flags: u64,
    dispatch_rows: u64,
    combine_rows: u64,
    inline_dispatch_rows: u64,
    inline_combine_rows: u64,
    dispatch_staging: u64,
    combine_staging: u64,
    /// Bytes of the whole window.
    pub bytes: u64,
    /// Bytes from its start that hold signals and must be zero before the first round.
    pub signal_bytes: u64,
    /// Start of the rows with inline flags. They must be [`SENTINEL`](crate::SENTINEL) before the first
    /// round.
    pub inline_start: u64,
    /// Bytes of the rows with inline flags.
    pub inline_bytes: u64,
    dispatch_row_stride: u64,
    inline_dispatch_row_stride: u64,
    combine_row_stride: u64,
    counts_stride: u64,
    presence_stride: u64,
    max_tokens: u64,
    max_cut_tokens: u64,
    max_items: u64,
    combine_slots: u64,
}

/// Words of 8 bytes that so many take behind an empty one, so that they do not begin at a multiple of 16
/// bytes: NVSHMEM copies to peers whose memory it has mapped in vectors of 4-byte words where both ends allow
/// it, and else in words of 8 bytes, which are never torn.
const fn words_from_odd(words: u64) -> u64 {
    (1 + words).next_multiple_of(2)
}

/// Bytes of the staged words for a rank.
const fn notice_bytes(counts_stride: u64, presence_stride: u64) -> u64 {
    8 * (words_from_odd(counts_stride) + words_from_odd(presence_stride))
}

/// Hands out regions one after another.
struct Cursor(u64);

impl Cursor {
    const fn take(&mut self, count: u64, each_bytes: u64) -> u64 {
        let start = self.0;
        self.0 = (start + count * each_bytes).next_multiple_of(ALIGN);
        start
    }
}

impl Shape {
    /// Bytes from one combine row to the next.
    const fn combine_row_stride(&self, combine_weights: bool) -> u64 {
        let bytes = match combine_weights {
            true => self.weighted_combine_row_bytes(),
            false => self.combine_row_bytes(),
        };
        (bytes as u64).next_multiple_of(ALIGN)
    }

    /// Rows that are staged in dispatch, and in combine.
    const fn staged_rows(&self) -> (u64, u64) {
        let (ranks, max_tokens) = (self.ranks as u64, self.max_tokens_per_rank as u64);
        match (self.spans_nodes(), self.mode()) {
            (false, _) => (0, 0),
            (true, CombineMode::Reduced) => (max_tokens, ranks * max_tokens),
            (true, CombineMode::Exact) => (max_tokens, self.max_rows()),
        }
    }
}

impl Window {
    /// The window of a shape, with combine rows without weights.
    pub const fn of(shape: &Shape) -> Self {
        Self::with(shape, false)
    }

    /// The window of a shape. `combine_weights`: whether combine rows end with a weight for each top-k slot.
    /// The only place that adds region sizes.
    pub const fn with(shape: &Shape, combine_weights: bool) -> Self {
        let ranks = shape.ranks as u64;
        let max_tokens = shape.max_tokens_per_rank as u64;
        let max_items = shape.max_items();
        let slots = shape.combine_slots() as u64;
        let counts_stride = shape.local_experts() as u64 + 1;
        let presence_stride = shape.presence_words() as u64;
        let dispatch_row_stride = (shape.dispatch_row_bytes() as u64).next_multiple_of(ALIGN);
        let inline_dispatch_row_stride =
            (shape.inline_dispatch_row_bytes() as u64).next_multiple_of(ALIGN);
        let combine_row_stride = shape.combine_row_stride(combine_weights);
        let (staged_dispatch, staged_combine) = shape.staged_rows();

        let max_cut_tokens = shape.max_cut_tokens() as u64;
        let inline_dispatch_tokens = match shape.format().never_encodes_sentinel() {
            true => max_cut_tokens,
            false => 0,
        };

        let mut cursor = Cursor(0);
        let counts = cursor.take(ranks * counts_stride, 8);
        let presence = cursor.take(ranks * presence_stride, 8);
        let expert_bases = cursor.take(2 * shape.local_experts() as u64, 8);
        let source_bases = cursor.take(shape.experts as u64, 8);
        let dispatch_flags = cursor.take(ranks * max_items, 8);
        let credit = cursor.take(ranks, 8);
        let culprit = cursor.take(ranks, 8);
        let combine_flags = cursor.take(max_items * slots, 8);
        let signal_bytes = cursor.0;
        let dispatch_rows = cursor.take(ranks * max_tokens, dispatch_row_stride);
        let combine_rows = cursor.take(max_tokens * slots, combine_row_stride);
        let inline_dispatch_rows =
            cursor.take(ranks * inline_dispatch_tokens, inline_dispatch_row_stride);
        let inline_combine_rows =
            cursor.take(shape.max_inline_tokens() as u64 * slots, combine_row_stride);
        let inline_bytes = cursor.0 - inline_dispatch_rows;
        let dispatch_staging = cursor.take(staged_dispatch, dispatch_row_stride);
        let combine_staging = cursor.take(staged_combine, combine_row_stride);
        if shape.spans_nodes() {
            // Found from the end, as more fields would move the arguments of groups without other nodes.
            cursor.take(ranks, notice_bytes(counts_stride, presence_stride));
            cursor.take(1, ALIGN);
        }
        Self {
            counts,
            presence,
            expert_bases,
            source_bases,
            dispatch_flags,
            credit,
            culprit,
            combine_flags,
            dispatch_rows,
            combine_rows,
            inline_dispatch_rows,
            inline_combine_rows,
            dispatch_staging,
            combine_staging,
            bytes: cursor.0,
            signal_bytes,
            inline_start: inline_dispatch_rows,
            inline_bytes,
            dispatch_row_stride,
            inline_dispatch_row_stride,
            combine_row_stride,
            counts_stride,
            presence_stride,
            max_tokens,
            max_cut_tokens,
            max_items,
            combine_slots: slots,
        }
    }

    /// Whether rows are cut into parts even with the most tokens of the plan.
    pub const fn cuts_all(&self) -> bool {
        self.max_cut_tokens == self.max_tokens
    }

    /// Assignments that `source` sends to `local_expert` this round.
    pub const fn count(&self, source: Rank, local_expert: u32) -> Signal {
        Signal(self.counts + 8 * (source.0 as u64 * self.counts_stride + local_expert as u64))
    }

    /// Tokens that `source` has this round.
    pub const fn token_count(&self, source: Rank) -> Signal {
        self.count(source, self.counts_stride as u32 - 1)
    }

    /// Bits of tokens `32 * word ..` of `source`, set for those that come to this rank.
    pub const fn presence(&self, source: Rank, word: u32) -> Signal {
        Signal(self.presence + 8 * (source.0 as u64 * self.presence_stride + word as u64))
    }

    /// Output row of the first of `source`'s assignments for `local_expert`.
    pub const fn source_base(&self, source: Rank, local_expert: u32) -> Signal {
        let local_experts = self.counts_stride - 1;
        Signal(self.source_bases + 8 * (source.0 as u64 * local_experts + local_expert as u64))
    }

    /// First output row of `local_expert`.
    pub const fn expert_base(&self, local_expert: u32) -> Signal {
        Signal(self.expert_bases + 16 * local_expert as u64)
    }

    /// First block of the tiled scales of `local_expert`: next to [`expert_base`](Self::expert_base).
    pub const fn expert_block_base(&self, local_expert: u32) -> Signal {
        Signal(self.expert_base(local_expert).0 + 8)
    }

    /// Flag of a part of a dispatch row of `source`. `item` is `token * parts + part`. The token of an item
    /// may differ from round to round, because a flag of a later round is larger.
    pub const fn dispatch_flag(&self, source: Rank, item: u32) -> Signal {
        Signal(self.dispatch_flags + 8 * (source.0 as u64 * self.max_items + item as u64))
    }

    /// Credit of `peer`: it has read the dispatch rows that the owner sent it.
    pub const fn credit(&self, peer: Rank) -> Signal {
        Signal(self.credit + 8 * peer.0 as u64)
    }

    /// Culprit that `peer` names if it has aborted.
    pub const fn culprit(&self, peer: Rank) -> Signal {
        Signal(self.culprit + 8 * peer.0 as u64)
    }

    /// Flag of a part of the combine row in `slot` of one of the owner's tokens. `item` is
    /// `token * parts + part`.
    pub const fn combine_flag(&self, item: u32, slot: u32) -> Signal {
        Signal(self.combine_flags + 8 * (item as u64 * self.combine_slots + slot as u64))
    }

    /// The last of [`Shape::combine_slots`].
    #[inline(always)]
    pub const fn last_combine_slot(&self) -> u32 {
        self.combine_slots as u32 - 1
    }

    /// Bytes from one dispatch row to the next: the row stride of a [view](crate::ReceiveLayout::View).
    pub const fn dispatch_row_stride(&self) -> u64 {
        self.dispatch_row_stride
    }

    /// The dispatch row of `source`'s `token`.
    pub const fn dispatch_row(&self, source: Rank, token: u32) -> ByteOffset {
        let row = source.0 as u64 * self.max_tokens + token as u64;
        ByteOffset(self.dispatch_rows + row * self.dispatch_row_stride)
    }

    /// The row with inline flags of `source`'s `token`; see [`dispatch_row`](Self::dispatch_row).
    pub const fn inline_dispatch_row(&self, source: Rank, token: u32) -> ByteOffset {
        let row = source.0 as u64 * self.max_cut_tokens + token as u64;
        ByteOffset(self.inline_dispatch_rows + row * self.inline_dispatch_row_stride)
    }

    /// The weight for top-k slot `k` in a combine row that has weights.
    #[inline(always)]
    pub const fn combine_weight(shape: &Shape, row: ByteOffset, k: u32) -> ByteOffset {
        row.plus(shape.combine_row_bytes() + 4 * k)
    }

    /// The combine row in `slot` of the owner's `token`.
    pub const fn combine_row(&self, token: u32, slot: u32) -> ByteOffset {
        let row = token as u64 * self.combine_slots + slot as u64;
        ByteOffset(self.combine_rows + row * self.combine_row_stride)
    }

    /// The row with inline flags in `slot` of the owner's `token`; see [`combine_row`](Self::combine_row).
    pub const fn inline_combine_row(&self, token: u32, slot: u32) -> ByteOffset {
        let row = token as u64 * self.combine_slots + slot as u64;
        ByteOffset(self.inline_combine_rows + row * self.combine_row_stride)
    }

    /// Row in which the owner's `token` is assembled for unmapped ranks.
    pub const fn dispatch_staging(&self, token: u32) -> ByteOffset {
        ByteOffset(self.dispatch_staging + token as u64 * self.dispatch_row_stride)
    }

    /// Row in which a sum for `token` of the unmapped rank `source` is assembled.
    pub const fn reduced_staging(&self, source: Rank, token: u32) -> ByteOffset {
        let row = source.0 as u64 * self.max_tokens + token as u64;
        ByteOffset(self.combine_staging + row * self.combine_row_stride)
    }

    /// Start of the words for the unmapped `rank`.
    const fn staged_notice(&self, rank: Rank) -> u64 {
        let bytes = notice_bytes(self.counts_stride, self.presence_stride);
        self.bytes - ALIGN - (rank.0 as u64 + 1) * bytes
    }

    /// Assignments for a local expert of the unmapped `rank`; after its last expert, the owner's tokens.
    pub const fn staged_count(&self, rank: Rank, local_expert: u32) -> ByteOffset {
        ByteOffset(self.staged_notice(rank) + 8 * (1 + local_expert as u64))
    }

    /// Presence of the owner's tokens `32 * word ..` for the unmapped `rank`.
    pub const fn staged_presence(&self, rank: Rank, word: u32) -> ByteOffset {
        let before = words_from_odd(self.counts_stride) + 1;
        ByteOffset(self.staged_notice(rank) + 8 * (before + word as u64))
    }

    /// Bytes of the counts of a source.
    pub const fn counts_bytes(&self) -> u32 {
        8 * self.counts_stride as u32
    }

    /// The word from which puts carry the epoch of a round's half.
    pub const fn staged_epoch(&self, half: StagedEpoch) -> ByteOffset {
        ByteOffset(self.bytes - ALIGN + 8 * half as u64)
    }

    /// Row in which output row `row` is staged for an unmapped rank in exact mode.
    pub const fn exact_staging(&self, row: u32) -> ByteOffset {
        ByteOffset(self.combine_staging + row as u64 * self.combine_row_stride)
    }
}
