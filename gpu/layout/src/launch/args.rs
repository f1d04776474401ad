//! Kernel arguments: one struct per kernel, passed by value.

use bytemuck::{Pod, Zeroable};

use crate::formats::format::{ScaleLayout, TokenFormat};
use crate::formats::scale_placement;
use crate::formats::sentinel::{SENTINEL, avoid_sentinel};
use crate::formats::silu::Activation;
use crate::memory::dispatch_row::DispatchRow;
use crate::memory::window::Window;
use crate::memory::workspace::{Counter, Table, Workspace};
use crate::plan::shape::{Rank, Shape};
use crate::round::host_counts::HostCounts;

/// Arguments that every kernel of a communicator needs. Addresses are device addresses.
///
/// The fields that differ between communicators of one shape come first: a kernel for one shape reads nothing
/// else.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Common {
    /// `[u64; ranks]`: the address of each rank's window from here. For an unmapped rank it is this rank's
    /// own window: the symmetric address that NVSHMEM calls take.
    pub peers: u64,
    /// This rank's workspace.
    pub workspace: u64,
    /// This rank.
    pub rank: u16,
    /// Not zero: look for experts that a token lists twice.
    pub debug_checks: u16,
    /// Tokens of this rank in the round's dispatch.
    pub tokens: u32,
    /// Longest time a kernel waits, in nanoseconds since the kernels before it in its stream ended.
    pub deadline_ns: u64,
    /// This rank's [`FaultPage`](crate::FaultPage).
    pub fault_page: u64,
    /// This rank's window: its entry in `peers`, without a load to find it.
    pub own_window: u64,
    /// The group's sizes.
    pub shape: Shape,
    /// `Window::of(shape)`.
    pub window: Window,
    /// `Workspace::of(shape)`.
    pub tables: Workspace,
    /// `DispatchRow::of(shape)`.
    pub row: DispatchRow,
}

impl Common {
    /// Arguments that follow from a shape; all others are zero.
    pub fn of(shape: &Shape) -> Self {
        Self::with(shape, false)
    }

    /// Arguments that follow from a shape. `combine_weights`: whether weights travel back with the rows of
    /// combine.
    pub fn with(shape: &Shape, combine_weights: bool) -> Self {
        Self {
            shape: *shape,
            window: Window::with(shape, combine_weights),
            tables: Workspace::of(shape),
            row: DispatchRow::of(shape),
            ..Self::zeroed()
        }
    }

    /// Fingerprint of everything that ranks must agree on: all numbers that follow from a shape, and the
    /// version of their meaning. `keeps_rows`: whether received rows stay as they came, as headers
    /// depend on it. `combine_weights`: whether weights travel back, also where they fit in the stride of a
    /// row. FNV-1a, 64 bits (Fowler, Noll, Vo; offset basis and prime of the 64-bit variant).
    pub fn fingerprint(&self, version: u32, keeps_rows: bool, combine_weights: bool) -> u64 {
        let hash =
            |hash: u64, &byte: &u8| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        let version = version.to_le_bytes();
        let kinds = [u8::from(keeps_rows), u8::from(combine_weights)];
        let bytes = version.iter().chain(&kinds);
        let bytes = bytes.chain(bytemuck::bytes_of(self));
        bytes.fold(0xcbf2_9ce4_8422_2325, hash)
    }

    /// This rank.
    pub const fn rank(&self) -> Rank {
        Rank(self.rank as u32)
    }

    /// Whether dispatch's rows of a source travel with inline flags (see [`Window`]) if they are cut into
    /// `parts`.
    #[inline(always)]
    pub const fn dispatches_inline(&self, parts: u32) -> bool {
        // All first: a kernel for one shape has no code for a case that never occurs.
        (self.window.cuts_all() && self.shape.format().never_encodes_sentinel())
            || (parts > 1 && self.shape.format().never_encodes_sentinel())
    }
}

/// Version of the protocol between ranks. Raise it with every change after which a rank would misread a word
/// that an older build writes, or wait for one that an older build never writes: another meaning, order or
/// encoding of a word of a window, another number of signals, other parts of a row for each warp. Offsets and
/// sizes count by themselves ([`Common::fingerprint`]).
pub const PROTOCOL_VERSION: u32 = 4;

