//! Rows, ranges of their bytes, and sets of their targets, on which a machine works.

use ferry_layout::{ByteOffset, Rank, Shape, Tensor};

/// A row of a tensor or of a window, whole.
#[derive(Clone, Copy, Debug)]
pub enum Row {
    /// A row of one of the user's tensors.
    Tensor(Tensor, u32),
    /// A row in the window of a rank of this node (or of this rank).
    Window(Rank, ByteOffset),
    /// A row with inline flags in such a window: its reader may be polling each of its words.
    Inline(Rank, ByteOffset),
}

/// A row of the outputs of dispatch.
#[derive(Clone, Copy, Debug)]
pub struct OutputRow {
    /// Its index in [`Tensor::Output`], and in the table of rows' own scales.
    pub row: u32,
    /// The first word of its scales in the table of scales, if the format has any.
    pub scales: u32,
}

/// Bytes `start..end` of a row, both multiples of 16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteRange {
    /// First byte.
    pub start: u32,
    /// The byte after the last.
    pub end: u32,
}

impl ByteRange {
    /// Part `part` of `parts` of a row of `bytes` bytes.
    #[inline(always)]
    pub fn part(bytes: u32, part: u32, parts: u32) -> Self {
        debug_assert!(
            part < parts && parts.is_power_of_two(),
            "part {part} of {parts}"
        );
        let (start, end) = Shape::part(bytes, part, parts);
        debug_assert!(
            start <= end && end <= bytes,
            "bytes {start}..{end} of {bytes}"
        );
        Self { start, end }
    }
}

/// A byte range of a token's payload, in the format of the launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenPart {
    /// The token, a row of the input.
    pub token: u32,
    /// The bytes.
    pub range: ByteRange,
}

/// A set of small numbers. A word of 32 bits takes half the instructions of one of 64.
///
/// The only code that counts bits of 64-bit words, half by half: `rustc_codegen_nvvm` returns the 64-bit
/// results of LLVM's `llvm.cttz.i64`, `llvm.ctlz.i64` and `llvm.ctpop.i64` as they are, but Rust's intrinsics
/// return a `u32`, and the outcome is undefined. A GPU counts half by half anyway.
pub trait Bits: Copy {
    /// The lowest number of a set that is not empty.
    fn lowest(self) -> u32;

    /// Number of elements.
    fn count(self) -> u32;

    /// Removes and returns the lowest number, if there is any.
    fn take_lowest(&mut self) -> Option<u32>;
}

impl Bits for u32 {
    #[inline(always)]
    fn lowest(self) -> u32 {
        self.trailing_zeros()
    }

    #[inline(always)]
    fn count(self) -> u32 {
        self.count_ones()
    }

    #[inline(always)]
    fn take_lowest(&mut self) -> Option<u32> {
        let lowest = (*self != 0).then(|| self.lowest());
        *self &= self.wrapping_sub(1);
        lowest
    }
}

impl Bits for u64 {
    #[inline(always)]
    fn lowest(self) -> u32 {
        // The number of zeros below it.
        (!self & self.wrapping_sub(1)).count()
    }

    #[inline(always)]
    fn count(self) -> u32 {
        (self as u32).count() + ((self >> u32::BITS) as u32).count()
    }

    #[inline(always)]
    fn take_lowest(&mut self) -> Option<u32> {
        let lowest = (*self != 0).then(|| self.lowest());
        *self &= self.wrapping_sub(1);
        lowest
    }
}
