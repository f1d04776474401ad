//! Meaning of Ferry's bytes: shapes, the receive window, kernel arguments, fault records.
//!
//! The only crate that adds offsets. The host and the kernels compile the same source, so they cannot
//! disagree. No unsafe code, no allocation, no dependency but `half`, `bytemuck` and, optionally, `serde`.
#![no_std]
#![forbid(unsafe_code)]

mod args;
mod block_histogram;
mod culprit;
mod dispatch_row;
mod encoded;
mod epilogue;
mod epoch;
mod fault;
mod fingerprint;
pub mod formats;
mod group_tables;
mod header;
mod host_counts;
mod kernel;
mod last_launch;
mod limits;
mod names;
mod options;
mod receive;
mod row_groups;
pub mod scale_placement;
mod sentinel;
mod shape;
mod shared_tokens;
pub mod silu;
mod window;
mod workspace;

pub use args::{
    Arguments, COMMON_OFFSET, CombineArgs, Common, DispatchArgs, DispatchCountsArgs, GiveUpArgs,
    PROTOCOL_VERSION, SiluArgs, Tensor,
};
pub use block_histogram::{BlockHistogram, dot_bytes};
pub use culprit::CulpritWord;
pub use dispatch_row::DispatchRow;
pub use encoded::EncodedInput;
pub use epilogue::{EPILOGUE_ELEMENTS, Epilogue, Load, NoEpilogue, OutputElement, Steps};
pub use epoch::{Epoch, Tagged};
pub use fault::{Fault, FaultKind, FaultPage, LastRecord, Region};
pub use fingerprint::{FINGERPRINT_VARIABLE, LAYOUT_FINGERPRINT};
pub use formats::arithmetic::Arithmetic;
pub use formats::float::{bf16_bits, f16_bits, f32_bits, f32_of_bf16_bits};
pub use formats::format::{ScaleLayout, Sizes, TokenFormat};
pub use formats::{e2m1, e8m0, fp8, mxfp4, mxfp8, nvfp4};
pub use group_tables::GroupTables;
pub use header::{Assignment, AssignmentWords, Header, NOT_ROUTED, OVERFLOWED};
pub use host_counts::HostCounts;
pub use kernel::{Kernel, MAX_REGISTERS};
pub use last_launch::LastLaunch;
pub use limits::{
    HISTOGRAM_BYTES, MAX_BLOCKS, MAX_COUNTED_EXPERTS, MAX_EXPERTS, MAX_PARTS, MAX_RANKS, MAX_TOP_K,
    PART_ITEMS, PIPELINE_BYTES, PIPELINE_STAGES, SMALL_BATCH_ASSIGNMENTS, SMALL_BLOCK_TOKENS,
    TILE_ASSIGNMENTS,
};
pub use names::UnknownName;
pub use options::{
    AsTheyCame, CombineOptions, CombineWith, DispatchOptions, DispatchWith, EpilogueWords,
    MAX_EPILOGUE_BYTES, ReceivedRows, ReturnedRows,
};
pub use receive::ReceiveLayout;
pub use row_groups::RowGroup;
pub use sentinel::{LOST_SCALES, SENTINEL, avoid_sentinel, restore_sentinel};
pub use shape::{CombineMode, ROW_SCALE_BYTES, Rank, Shape};
pub use shared_tokens::SharedTokens;
pub use silu::sigmoids;
pub use window::{ByteOffset, Signal, Window};
pub use workspace::{Counter, Table, Workspace, assignment_index, tile_counts_index};