/// Offset of [`Common`], in bytes, in the arguments of every kernel that takes it.
pub const COMMON_OFFSET: usize = 24;

/// One of the user's tensors that is read or written row by row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tensor {
    /// Input tokens of dispatch, which the user may have encoded; read only.
    Input,
    /// Output tokens of dispatch.
    Output,
    /// Expert outputs, input of combine; read only.
    Expert,
    /// Output of combine.
    Combined,
    /// The first tensor with which combine's sums begin; read only.
    Initial,
    /// The tensor that is added to it; read only.
    SecondInitial,
}

/// Addresses of a kernel's tensors and tables, from its arguments. 0 if the kernel has none.
pub trait Arguments: Copy {
    /// Whether received rows stay as they came.
    const KEEPS_ROWS: bool = false;

    /// Arguments that every kernel needs.
    fn common(&self) -> &Common;
    /// Device address of a tensor's first row.
    fn tensor(&self, tensor: Tensor) -> u64;

    /// The last word that kernels need soon, far from the first ones: loading it fetches its cache line.
    fn last_word(&self) -> u64;

    /// Word that travels for a word of all ones of [`Tensor::Input`], if that is copied.
    #[inline(always)]
    fn all_ones_of_input(&self) -> u32 {
        avoid_sentinel(SENTINEL)
    }

    /// Bytes of a row of a tensor.
    #[inline(always)]
    fn row_bytes(&self, tensor: Tensor) -> u32 {
        match tensor {
            Tensor::Output => self.common().row.payload_bytes,
            _ => self.common().shape.combine_row_bytes(),
        }
    }

    /// Bytes from one row of a tensor to the next.
    #[inline(always)]
    fn row_stride(&self, tensor: Tensor) -> u32 {
        self.row_bytes(tensor)
    }

    /// Device address of a user's table.
    fn user_table(&self, table: Table) -> u64;

    /// Device address of a table.
    #[inline(always)]
    fn table(&self, table: Table) -> u64 {
        let Common {
            workspace, tables, ..
        } = *self.common();
        match table {
            Table::RanksInExpert => workspace + tables.ranks_in_expert,
            Table::TileCounts => workspace + tables.tile_counts,
            Table::Routes => workspace.wrapping_add(tables.routes),
            Table::RowMap => workspace + tables.row_map,
            Table::RowBases => workspace + tables.bytes,
            Table::CountedTokens => workspace + Counter::Tokens.bytes(),
            Table::HostCounts => self.common().fault_page + HostCounts::START,
            _ => self.user_table(table),
        }
    }
}

impl Arguments for DispatchArgs {
    #[inline(always)]
    fn common(&self) -> &Common {
        &self.common
    }

    #[inline(always)]
    fn last_word(&self) -> u64 {
        self.row_capacity
    }

    #[inline(always)]
    fn tensor(&self, tensor: Tensor) -> u64 {
        match tensor {
            Tensor::Input => self.x,
            Tensor::Output => self.output_tokens,
            _ => 0,
        }
    }

    #[inline(always)]
    fn row_stride(&self, tensor: Tensor) -> u32 {
        match tensor {
            Tensor::Input => self.x_stride as u32,
            _ => self.row_bytes(tensor),
        }
    }

    #[inline(always)]
    fn user_table(&self, table: Table) -> u64 {
        match table {
            Table::TopkIds => self.topk_ids,
            Table::TopkWeights => self.topk_weights,
            Table::RowOffsets => self.row_offsets,
            Table::ExpertIds => self.expert_ids,
            Table::SrcInfo => self.src_info,
            Table::Scales => self.output_scales,
            Table::ScalesOffsets => self.scales_offsets,
            Table::RowScales => self.row_scales,
            Table::InputScale => self.input_scale,
            _ => 0,
        }
    }
}

impl Arguments for GiveUpArgs {
    #[inline(always)]
    fn common(&self) -> &Common {
        &self.common
    }

    #[inline(always)]
    fn last_word(&self) -> u64 {
        self.is_local
    }

    #[inline(always)]
    fn tensor(&self, _tensor: Tensor) -> u64 {
        0
    }

    #[inline(always)]
    fn user_table(&self, _table: Table) -> u64 {
        0
    }
}

