//! The receive window: the memory of a rank that its peers write.

use bytemuck::{Pod, Zeroable};

use crate::{CombineMode, Rank, Shape};

/// Regions and rows start at multiples of this, in bytes: an L2 cache line.
const ALIGN: u64 = 128;

/// A place in a window, in bytes from its start. Only [`Window`] makes one.
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

    /// The place `bytes` further on.
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
}

/// What every word of a bare row holds that has not come: in BF16 two NaNs that rounding does not make
/// (it makes `0x7fff` of every NaN: PTX ISA, "cvt"), and e4m3 likewise (`0x7f`).
pub const ABSENT: u32 = u32::MAX;

/// What travels for `word` in a row of dispatch, bare or not: never [`ABSENT`], but one less.
///
/// Two NaNs of BF16 stay NaNs, and so does a weight; [`NOT_ROUTED`](crate::NOT_ROUTED) stays an expert
/// that there is not. Of scales only four e8m0 NaNs make such a word, and [`received`] finds them again.
#[inline(always)]
pub const fn sent(word: u32) -> u32 {
    if word < ABSENT { word } else { ABSENT - 1 }
}

/// The word of scales that was [`sent`]. None is one less than [`ABSENT`]: f32 scales are positive, e4m3 is
/// never made `0xff`, and e8m0 never 254.
#[inline(always)]
pub const fn received(word: u32) -> u32 {
    if word == ABSENT - 1 { ABSENT } else { word }
}

