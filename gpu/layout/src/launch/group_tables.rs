//! Outputs of a dispatch by expert beside those that every such dispatch has.

use bytemuck::{Pod, Zeroable};

/// Outputs of a dispatch that puts rows in expert order, beside those that every such dispatch has. A group
/// is a local expert, or the shared expert before them. All zero: none of them.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct GroupTables {
    /// i32 `[groups]`, written: rows of each group, without those that pad it; 0 for none.
    pub counts: u64,
    /// u32 `[groups]`, written: the row after the last one of each group, without those that pad it; 0 if
    /// `counts` is.
    pub ends: u64,
    /// f32 `[row_capacity]`, written: the router's weight of each row, 0 for rows of no token; 0 for none.
    /// `src_info` is i32 `[row_capacity, 3]` then: source rank, token and top-k slot.
    pub weights: u64,
    /// i32 `[row_capacity]`, written: the group of each row, -1 for rows of no token; 0 for none.
    pub m_indices: u64,
    /// i64 `[local experts, ranks]`, written: where the rows of each source begin in the expert's block, in
    /// the upper half, and their number in the lower; 0 for none.
    pub ranges: u64,
    /// Not zero: rows that pad a group are zeros (payload and scales).
    pub clears_padding: u32,
    /// Not zero: each local expert has a block of so many rows, at `block` times its number.
    pub block: u32,
    /// Words of the scales of blockwise FP8 from one row of a block to the next.
    pub scale_row: u32,
    /// Words from one row's scales to the next of the same row, if there are blocks.
    pub scale_stride: u32,
    /// Words that the scales of an expert's block begin later than `scale_row` times its first row.
    pub scale_block: u32,
    /// Padding, zero.
    pub reserved: u32,
}

impl GroupTables {
    /// None of them.
    pub const NONE: Self = Self {
        counts: 0,
        ends: 0,
        weights: 0,
        m_indices: 0,
        ranges: 0,
        clears_padding: 0,
        block: 0,
        scale_row: 0,
        scale_stride: 0,
        scale_block: 0,
        reserved: 0,
    };

    /// Whether rows of no token, or their entries, are written.
    #[inline(always)]
    pub const fn writes_padding(&self) -> bool {
        self.clears_padding != 0 || self.describes_rows()
    }

    /// Whether there is a table with an entry for each row.
    #[inline(always)]
    pub const fn describes_rows(&self) -> bool {
        self.weights != 0 || self.m_indices != 0
    }
}
