//! The shape of an expert-parallel group: numbers of ranks, experts and tokens, and the width of a token.

use bytemuck::{Pod, Zeroable};

use crate::formats::format::{ScaleLayout, Sizes, TokenFormat};
use crate::formats::scale_placement;
use crate::plan::header::{AssignmentWords, Header};
use crate::plan::limits::{MAX_PARTS, PART_ITEMS};

/// Bytes that a warp moves with one instruction: parts of a row are multiples of it.
const WARP_VECTOR_BYTES: u32 = 512;
/// Bytes that a row's own scale takes, so that the header after it is aligned.
pub const ROW_SCALE_BYTES: u32 = 16;

/// Most parts that a row of `bytes` bytes is cut into.
const fn max_parts(bytes: u32) -> u32 {
    let tiles = bytes.div_ceil(WARP_VECTOR_BYTES).next_power_of_two();
    if tiles < MAX_PARTS { tiles } else { MAX_PARTS }
}

/// Parts of each row, at most `most`, so that `rows` rows keep all warps busy: a power of two, as the
/// division by it delays the first send.
#[inline(always)]
pub(crate) const fn cut(most: u32, rows: u32) -> u32 {
    if rows == 0 || rows > PART_ITEMS {
        return 1;
    }
    let wanted = PART_ITEMS >> (u32::BITS - (rows - 1).leading_zeros());
    if wanted > most { most } else { wanted }
}

/// A rank: one GPU of the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rank(pub u32);

/// Writes the rank's number.
impl core::fmt::Display for Rank {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.0.fmt(f)
    }
}

/// Ways in which expert outputs return to the token's rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum CombineMode {
    /// One row per (token, rank): the experts' rank applies the router weights and sums.
    /// Products and sums are f32, by top-k slot. The sum travels as BF16, and the token's rank adds the sums
    /// by rank, in f32, and rounds once. In exact mode it adds all weighted rows by top-k slot, in f32, and
    /// rounds once.
    #[default]
    Reduced,
    /// One row per (token, top-k slot): the token's rank applies the weights and sums, or keeps the rows
    /// apart.
    Exact,
}

/// Sizes that every rank of a group must agree on. Plain data; `Plan` checks it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Pod, Zeroable)]
pub struct Shape {
    /// Ranks in the group, 1 to [`MAX_RANKS`](crate::MAX_RANKS).
    pub ranks: u32,
    /// Ranks of one node: they write each other's windows directly. Divides `ranks`.
    pub p2p_world_size: u32,
    /// Experts of the whole group, divisible by `ranks`.
    pub experts: u32,
    /// Experts that a token names, 1 to [`MAX_TOP_K`](crate::MAX_TOP_K).
    pub top_k: u32,
    /// Elements of a token, a multiple of 8 and of the format's `elements_of_word`.
    pub hidden: u32,
    /// Most tokens that one rank brings to a dispatch.
    pub max_tokens_per_rank: u32,
    /// [`CombineMode`], as a number: 0 reduced, 1 exact.
    pub combine_mode: u32,
    /// [`TokenFormat::number`].
    pub token_format: u32,
}

impl Shape {
    /// Experts of one rank.
    pub const fn local_experts(&self) -> u32 {
        self.experts / self.ranks
    }

    /// The rank that holds `expert`.
    pub const fn rank_of(&self, expert: u32) -> Rank {
        Rank(expert / self.local_experts())
    }

    /// Token format of dispatch.
    #[inline(always)]
    pub const fn format(&self) -> TokenFormat {
        TokenFormat::of_number(self.token_format)
    }

    /// Sizes of the format's rows.
    #[inline(always)]
    pub const fn sizes(&self) -> Sizes {
        self.format().sizes()
    }

    /// Bytes of a token in dispatch's output and on the wire, without scales.
    #[inline(always)]
    pub const fn payload_bytes(&self) -> u32 {
        self.sizes().payload_bytes(self.hidden)
    }

    /// 32-bit words that a token's scales fill.
    #[inline(always)]
    pub const fn scale_words(&self) -> u32 {
        self.sizes().scale_words(self.hidden)
    }