impl Arguments for DispatchCountsArgs {
    #[inline(always)]
    fn common(&self) -> &Common {
        &self.common
    }

    #[inline(always)]
    fn last_word(&self) -> u64 {
        self.ticket
    }

    #[inline(always)]
    fn tensor(&self, _tensor: Tensor) -> u64 {
        0
    }

    #[inline(always)]
    fn user_table(&self, _table: Table) -> u64 {
        0
    }
}

impl Arguments for CombineArgs {
    #[inline(always)]
    fn common(&self) -> &Common {
        &self.common
    }

    #[inline(always)]
    fn last_word(&self) -> u64 {
        self.row_capacity
    }

    #[inline(always)]
    fn tensor(&self, tensor: Tensor) -> u64 {
        match tensor {
            Tensor::Expert => self.expert_rows,
            Tensor::Combined => self.combined,
            _ => 0,
        }
    }

    #[inline(always)]
    fn user_table(&self, table: Table) -> u64 {
        match table {
            Table::TopkWeights => self.topk_weights,
            _ => 0,
        }
    }
}

/// Arguments of `dispatch_async`, `dispatch_wait` and `dispatch`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct DispatchArgs {
    /// BF16 `[tokens, hidden]`, or codes of the format, rows `x_stride` bytes apart.
    pub x: u64,
    /// i32 `[tokens, top_k]`.
    pub topk_ids: u64,
    /// f32 `[tokens, top_k]`, or 0: every weight is 1.
    pub topk_weights: u64,
    /// Arguments that every kernel needs.
    pub common: Common,
    /// `[row_capacity, hidden]` in the token format, written.
    pub output_tokens: u64,
    /// Scales of the output rows in the format's layout, written; 0 if it has none.
    pub output_scales: u64,
    /// u32 `[groups + 1]`, written: a group is a local expert; the shared expert, if any, adds one.
    pub row_offsets: u64,
    /// i32 `[groups]`, written.
    pub expert_ids: u64,
    /// i32 `[row_capacity, 2]`, written: token and top-k slot of each row; source rank and token if rows stay
    /// as they came. With [weights of rows](crate::GroupTables::weights) it has a third column.
    pub src_info: u64,
    /// Rows that fit in the outputs.
    pub row_capacity: u64,
    /// Bytes from one row of `x` to the next, fewer than 2^32.
    pub x_stride: u64,
    /// u32 `[groups]`, written: see [`scale_placement`]; 0 unless scales are tiled.
    pub scales_offsets: u64,
    /// Blocks of 128 rows that fit in the tiled scales.
    pub block_capacity: u64,
    /// BF16 `[row_capacity]`, written: inverse of each row's own global scale; 0 if the format has none.
    pub row_scales: u64,
    /// f32 `[1]`, the global input scale of NVFP4; address 0 stands for a scale of 1.
    pub input_scale: u64,
}

/// Arguments of `combine_async`, `combine_wait` and `combine`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct CombineArgs {
    /// BF16 `[row_capacity, hidden]`: expert outputs, in the order of the dispatch.
    pub expert_rows: u64,
    /// BF16 `[tokens, hidden]`, or `[tokens, top_k, hidden]` if rows are not summed; written.
    pub combined: u64,
    /// f32 `[tokens, top_k]` for exact mode; 0: the rows are not summed.
    pub topk_weights: u64,
    /// Arguments that every kernel needs.
    pub common: Common,
    /// Rows that fit in `expert_rows`, at most [`Shape::max_rows`].
    pub row_capacity: u64,
}

/// Arguments of `give_up`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct GiveUpArgs {
    /// [`ReceiveLayout::number`](crate::ReceiveLayout::number) of the dispatch.
    pub layout: u64,
    /// Not zero: nothing travels (`skip_a2a`), and nobody waits for a credit.
    pub is_local: u64,
    /// Padding, zero.
    pub reserved: u64,
    /// Arguments that every kernel needs.
    pub common: Common,
}

/// Arguments of `dispatch_counts`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct DispatchCountsArgs {
    /// Number that the host waits for, not 0.
    pub ticket: u64,
    /// Not zero: rows stay as they came.
    pub keeps_rows: u64,
    /// Not zero: this round's dispatch read the number of tokens on the device, and kept it.
    pub tokens_on_device: u64,
    /// Arguments that every kernel needs.
    pub common: Common,
}

