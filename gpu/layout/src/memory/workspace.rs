//! Device-private memory of a rank, in which its own kernels leave data for each other.

use bytemuck::{Pod, Zeroable};

use crate::plan::limits::{MAX_BLOCKS, TILE_ASSIGNMENTS};
use crate::plan::receive::ReceiveLayout;
use crate::plan::shape::{Rank, Shape};

/// A 64-bit word shared by the warps of one GPU: device scope, never read by other ranks. Zero at init.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Counter {
    /// The epoch of the last finished round. The kernels of a round work in the [next
    /// one](crate::Epoch::after).
    Finished,
    /// Tiles of assignments numbered in this round.
    TilesDone,
    /// Groups of 32 experts whose assignments were counted, over all rounds.
    ScansDone,
    /// Twice the epoch of the row offsets in the workspace, plus one if not all rows fit in the outputs.
    OffsetsReady,
    /// Parties that have come to a point of the running launch: blocks that leave `combine_wait` or
    /// `give_up`, and in dispatch, parts of the notifications for other nodes that are staged.
    Arrivals,
    /// Blocks that have read the results of dispatch, in the running combine kernel.
    Reads,
    /// Not zero after a wait timed out or a launch refused what it found: no kernel starts work any more.
    Aborted,
    /// Held while a lane writes the fault page.
    FaultLock,
    /// The last record of the fault page, as [`LastRecord`](crate::LastRecord).
    FaultRecord,
    /// The last epoch with a fault of the input: only one of a round is reported.
    InputFault,
    /// Not zero after the other ranks were told the culprit of this rank's abort.
    CulpritTold,
    /// Most tokens and parts of any source in this round, left by dispatch for combine: `Extent` as a word.
    Extent,
    /// Tickets that dispatch's warps have taken in this round. Combine, or giving up, resets it. With
    /// `skip_a2a` none are taken.
    DispatchTickets,
    /// Tickets that combine's warps have taken in this round. Dispatch resets it.
    CombineTickets,
    /// Deadline of the next dispatch's wait for credits: that of the launch that ended the round.
    CreditsDue,
    /// Tokens of this rank in this round, if their number is on the device.
    Tokens,
}

impl Counter {
    /// Number of counters.
    pub const COUNT: u64 = 16;
    /// Bytes from one to the next: a cache line each, so that polling one leaves the others alone.
    pub const STRIDE_BYTES: u64 = 128;

    /// Bytes from the start of the workspace.
    pub const fn bytes(self) -> u64 {
        self as u64 * Self::STRIDE_BYTES
    }
}

/// A table of 32-bit words in the workspace or among the user's tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Table {
    /// `[token, K]` expert ids, the user's; read only.
    TopkIds,
    /// `[token, K]` router weights as f32 bits, the user's; read only.
    TopkWeights,
    /// `[groups + 1]` first row of each local expert, the shared expert's group before them: the user's.
    RowOffsets,
    /// `[groups]`, the user's.
    ExpertIds,
    /// `[row, 2]` token and top-k slot, or `[row, 3]` with the source rank before them, the user's.
    SrcInfo,
    /// The rows' scales in the format's layout, the user's.
    Scales,
    /// `[groups]` first block of tiled scales, the user's.
    ScalesOffsets,
    /// `[row capacity]` BF16 bits, half a word each: the user's.
    RowScales,
    /// `[1]` f32 bits, the user's; read only.
    InputScale,
    /// Scales of tokens that the user has encoded: see [`EncodedInput`](crate::EncodedInput); read only.
    InputScales,
    /// `[1]` number of tokens, the user's; read only.
    TokensOnDevice,
    /// Counts for the host, in its memory: see [`HostCounts`](crate::HostCounts).
    HostCounts,
    /// `[1]` [`Counter::Tokens`], as an earlier launch of the round left it: not polled, so the warps of a
    /// multiprocessor read it once.
    CountedTokens,
    /// `[row capacity]` weight of each expert row, as f32 bits, the user's; read only.
    RowWeights,
    /// `[row capacity, K]` local expert ids, of one word or two, the user's.
    ReceivedIds,
    /// `[row capacity, K]` router weights as f32 bits, the user's.
    ReceivedWeights,
    /// `[ranks]` received rows of each source, the user's.
    SourceRows,
    /// `[local experts]` received assignments to each expert, the user's.
    ExpertRows,
    /// `[groups]` rows of each group without padding, the user's.
    GroupCounts,
    /// `[groups]` row after the last of each group without padding, the user's.
    GroupEnds,
    /// `[row capacity]` router weight of each row as f32 bits, the user's.
    WeightsOfRows,
    /// `[row capacity]` group of each row, the user's.
    GroupsOfRows,
    /// `[local expert, source]` rows of a source in an expert's block, two words each: their number, and
    /// where they begin. The user's.
    SourceRanges,
    /// `[row capacity, K]` weights that return, as f32 bits, the user's; read only.
    ReturnedWeights,
    /// `[token, K]` weights that have returned, as f32 bits, the user's.
    CombinedWeights,
    /// `[token, K]` index of each assignment among those of its tile for its expert.
    RanksInExpert,
    /// `[tile, expert]` assignments of earlier tiles for the expert; before the scan, those of the tile.
    TileCounts,
    /// `[token, K]` expert ids of this round's tokens, kept for combine.
    Routes,
    /// `[source, token, K]` output row of each assignment for this rank, with `OVERFLOWED` if it does not fit
    /// in the outputs, or `NOT_ROUTED`.
    RowMap,
    /// `[source, token / 32]` number of received rows before those of 32 tokens of a source, then the number
    /// of all rows, if rows stay as they came. After all other tables.
    RowBases,
}