    /// Most rows of row-major scales whose words can be numbered in 32 bits, as kernels do; unlimited in
    /// formats without scales.
    pub const fn most_scaled_rows(&self) -> u64 {
        match self.scale_words() as u64 {
            0 => u64::MAX,
            words => (1 << u32::BITS) / words,
        }
    }

    /// Most blocks of tiled scales whose words can be numbered in 32 bits, as kernels do.
    pub const fn most_scale_blocks(&self) -> u64 {
        match self.scale_words() as u64 {
            0 => u64::MAX,
            words => (1 << u32::BITS) / (words * scale_placement::BLOCK_ROWS as u64),
        }
    }

    /// Whether scales go into tiles.
    #[inline(always)]
    pub const fn has_tiled_scales(&self) -> bool {
        matches!(self.format().scale_layout(), Some(ScaleLayout::Tiled))
    }

    /// Alignment of each expert's rows in dispatch's output, in rows.
    #[inline(always)]
    pub const fn row_alignment(&self) -> u32 {
        self.sizes().row_alignment
    }

    /// Bytes from the start of a dispatch row to the row's own scale, if it has one.
    #[inline(always)]
    pub const fn row_scale_start(&self) -> u32 {
        self.payload_bytes() + (4 * self.scale_words()).next_multiple_of(16)
    }

    /// Bytes from the start of a dispatch row to its header: payload, scales, the row's own scale.
    #[inline(always)]
    pub const fn header_start(&self) -> u32 {
        let row_scale = match self.sizes().has_row_scale {
            true => ROW_SCALE_BYTES,
            false => 0,
        };
        self.row_scale_start() + row_scale
    }

    /// Bytes of a dispatch row on the wire: payload, scales, the row's own scale, header.
    pub const fn dispatch_row_bytes(&self) -> u32 {
        self.header_start() + Header::bytes(self.top_k)
    }

    /// Encoding of the assignments in headers.
    #[inline(always)]
    pub const fn assignment_words(&self) -> AssignmentWords {
        AssignmentWords::of(self.experts)
    }

    /// Bytes from the start of a dispatch row with inline flags to the header of a part. Each part has its
    /// own, so that one warp alone reads it.
    #[inline(always)]
    pub const fn inline_header_start(&self, part: u32) -> u32 {
        Header::of_part(self.header_start(), self.top_k, part)
    }

    /// Bytes of a dispatch row with inline flags: payload, scales, a header for each part.
    pub const fn inline_dispatch_row_bytes(&self) -> u32 {
        self.inline_header_start(self.parts(1))
    }

    /// Bytes of a combine row on the wire: the BF16 payload alone.
    pub const fn combine_row_bytes(&self) -> u32 {
        self.hidden * 2
    }

    /// Bytes of a combine row with a weight for each top-k slot after its payload, as f32 bits.
    pub const fn weighted_combine_row_bytes(&self) -> u32 {
        self.combine_row_bytes() + (4 * self.top_k).next_multiple_of(16)
    }

    /// Way in which combine returns rows.
    pub const fn mode(&self) -> CombineMode {
        if self.combine_mode == 0 {
            CombineMode::Reduced
        } else {
            CombineMode::Exact
        }
    }

    /// Combine rows that one token can receive: one per rank of its experts (reduced), or one per top-k slot
    /// (exact).
    pub const fn combine_slots(&self) -> u32 {
        match self.mode() {
            CombineMode::Reduced if self.ranks < self.top_k => self.ranks,
            _ => self.top_k,
        }
    }

    /// Most rows that one rank can receive in a dispatch. A token may list an expert twice, so the bound is
    /// top-k rows a token, plus the padding of every expert.
    pub const fn max_rows(&self) -> u64 {
        self.most_rows(self.max_tokens_per_rank)
    }

    /// Most rows that one rank can receive if no rank brings more than `tokens` tokens.
    pub const fn most_rows(&self, tokens: u32) -> u64 {
        let padding = self.local_experts() as u64 * (self.row_alignment() as u64 - 1);
        self.ranks as u64 * tokens as u64 * self.top_k as u64 + padding
    }