/// Arguments of the fused SiLU kernel. Addresses are device addresses.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct SiluArgs {
    /// BF16 `[row_capacity, 2 * columns]`: gates, then ups; or interleaved.
    pub input: u64,
    /// u32 `[experts + 1]`: rows from the last offset on are not touched.
    pub row_offsets: u64,
    /// `[row_capacity, columns]` in the token format, written.
    pub output: u64,
    /// Scales in the format's layout, written; 0 if it has none.
    pub scales: u64,
    /// u32 `[experts]`, for tiled scales.
    pub scales_offsets: u64,
    /// f32 `[experts]`, NVFP4's global scales; address 0 stands for scales of 1.
    pub input_scales: u64,
    /// Rows that fit in the tensors.
    pub row_capacity: u64,
    /// 32-bit words that fit in the tensor of scales; nothing is written after them.
    pub scale_words: u64,
    /// Experts.
    pub experts: u32,
    /// Columns of the output.
    pub columns: u32,
    /// [`TokenFormat::number`](crate::TokenFormat::number).
    pub format: u32,
    /// Not zero: each gate is followed by its up.
    pub interleaved: u32,
    /// Not zero: the clamped form, with `alpha` and `limit`.
    pub clamped: u32,
    /// See [`Activation`].
    pub alpha: f32,
    /// See [`Activation`].
    pub limit: f32,
    /// Padding, zero.
    pub reserved: u32,
}

impl SiluArgs {
    /// Activation that these arguments ask for.
    #[inline(always)]
    pub const fn activation(&self) -> Activation {
        if self.clamped == 0 {
            Activation::Silu
        } else {
            Activation::Clamped {
                alpha: self.alpha,
                limit: self.limit,
            }
        }
    }

    /// Words between two consecutive words of one row's scales. `format` is this launch's, here and below.
    #[inline(always)]
    pub const fn scale_stride(&self, format: TokenFormat) -> u32 {
        match format.scale_layout() {
            None => self.row_capacity as u32,
            Some(ScaleLayout::RowMajor) => 1,
            Some(ScaleLayout::Tiled) => scale_placement::TILE_BYTES / 4,
        }
    }

    /// First word of the scales of output row `row`, which is row `local` of an expert whose scales begin
    /// with block `block` if they are tiled.
    #[inline(always)]
    pub const fn first_scale(&self, format: TokenFormat, row: u32, local: u32, block: u32) -> u64 {
        let words = format.sizes().scale_words(self.columns);
        match format.scale_layout() {
            None => row as u64,
            Some(ScaleLayout::RowMajor) => row as u64 * words as u64,
            Some(ScaleLayout::Tiled) => {
                // Rows and columns are less than 2^31 and 2^29, so 32 bits are enough for both.
                let block = block.wrapping_add(local / scale_placement::BLOCK_ROWS);
                let block_words = words * (scale_placement::TILE_BYTES / 4);
                let in_block = scale_placement::offset_in_block(local, 0) / 4;
                block as u64 * block_words as u64 + in_block as u64
            }
        }
    }
}

/// A kernel parameter is at most 4 KiB on every architecture (CUDA C++ Programming Guide,
/// "Function Parameters").
const _: () = assert!(size_of::<DispatchArgs>() <= 4096 && size_of::<CombineArgs>() <= 4096);
/// Host and device see the same fields at the same place. A launch begins with the first 48 bytes: they share
/// a line of the constant cache, and every warp waits for each line.
const _: () = {
    use core::mem::offset_of;
    assert!(offset_of!(DispatchArgs, common) == COMMON_OFFSET);
    assert!(offset_of!(CombineArgs, common) == COMMON_OFFSET);
    assert!(offset_of!(GiveUpArgs, common) == COMMON_OFFSET);
    assert!(offset_of!(DispatchCountsArgs, common) == COMMON_OFFSET);
    assert!(COMMON_OFFSET + offset_of!(Common, deadline_ns) == 48);
    assert!(offset_of!(Common, shape) == 48);
    assert!(offset_of!(Common, window) == 80);
    assert!(offset_of!(Common, tables) == 80 + 27 * 8);
    assert!(offset_of!(Common, row) == 336);
    assert!(size_of::<Common>() == 368);
};