/// Layout of a workspace, in bytes from its start.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Workspace {
    /// Start of [`Table::RanksInExpert`].
    pub ranks_in_expert: u64,
    /// Start of [`Table::TileCounts`].
    pub tile_counts: u64,
    /// Start of [`Table::Routes`]. If the caller keeps the ids, the distance to that memory, modulo 2^64.
    pub routes: u64,
    /// Start of [`Table::RowMap`].
    pub row_map: u64,
    /// Bytes of the workspace without [`Table::RowBases`], which begins there.
    pub bytes: u64,
}

impl Workspace {
    /// Start of the blocks' [`LastLaunch`](crate::LastLaunch) words: one u64 per block.
    const LAST_LAUNCHES: u64 = Counter::COUNT * Counter::STRIDE_BYTES;

    /// Bytes from the start of the workspace to the [`LastLaunch`](crate::LastLaunch) of a block: the same in
    /// every workspace.
    #[inline(always)]
    pub const fn last_launch(block: u32) -> u64 {
        debug_assert!(block < MAX_BLOCKS);
        Self::LAST_LAUNCHES + 8 * block as u64
    }

    /// The workspace of a shape.
    pub const fn of(shape: &Shape) -> Self {
        let assignments = shape.max_tokens_per_rank as u64 * shape.top_k as u64;
        let ranks_in_expert = next(Self::LAST_LAUNCHES, 2 * MAX_BLOCKS as u64);
        let tile_counts = next(ranks_in_expert, assignments);
        let tiles = assignments.div_ceil(TILE_ASSIGNMENTS as u64);
        let routes = next(tile_counts, tiles * shape.experts as u64);
        let row_map = next(routes, assignments);
        let bytes = next(row_map, shape.ranks as u64 * assignments);
        Self {
            ranks_in_expert,
            tile_counts,
            routes,
            row_map,
            bytes,
        }
    }

    /// Bytes of the whole workspace if rows are received in layout `receive`.
    pub const fn bytes_for(&self, shape: &Shape, receive: ReceiveLayout) -> u64 {
        match receive.keeps_rows() {
            true => next(self.bytes, shape.row_bases() + 1),
            false => self.bytes,
        }
    }
}

const fn next(start: u64, words: u64) -> u64 {
    (start + 4 * words).next_multiple_of(128)
}

/// Index of assignment `k` of a token in a `[token, K]` table.
#[inline(always)]
pub const fn assignment_index(top_k: u32, token: u32, k: u32) -> u64 {
    token as u64 * top_k as u64 + k as u64
}

/// Index of the first word of `tile` in [`Table::TileCounts`].
#[inline(always)]
pub const fn tile_counts_index(experts: u32, tile: u64) -> u64 {
    tile * experts as u64
}

impl Shape {
    /// Number of row bases in [`Table::RowBases`], and index of the number of all rows, which follows them.
    pub const fn row_bases(&self) -> u64 {
        self.ranks as u64 * self.presence_words() as u64
    }

    /// Index in [`Table::RowBases`] of the first row of tokens `32 * word ..` of `source`.
    #[inline(always)]
    pub const fn row_base_index(&self, source: Rank, word: u32) -> u64 {
        source.0 as u64 * self.presence_words() as u64 + word as u64
    }

    /// Row of a token of `source` in [views and strided rows](crate::ReceiveLayout).
    #[inline(always)]
    pub const fn strided_row(&self, source: Rank, token: u32) -> u32 {
        source.0 * self.max_tokens_per_rank + token
    }

    /// Index of assignment `k` of a token of `source` in [`Table::RowMap`].
    #[inline(always)]
    pub const fn row_map_index(&self, source: Rank, token: u32, k: u32) -> u64 {
        let row = source.0 as u64 * self.max_tokens_per_rank as u64 + token as u64;
        row * self.top_k as u64 + k as u64
    }
}
