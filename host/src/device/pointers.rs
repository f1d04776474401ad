//! Addresses of a rank's memory on its device.

use ferry_layout::{Counter, Rank};

/// Device addresses of the memory that a rank's kernels use, for debuggers and tools that copy device
/// memory. It must not be written; it changes while kernels of this rank or of a peer
/// run, and the addresses are valid until the rank is [closed](crate::Communicator::close) or
/// [dropped](crate::Communicator#dropped).
///
/// Sizes in terms of the plan's [`Shape`](crate::layout::Shape). A row's stride is its bytes, rounded up to a
/// multiple of 128.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DevicePointers {
    /// The rank whose memory it is.
    pub rank: Rank,
    /// Row 0 is dispatch, row 1 combine; the columns are send, receive, counts. The receive window of this
    /// rank has all of them.
    ///
    /// | | shape | each |
    /// |---|---|---|
    /// | `[0][0]` | `[max_tokens_per_rank]` | `dispatch_row_bytes` |
    /// | `[0][1]` | `[ranks, max_tokens_per_rank]`, by source | `dispatch_row_bytes` |
    /// | `[0][2]` | `[ranks, local_experts + 1]`, by source | u64: a count and its round |
    /// | `[1][0]`, reduced mode | `[ranks, max_tokens_per_rank]`, by target | `combine_row_bytes` |
    /// | `[1][0]`, exact mode | `[max_rows]` | `combine_row_bytes` |
    /// | `[1][1]` | `[max_tokens_per_rank, combine_slots]` | `combine_row_bytes` |
    /// | `[1][2]` | `[max_items, combine_slots]` | u64: the round of a part of a row |
    ///
    /// Dispatch's counts are assignments for each local expert, and the last one the source's tokens.
    /// Combine's counts are its flags.
    ///
    /// Send is 0 if no rank is on another node: rows then go straight into the peers' windows. Rows of
    /// small batches arrive in another part of the window, where each word is its own flag. With
    /// [`combine_weights`](crate::KeptRows::combine_weights) `combine_row_bytes` are
    /// `weighted_combine_row_bytes`.
    pub table: [[u64; 3]; 2],
    /// Counters that the kernels of this rank share: [`COUNTERS`](Self::COUNTERS) u64, one every
    /// [`COUNTER_STRIDE`](Self::COUNTER_STRIDE) bytes.
    pub counters: u64,
}

impl DevicePointers {
    /// Counters of a rank.
    pub const COUNTERS: u64 = Counter::COUNT;
    /// Bytes from one counter to the next.
    pub const COUNTER_STRIDE: u64 = Counter::STRIDE_BYTES;
}
