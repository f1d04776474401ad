//! Token formats: encodings of a token's row between dispatch's input and output. To add a format, add it to
//! [`TokenFormat`] with its [`Sizes`], and its arithmetic as a module of its own.

use super::sentinel::{SENTINEL, avoid_sentinel};
use super::{fp8, mxfp4, mxfp8, nvfp4};

/// Encoding of a token's row between dispatch's input and output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum TokenFormat {
    /// Unchanged BF16; of two NaNs `0xffff` in one 32-bit word the first becomes NaN `0xfffe`.
    #[default]
    Bf16,
    /// FP8 (e4m3) with an f32 scale for every 128 elements; see [`fp8`].
    BlockwiseFp8,
    /// FP8 (e4m3) with an e8m0 scale for every 32 elements; see [`mxfp8`].
    Mxfp8(ScaleLayout),
    /// e2m1 with an e8m0 scale for every 32 elements; see [`mxfp4`].
    Mxfp4(ScaleLayout),
    /// e2m1 with an e4m3 scale for every 16 elements under a global scale that the caller calibrated; see
    /// [`nvfp4`].
    Nvfp4(ScaleLayout),
    /// The same under a global scale for each row.
    Nvfp4RowScaled(ScaleLayout),
}

/// Layout of the one-byte scales of dispatch's output rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScaleLayout {
    /// Tiles of 128 rows and 4 groups, as block-scaled matrix multiplications read them; see
    /// [`scale_placement`](crate::scale_placement).
    Tiled,
    /// `[row, group]`.
    RowMajor,
}

/// Sizes of a format's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Bits of an element.
    pub element_bits: u32,
    /// Elements that share a scale; 0 if there are no scales.
    pub group: u32,
    /// Bytes of a scale.
    pub scale_bytes: u32,
    /// Whether each row has a global scale of its own: a BF16, the scale's inverse.
    pub has_row_scale: bool,
    /// Alignment of each expert's rows in dispatch's output, in rows: 16 bytes of scales if scales are
    /// transposed, else 1.
    pub row_alignment: u32,
}

impl TokenFormat {
    /// Every format.
    pub const ALL: [Self; 10] = [
        Self::Bf16,
        Self::BlockwiseFp8,
        Self::Mxfp8(ScaleLayout::Tiled),
        Self::Mxfp8(ScaleLayout::RowMajor),
        Self::Mxfp4(ScaleLayout::Tiled),
        Self::Mxfp4(ScaleLayout::RowMajor),
        Self::Nvfp4(ScaleLayout::Tiled),
        Self::Nvfp4(ScaleLayout::RowMajor),
        Self::Nvfp4RowScaled(ScaleLayout::Tiled),
        Self::Nvfp4RowScaled(ScaleLayout::RowMajor),
    ];

    /// The format's number in a [`Shape`](crate::Shape): its place in [`ALL`](Self::ALL).
    #[inline(always)]
    pub const fn number(self) -> u32 {
        match self {
            Self::Bf16 => 0,
            Self::BlockwiseFp8 => 1,
            Self::Mxfp8(layout) => 2 + layout as u32,
            Self::Mxfp4(layout) => 4 + layout as u32,
            Self::Nvfp4(layout) => 6 + layout as u32,
            Self::Nvfp4RowScaled(layout) => 8 + layout as u32,
        }
    }

    /// The format with a number.
    #[inline(always)]
    pub const fn of_number(number: u32) -> Self {
        let layout = if number & 1 == 0 {
            ScaleLayout::Tiled
        } else {
            ScaleLayout::RowMajor
        };
        match number {
            0 => Self::Bf16,
            1 => Self::BlockwiseFp8,
            2 | 3 => Self::Mxfp8(layout),
            4 | 5 => Self::Mxfp4(layout),
            6 | 7 => Self::Nvfp4(layout),
            _ => Self::Nvfp4RowScaled(layout),
        }
    }

