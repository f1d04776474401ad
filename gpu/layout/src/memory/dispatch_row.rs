//! Layout of dispatch's rows, as the kernels need it.

use bytemuck::{Pod, Zeroable};

use crate::formats::format::{ScaleLayout, TokenFormat};
use crate::formats::scale_placement;
use crate::memory::window::ByteOffset;
use crate::plan::shape::{Shape, cut};

/// Layout of a dispatch row, in bytes from its start, and the numbers that decide how rows are cut and
/// padded. The host computes it once for all launches: kernels for all shapes would keep it in registers.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct DispatchRow {
    /// Bytes of the payload. The scales follow it.
    pub payload_bytes: u32,
    /// log2 of the payload bytes that one 32-bit word of scales covers.
    log_bytes_of_word: u32,
    /// 32-bit words of scales.
    pub scale_words: u32,
    /// Start of the row's own scale, if it has one.
    pub row_scale: u32,
    /// Start of the header.
    pub header: u32,
    /// [`Shape::max_parts`].
    max_parts: u32,
    /// Alignment of each group's rows in dispatch's output, a power of two: [`Shape::row_alignment`], or what
    /// the user asks for, if that is more.
    alignment: u32,
    /// [`Shape::ranks`](Shape).
    ranks: u32,
}

impl DispatchRow {
    /// Layout of the rows of a shape.
    pub const fn of(shape: &Shape) -> Self {
        let sizes = shape.sizes();
        let bytes_of_word = sizes.payload_bytes(sizes.elements_of_word());
        Self {
            payload_bytes: shape.payload_bytes(),
            log_bytes_of_word: match bytes_of_word {
                // More than any payload.
                0 => u32::BITS - 1,
                bytes => bytes.trailing_zeros(),
            },
            scale_words: shape.scale_words(),
            row_scale: shape.row_scale_start(),
            header: shape.header_start(),
            max_parts: shape.max_parts(),
            alignment: shape.row_alignment(),
            ranks: shape.ranks,
        }
    }

    /// The same layout with groups of rows aligned to `alignment`, a power of two, if that is more than the
    /// format asks for.
    #[must_use]
    pub const fn aligned(self, alignment: u32) -> Self {
        match alignment > self.alignment {
            true => Self { alignment, ..self },
            false => self,
        }
    }

    /// Bytes from the start of the struct to the alignment of rows, which no shape decides.
    pub const ALIGNMENT_OFFSET: usize = core::mem::offset_of!(Self, alignment);

    /// Alignment of each group's rows in dispatch's output, a power of two.
    #[inline(always)]
    pub const fn alignment(&self) -> u32 {
        self.alignment
    }

    /// [`Shape::parts`].
    #[inline(always)]
    pub const fn parts(&self, tokens: u32) -> u32 {
        cut(self.max_parts, tokens.saturating_mul(self.ranks))
    }

    /// `rows` of the outputs rounded up to a multiple of the alignment. Wraps around, as sums of counts
    /// received over the wire may.
    #[inline(always)]
    pub const fn padded(&self, rows: u32) -> u32 {
        // Not `next_multiple_of`, which divides.
        rows.wrapping_add(self.alignment - 1) & !(self.alignment - 1)
    }

    /// Start of a row's scales.
    #[inline(always)]
    pub const fn scales(&self, row: ByteOffset) -> ByteOffset {
        row.plus(self.payload_bytes)
    }

    /// Words of scales that belong to the payload before byte `end`, at which a part of it ends.
    #[inline(always)]
    pub const fn scale_words_before(&self, end: u32) -> u32 {
        end >> self.log_bytes_of_word
    }

    /// First word of the scales of output row `position`, which is row `row` of all blocks of tiled scales.
    /// Wraps around: both derive from counts received over the wire.
    #[inline(always)]
    pub const fn first_scale_word(&self, format: TokenFormat, position: u32, row: u32) -> u32 {
        match format.scale_layout() {
            None => position,
            Some(ScaleLayout::RowMajor) => position.wrapping_mul(self.scale_words),
            Some(ScaleLayout::Tiled) => {
                let block = row / scale_placement::BLOCK_ROWS;
                self.first_scale_word_of_block(block) + scale_placement::offset_in_block(row, 0) / 4
            }
        }
    }

    /// First word of a block of tiled scales.
    #[inline(always)]
    pub const fn first_scale_word_of_block(&self, block: u32) -> u32 {
        block.wrapping_mul(self.scale_words * (scale_placement::TILE_BYTES / 4))
    }
}
