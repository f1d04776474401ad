//! What Ferry's bytes mean: shapes, the receive window, kernel arguments, fault records.
//!
//! The only crate that adds offsets. The host and the kernels compile the same source, so
//! they cannot disagree. No unsafe code, no allocation, no dependency but `half` and `bytemuck`.
#![no_std]
#![forbid(unsafe_code)]

mod args;
mod arithmetic;
pub mod e2m1;
pub mod e8m0;
mod fault;
mod few;
mod float;
mod format;
pub mod fp8;
mod header;
mod kernel;
pub mod mxfp4;
pub mod mxfp8;
pub mod nvfp4;
mod probe;
mod row;
mod row_groups;
pub mod scale_layout;
mod shape;
pub mod sigmoids;
pub mod silu;
mod tag;
mod window;
mod workspace;

pub use args::{
    Arguments, COMMON_OFFSET, CombineArgs, Common, DispatchArgs, PROTOCOL_VERSION, SiluArgs, Tensor,
};
pub use arithmetic::Arithmetic;
pub use fault::{Fault, FaultKind, FaultPage, LastRecord, Region};
pub use few::{FEW_COUNT_BYTES, FEW_ENTRIES, FewCounts};
pub use float::{bf16_bits, f32_of_bf16_bits};
pub use format::{ScaleLayout, Sizes, TokenFormat};
pub use header::{Entries, Entry, Header};
pub use kernel::{Kernel, MAX_REGISTERS, RING_BYTES, RING_SLOTS};
pub use probe::{Conversion, ConvertArgs, ProbeArgs, WriteArgs, WritePiece};
pub use row::DispatchRow;
pub use row_groups::RowGroup;
pub use shape::{
    CombineMode, MAX_EXPERTS, MAX_RANKS, MAX_TOP_K, NOT_ROUTED, ROW_SCALE_BYTES, Rank, Shape,
};
pub use tag::{Epoch, Tagged};
pub use window::{ABSENT, ByteOffset, Signal, Window, received, sent};
pub use workspace::{CHUNK_ENTRIES, Counter, JOINS, PIECES, Table, Workspace};