    /// Its name in tables and options.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::BlockwiseFp8 => "fp8",
            Self::Mxfp8(_) => "mxfp8",
            Self::Mxfp4(_) => "mxfp4",
            Self::Nvfp4(_) => "nvfp4",
            Self::Nvfp4RowScaled(_) => "nvfp4-row",
        }
    }

    /// The same format with another layout of its one-byte scales; no effect on formats without them.
    pub const fn with_scale_layout(self, layout: ScaleLayout) -> Self {
        match self {
            Self::Bf16 | Self::BlockwiseFp8 => self,
            Self::Mxfp8(_) => Self::Mxfp8(layout),
            Self::Mxfp4(_) => Self::Mxfp4(layout),
            Self::Nvfp4(_) => Self::Nvfp4(layout),
            Self::Nvfp4RowScaled(_) => Self::Nvfp4RowScaled(layout),
        }
    }

    /// Layout of its one-byte scales; `None` for formats without them.
    #[inline(always)]
    pub const fn scale_layout(self) -> Option<ScaleLayout> {
        match self {
            Self::Bf16 | Self::BlockwiseFp8 => None,
            Self::Mxfp8(layout)
            | Self::Mxfp4(layout)
            | Self::Nvfp4(layout)
            | Self::Nvfp4RowScaled(layout) => Some(layout),
        }
    }

    /// Whether no word of a payload is [`SENTINEL`]: e4m3 encodes NaN as `0x7f`, and BF16
    /// [avoids it](crate::avoid_sentinel). In e2m1 every word is a valid payload.
    #[inline(always)]
    pub const fn never_encodes_sentinel(self) -> bool {
        matches!(self, Self::Bf16 | Self::BlockwiseFp8 | Self::Mxfp8(_))
    }

    /// Word that travels for a word of all ones of a payload that the user has encoded. Of four e4m3 codes
    /// `0xff` the first becomes `0x7f`, so that all four stay NaNs: one less would be a number. In e2m1 all
    /// words travel, with flags.
    pub const fn all_ones(self) -> u32 {
        match self {
            Self::Bf16 => avoid_sentinel(SENTINEL),
            Self::BlockwiseFp8 | Self::Mxfp8(_) => SENTINEL - 0x80,
            Self::Mxfp4(_) | Self::Nvfp4(_) | Self::Nvfp4RowScaled(_) => SENTINEL,
        }
    }

    /// Sizes of its rows.
    #[inline(always)]
    pub const fn sizes(self) -> Sizes {
        let (element_bits, group, scale_bytes) = match self {
            Self::Bf16 => (16, 0, 0),
            Self::BlockwiseFp8 => (8, fp8::GROUP, 4),
            Self::Mxfp8(_) => (8, mxfp8::GROUP, 1),
            Self::Mxfp4(_) => (4, mxfp4::GROUP, 1),
            Self::Nvfp4(_) | Self::Nvfp4RowScaled(_) => (4, nvfp4::GROUP, 1),
        };
        Sizes {
            element_bits,
            group,
            scale_bytes,
            has_row_scale: matches!(self, Self::Nvfp4RowScaled(_)),
            row_alignment: if scale_bytes == 4 { 4 } else { 1 },
        }
    }
}

impl Sizes {
    /// Bytes of `elements` elements, without scales.
    #[inline(always)]
    pub const fn payload_bytes(&self, elements: u32) -> u32 {
        elements / 8 * self.element_bits
    }

    /// Elements whose scales fill a 32-bit word; 0 without scales. A row's elements are a multiple of it.
    #[inline(always)]
    pub const fn elements_of_word(&self) -> u32 {
        if self.group == 0 {
            0
        } else {
            4 / self.scale_bytes * self.group
        }
    }

    /// 32-bit words that the scales of `elements` elements fill.
    #[inline(always)]
    pub const fn scale_words(&self, elements: u32) -> u32 {
        if self.group == 0 {
            0
        } else {
            elements / self.elements_of_word()
        }
    }
}
