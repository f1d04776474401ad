//! Numbers that fix bytes or a launch and that host and GPU share. Numbers that only the protocol's decisions
//! use are in its `tactics/tuning.rs`.
//!
//! A number marked "measured" was chosen on that GPU; the mark names the entry of `gpu/protocol/TUNING.md`
//! with the times. Numbers that change the place of a row or a word, or how rows are cut, change the
//! [`LAYOUT_FINGERPRINT`](crate::LAYOUT_FINGERPRINT), too.

/// Most ranks that a window is laid out for: one bit each in a 64-bit rank mask.
pub const MAX_RANKS: u32 = 64;
/// Most experts a token can name: one lane of a warp each.
pub const MAX_TOP_K: u32 = 32;
/// Most experts in a group.
pub const MAX_EXPERTS: u32 = 65_535;

/// Most parts of a row.
/// measured: T-030, H200
pub const MAX_PARTS: u32 = 16;
/// Parts of all rows of all sources together, if rows are cut: about the warps of a GPU.
/// measured: T-010, H200
pub const PART_ITEMS: u32 = 2048;

/// Assignments of a tile, which a warp numbers at a time.
/// measured: T-015, H200
pub const TILE_ASSIGNMENTS: u32 = 256;
/// Most assignments of a source in a small batch, which every block numbers by itself.
/// measured: T-022, H200
pub const SMALL_BATCH_ASSIGNMENTS: u32 = 2048;
/// Most bytes of [`BlockHistogram`](crate::BlockHistogram).
/// measured: T-006, H200
pub const HISTOGRAM_BYTES: u32 = 32 * 1024;
/// Most experts of a rank with `skip_a2a`: every block counts the assignments of each in its shared memory,
/// in as many bytes as the numbering of a small batch takes.
pub const MAX_COUNTED_EXPERTS: u32 = 2680;

/// Most blocks of a launch: many times the multiprocessors of any GPU.
pub const MAX_BLOCKS: u32 = 2048;
/// Threads of a block of dispatch and combine.
pub(crate) const BLOCK_THREADS: u32 = 512;
/// Most tokens of a rank for which blocks of half the size are enough.
/// measured: T-086, H200
pub const SMALL_BLOCK_TOKENS: u32 = 16;
/// Threads of a block of fused SiLU. Many warps hide the latency of loads better than a few with many
/// registers each. They are in one block, since each block makes a table.
/// measured: T-053, H200
pub(crate) const SILU_BLOCK_THREADS: u32 = 640;

/// Stages of a warp's `cp.async` pipeline in shared memory, through which it loads the rows that it sums. The
/// dispatch with `skip_a2a` loads its tokens through it, in stages of half the size. measured: T-073, H200
pub const PIPELINE_STAGES: u32 = 4;
/// Bytes of a warp's pipeline: 4 vectors of 16 bytes a lane in each stage.
pub const PIPELINE_BYTES: u32 = PIPELINE_STAGES * 4 * 16 * 32;
/// Rows that a warp sums at a time, so that their loads are in flight together.
/// measured: T-008, H200
pub(crate) const SUMMED_ROWS: u32 = 4;