    /// Most rows that one rank can receive if no token lists an expert twice: a token brings a rank at most
    /// one row for each expert of that rank.
    pub const fn max_rows_distinct(&self) -> u64 {
        let each = match self.top_k < self.local_experts() {
            true => self.top_k,
            false => self.local_experts(),
        };
        Self {
            top_k: each,
            ..*self
        }
        .max_rows()
    }

    /// Parts in which a row of a source with `tokens` tokens is moved, each by a warp of its own: if all rows
    /// together are fewer than the warps, rows are cut so that all warps have work. Both ends know the
    /// source's tokens, so they agree. Rows for other nodes stay whole.
    pub const fn parts(&self, tokens: u32) -> u32 {
        cut(self.max_parts(), tokens.saturating_mul(self.ranks))
    }

    /// Upper bound of [`parts`](Self::parts).
    pub const fn max_parts(&self) -> u32 {
        match self.spans_nodes() {
            true => 1,
            false => max_parts(self.payload_bytes()),
        }
    }

    /// Parts in which the sum of a token's rows with inline flags is computed, for a source with `tokens`
    /// tokens. Such rows may be read in other parts than they were written in.
    pub const fn reduce_parts(&self, tokens: u32) -> u32 {
        cut(max_parts(self.combine_row_bytes()), tokens)
    }

    /// Most tokens of a source whose rows are moved in parts.
    pub const fn max_cut_tokens(&self) -> u32 {
        let mut tokens = PART_ITEMS / (2 * self.ranks);
        if tokens > self.max_tokens_per_rank {
            tokens = self.max_tokens_per_rank;
        }
        if self.parts(tokens) > 1 { tokens } else { 0 }
    }

    /// Most tokens of a source with which combine's rows have inline flags (see [`Window`](crate::Window)):
    /// there is about a warp for each row.
    pub const fn max_inline_tokens(&self) -> u32 {
        let tokens = PART_ITEMS / self.ranks;
        match self.mode() {
            CombineMode::Reduced if !self.spans_nodes() => {
                if tokens < self.max_tokens_per_rank {
                    tokens
                } else {
                    self.max_tokens_per_rank
                }
            }
            _ => 0,
        }
    }

    /// Whether combine's rows have inline flags if no source has more than `tokens` tokens.
    pub const fn combines_inline(&self, tokens: u32) -> bool {
        let most = self.max_inline_tokens();
        // The most first: a kernel for one shape has no code for a case that never occurs.
        most == self.max_tokens_per_rank || tokens <= most
    }

    /// Bytes `start..end` of part `part` of `parts`, a power of two, of a row of `bytes` bytes.
    #[inline(always)]
    pub const fn part(bytes: u32, part: u32, parts: u32) -> (u32, u32) {
        let each = (bytes + parts - 1) >> parts.trailing_zeros();
        let each = each.next_multiple_of(WARP_VECTOR_BYTES);
        let start = part * each;
        let end = start + each;
        (
            if start < bytes { start } else { bytes },
            if end < bytes { end } else { bytes },
        )
    }

    /// Most (token, part) pairs that a source can have, which is also its number of flags.
    pub const fn max_items(&self) -> u64 {
        let cut = (PART_ITEMS / self.ranks) as u64;
        let whole = self.max_tokens_per_rank as u64;
        if cut > whole { cut } else { whole }
    }

    /// Words of 32 tokens that mark the tokens that travel from one rank to another.
    pub const fn presence_words(&self) -> u32 {
        self.max_tokens_per_rank.div_ceil(32)
    }

    /// Whether `a` and `b` are on one node and so map each other's windows.
    pub const fn same_node(&self, a: Rank, b: Rank) -> bool {
        a.0 / self.p2p_world_size == b.0 / self.p2p_world_size
    }

    /// Whether any two ranks are on different nodes.
    pub const fn spans_nodes(&self) -> bool {
        self.p2p_world_size < self.ranks
    }
}