/// Where everything is in a receive window. Equal on every rank of a group.
///
/// A row's flag says that it is whole. A **bare** row has none: each of its words holds [`ABSENT`] until it
/// has come, and its reader puts that back.
///
/// | region | word or row | index | written by |
/// |---|---|---|---|
/// | counts | [`Tagged`](crate::Tagged) entries for an expert; at index `local_experts` the source's tokens | `[source, local expert]` | every source, every round |
/// | presence | [`Tagged`](crate::Tagged) bits of 32 tokens: which come here | `[source, token / 32]` | every source, as far as its tokens go |
/// | begins | [`Tagged`](crate::Tagged) first row of an expert, and first block of its tiled scales | `[local expert, 2]` | the owner, every round, where scales are tiled |
/// | starts | [`Tagged`](crate::Tagged) first row of a source's entries for an expert | `[source, local expert]` | the owner, every round |
/// | dispatch flags | epoch: the part is complete | `[source, token × part]` | the source |
/// | consumed | epoch: the peer has read its dispatch rows | `[peer]` | every peer, every round |
/// | gave up | the rank at fault, all ones in the upper half: the peer has given up because of it | `[peer]` | every peer, once |
/// | combine flags | epoch: the part is complete | `[token × part, slot]` | the experts' rank |
/// | dispatch rows | payload and [`Header`](crate::Header) | `[source, token]` | the source |
/// | combine rows | BF16 payload | `[token, slot]` | the experts' rank |
/// | bare dispatch rows | payload, scales, and a header for each part | `[source, token]`, where rows are moved in parts | the source, and the owner |
/// | bare combine rows | likewise, where tokens are few | `[token, slot]` | the experts' rank, and the owner |
/// | dispatch staging | dispatch row, for puts to unmapped ranks | `[token]` | the owner |
/// | combine staging | combine row, likewise | `[source, token]` or output row | the owner |
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Window {
    counts: u64,
    presence: u64,
    begins: u64,
    starts: u64,
    dispatch_flags: u64,
    consumed: u64,
    gave_up: u64,
    combine_flags: u64,
    dispatch_rows: u64,
    combine_rows: u64,
    bare_dispatch_rows: u64,
    bare_combine_rows: u64,
    dispatch_staging: u64,
    combine_staging: u64,
    /// Bytes of the whole window.
    pub bytes: u64,
    /// Bytes at its start that hold signals and must be zero before the first round.
    pub signal_bytes: u64,
    /// Where the bare rows begin. They must be [`ABSENT`] before the first round.
    pub bare_start: u64,
    /// Bytes of the bare rows.
    pub bare_bytes: u64,
    dispatch_row_stride: u64,
    bare_dispatch_row_stride: u64,
    combine_row_stride: u64,
    counts_stride: u64,
    presence_stride: u64,
    max_tokens: u64,
    max_cut_tokens: u64,
    max_units: u64,
    combine_slots: u64,
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

impl Window {
    /// The window of a shape. The only place that adds region sizes.
    pub const fn of(shape: &Shape) -> Self {
        let ranks = shape.ranks as u64;
        let max_tokens = shape.max_tokens_per_rank as u64;
        let max_units = shape.max_units();
        let slots = shape.combine_slots() as u64;
        let counts_stride = shape.local_experts() as u64 + 1;
        let presence_stride = shape.presence_words() as u64;
        let dispatch_row_stride = (shape.dispatch_row_bytes() as u64).next_multiple_of(ALIGN);
        let bare_dispatch_row_stride =
            (shape.bare_dispatch_row_bytes() as u64).next_multiple_of(ALIGN);
        let combine_row_stride = (shape.combine_row_bytes() as u64).next_multiple_of(ALIGN);
        let (staged_dispatch, staged_combine) = match (shape.spans_nodes(), shape.mode()) {
            (false, _) => (0, 0),
            (true, CombineMode::Reduced) => (max_tokens, ranks * max_tokens),
            (true, CombineMode::Exact) => (max_tokens, shape.max_rows()),
        };

        let max_cut_tokens = shape.max_cut_tokens() as u64;
        let bare_dispatch_tokens = match shape.format().is_never_absent() {
            true => max_cut_tokens,
            false => 0,
        };

        let mut cursor = Cursor(0);
        let counts = cursor.take(ranks * counts_stride, 8);
        let presence = cursor.take(ranks * presence_stride, 8);
        let begins = cursor.take(2 * shape.local_experts() as u64, 8);
        let starts = cursor.take(shape.experts as u64, 8);
        let dispatch_flags = cursor.take(ranks * max_units, 8);
        let consumed = cursor.take(ranks, 8);
        let gave_up = cursor.take(ranks, 8);
        let combine_flags = cursor.take(max_units * slots, 8);
        let signal_bytes = cursor.0;
        let dispatch_rows = cursor.take(ranks * max_tokens, dispatch_row_stride);
        let combine_rows = cursor.take(max_tokens * slots, combine_row_stride);
        let bare_dispatch_rows =
            cursor.take(ranks * bare_dispatch_tokens, bare_dispatch_row_stride);
        let bare_combine_rows =
            cursor.take(shape.max_bare_tokens() as u64 * slots, combine_row_stride);
        let bare_bytes = cursor.0 - bare_dispatch_rows;
        let dispatch_staging = cursor.take(staged_dispatch, dispatch_row_stride);
        let combine_staging = cursor.take(staged_combine, combine_row_stride);
        Self {
            counts,
            presence,
            begins,
            starts,
            dispatch_flags,
            consumed,
            gave_up,
            combine_flags,
            dispatch_rows,
            combine_rows,
            bare_dispatch_rows,
            bare_combine_rows,
            dispatch_staging,
            combine_staging,
            bytes: cursor.0,
            signal_bytes,
            bare_start: bare_dispatch_rows,
            bare_bytes,
            dispatch_row_stride,
            bare_dispatch_row_stride,
            combine_row_stride,
            counts_stride,
            presence_stride,
            max_tokens,
            max_cut_tokens,
            max_units,
            combine_slots: slots,
        }
    }

    /// Whether all rows are moved in parts, however many there are.
    pub const fn cuts_all(&self) -> bool {
        self.max_cut_tokens == self.max_tokens
    }

    /// Entries that `source` sends to `local_expert` this round.
    pub const fn count(&self, source: Rank, local_expert: u32) -> Signal {
        Signal(self.counts + 8 * (source.0 as u64 * self.counts_stride + local_expert as u64))
    }

    /// Tokens that `source` has this round.
    pub const fn token_count(&self, source: Rank) -> Signal {
        self.count(source, self.counts_stride as u32 - 1)
    }

    /// Which of tokens `32 * word ..` of `source` come here.
    pub const fn presence(&self, source: Rank, word: u32) -> Signal {
        Signal(self.presence + 8 * (source.0 as u64 * self.presence_stride + word as u64))
    }

    /// The output row of the first of `source`'s entries for `local_expert`.
    pub const fn start(&self, source: Rank, local_expert: u32) -> Signal {
        let local_experts = self.counts_stride - 1;
        Signal(self.starts + 8 * (source.0 as u64 * local_experts + local_expert as u64))
    }

    /// The first output row of `local_expert`.
    pub const fn first_row(&self, local_expert: u32) -> Signal {
        Signal(self.begins + 16 * local_expert as u64)
    }

    /// The first block of the tiled scales of `local_expert`: beside [`first_row`](Self::first_row).
    pub const fn first_block(&self, local_expert: u32) -> Signal {
        Signal(self.first_row(local_expert).0 + 8)
    }

    /// A part of a dispatch row of `source` is complete. `unit` is `token * parts + part`; which
    /// that is may differ from round to round, because a flag of a later round is larger.
    pub const fn dispatch_flag(&self, source: Rank, unit: u32) -> Signal {
        Signal(self.dispatch_flags + 8 * (source.0 as u64 * self.max_units + unit as u64))
    }

    /// `peer` has read the dispatch rows that the owner sent it.
    pub const fn consumed(&self, peer: Rank) -> Signal {
        Signal(self.consumed + 8 * peer.0 as u64)
    }

    /// `peer` has given up: because of which rank.
    pub const fn gave_up(&self, peer: Rank) -> Signal {
        Signal(self.gave_up + 8 * peer.0 as u64)
    }

    /// A part of the combine row in `slot` of a token of the owner's is complete. `unit` is
    /// `token * parts + part`.
    pub const fn combine_flag(&self, unit: u32, slot: u32) -> Signal {
        Signal(self.combine_flags + 8 * (unit as u64 * self.combine_slots + slot as u64))
    }

    /// The last of [`Shape::combine_slots`].
    #[inline(always)]
    pub const fn last_combine_slot(&self) -> u32 {
        self.combine_slots as u32 - 1
    }

    /// The dispatch row of `source`'s `token`.
    pub const fn dispatch_row(&self, source: Rank, token: u32) -> ByteOffset {
        let row = source.0 as u64 * self.max_tokens + token as u64;
        ByteOffset(self.dispatch_rows + row * self.dispatch_row_stride)
    }

    /// As [`dispatch_row`](Self::dispatch_row), the bare row.
    pub const fn bare_dispatch_row(&self, source: Rank, token: u32) -> ByteOffset {
        let row = source.0 as u64 * self.max_cut_tokens + token as u64;
        ByteOffset(self.bare_dispatch_rows + row * self.bare_dispatch_row_stride)
    }

    /// The combine row in `slot` of the owner's `token`.
    pub const fn combine_row(&self, token: u32, slot: u32) -> ByteOffset {
        let row = token as u64 * self.combine_slots + slot as u64;
        ByteOffset(self.combine_rows + row * self.combine_row_stride)
    }

    /// As [`combine_row`](Self::combine_row), the bare row.
    pub const fn bare_combine_row(&self, token: u32, slot: u32) -> ByteOffset {
        let row = token as u64 * self.combine_slots + slot as u64;
        ByteOffset(self.bare_combine_rows + row * self.combine_row_stride)
    }

    /// Where the owner's `token` is assembled for unmapped ranks.
    pub const fn dispatch_staging(&self, token: u32) -> ByteOffset {
        ByteOffset(self.dispatch_staging + token as u64 * self.dispatch_row_stride)
    }

    /// Where a reduced row for `token` of the unmapped rank `source` is assembled.
    pub const fn reduced_staging(&self, source: Rank, token: u32) -> ByteOffset {
        let row = source.0 as u64 * self.max_tokens + token as u64;
        ByteOffset(self.combine_staging + row * self.combine_row_stride)
    }

    /// Where output row `row` is staged for an unmapped rank in exact mode.
    pub const fn exact_staging(&self, row: u32) -> ByteOffset {
        ByteOffset(self.combine_staging + row as u64 * self.combine_row_stride)
    }
}
