//! Meaning of Ferry's bytes: shapes, the receive window, kernel arguments, fault records.
//!
//! The only crate that adds offsets. The host and the kernels compile the same source, so they cannot
//! disagree. No unsafe code, no allocation, no dependency but `half`, `bytemuck` and, optionally, `serde`.
//! Modules from the top down: `launch`, beside each other `round` and `memory`, `plan`, and [`formats`].
#![no_std]
#![forbid(unsafe_code)]

pub mod formats;
mod launch;
mod memory;
mod plan;
mod round;

pub use formats::arithmetic::Arithmetic;
pub use formats::float::{bf16_bits, f16_bits, f32_bits, f32_of_bf16_bits};
pub use formats::format::{ScaleLayout, Sizes, TokenFormat};
pub use formats::sentinel::{LOST_SCALES, SENTINEL, avoid_sentinel, restore_sentinel};
pub use formats::silu::sigmoids;
pub use formats::{e2m1, e8m0, fp8, mxfp4, mxfp8, nvfp4, scale_placement, silu};
pub use launch::any_args::Args;
pub use launch::args::{
    Arguments, COMMON_OFFSET, CombineArgs, Common, DispatchArgs, DispatchCountsArgs, GiveUpArgs,
    PROTOCOL_VERSION, SiluArgs, Tensor,
};
pub use launch::encoded::EncodedInput;
pub use launch::epilogue::{EPILOGUE_ELEMENTS, Epilogue, Load, NoEpilogue, OutputElement, Steps};
pub use launch::fingerprint::{FINGERPRINT_VARIABLE, LAYOUT_FINGERPRINT};
pub use launch::group_tables::GroupTables;
pub use launch::links::{LinkOutcome, LinkRecord, LinkTest, LinksArgs};
pub use launch::options::{
    AsTheyCame, CombineOptions, CombineWith, DispatchOptions, DispatchWith, EpilogueWords,
    MAX_EPILOGUE_BYTES, ReceivedRows, ReturnedRows,
};
pub use memory::block_histogram::{BlockHistogram, dot_bytes};
pub use memory::dispatch_row::DispatchRow;
pub use memory::row_groups::RowGroup;
pub use memory::window::{ByteOffset, Signal, StagedEpoch, Window};
pub use memory::workspace::{Counter, Table, Workspace, assignment_index, tile_counts_index};
pub use plan::header::{Assignment, AssignmentWords, Header, NOT_ROUTED, OVERFLOWED};
pub use plan::limits::{
    HISTOGRAM_BYTES, MAX_BLOCKS, MAX_COUNTED_EXPERTS, MAX_EXPERTS, MAX_PARTS, MAX_RANKS, MAX_TOP_K,
    PART_ITEMS, PIPELINE_BYTES, PIPELINE_STAGES, SMALL_BATCH_ASSIGNMENTS, SMALL_BLOCK_TOKENS,
    TILE_ASSIGNMENTS,
};
pub use plan::names::UnknownName;
pub use plan::receive::ReceiveLayout;
pub use plan::shape::{CombineMode, ROW_SCALE_BYTES, Rank, Shape};
pub use plan::shared_tokens::SharedTokens;
pub use round::culprit::CulpritWord;
pub use round::epoch::{Epoch, Tagged};
pub use round::fault::{Fault, FaultKind, FaultPage, LastRecord};
pub use round::host_counts::HostCounts;
pub use round::kernel::{Kernel, MAX_REGISTERS};
pub use round::last_launch::LastLaunch;
pub use round::region::Region;
