//! Tokens as a dispatch is given them: BF16, or codes with scales beside them.

use ferry::{DataType, TokenFormat};
use ferry_reference::{bf16, passed};

use super::{Encoded, encode_with, groups, row_bytes};

/// Form of the tokens that a dispatch is given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Given {
    /// BF16, which it encodes.
    #[default]
    Bf16,
    /// Codes and scales that it would have made of them.
    Encoded,
    /// Any codes and scales that travel, drawn from the token's bits: NaNs and all ones among them.
    AnyBits,
    /// Any codes, and scales of blockwise FP8 that are powers of two, four in a word.
    Packed,
}

/// Places of the scales of tokens that are given encoded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Strides {
    /// Row by row.
    #[default]
    RowMajor,
    /// Row by row with gaps, and so are the codes.
    Gaps,
    /// `[scales of a token, tokens]`, if a scale is a word; else row by row.
    Transposed,
}

/// Numbers from a seed: `SplitMix64` (Steele, Lea, Flood, OOPSLA 2014).
struct Bits(u64);

impl Bits {
    fn of(row: &[bf16]) -> Self {
        let start = 0x7061_7373;
        // In BF16 a NaN may lose its last bit.
        let hash = |hash: u64, x: &bf16| {
            (hash ^ u64::from(x.to_bits() | 1)).wrapping_mul(0x0000_0100_0000_01b3)
        };
        Self(row.iter().fold(start, hash))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Draws words: one in four of ones alone, or nearly.
    fn bytes(&mut self, count: usize) -> Vec<u8> {
        let word = |_| {
            let bits = self.next();
            let word = match bits >> 60 {
                0..2 => u32::MAX,
                2 => u32::MAX - 0x80,
                3 => !(1 << (bits >> 32 & 31)),
                _ => bits as u32,
            };
            word.to_le_bytes()
        };
        let mut bytes: Vec<u8> = (0..count.div_ceil(4)).flat_map(word).collect();
        bytes.truncate(count);
        bytes
    }
}

impl Given {
    /// The same, or what comes nearest in this format.
    #[must_use]
    pub const fn in_format(self, format: TokenFormat, hidden: usize) -> Self {
        match (format, self) {
            (TokenFormat::Bf16 | TokenFormat::Nvfp4RowScaled(_), _) => Self::Bf16,
            (TokenFormat::BlockwiseFp8, Self::Packed) if hidden.is_multiple_of(512) => Self::Packed,
            (_, Self::Packed) => Self::AnyBits,
            (_, given) => given,
        }
    }

    /// Whether dispatch is given codes and scales.
    pub const fn is_encoded(self) -> bool {
        !matches!(self, Self::Bf16)
    }

    /// Type of the scales.
    pub const fn scales(self, format: TokenFormat) -> DataType {
        match (self, DataType::of_scales(format)) {
            (Self::Packed, _) => DataType::I32,
            (_, Some(scales)) => scales,
            (_, None) => DataType::U8,
        }
    }

    /// Scales of a token, in elements of their [type](Self::scales).
    pub fn scales_of_row(self, format: TokenFormat, hidden: usize) -> usize {
        match self {
            Self::Packed => groups(format, hidden) / 4,
            _ => groups(format, hidden),
        }
    }

    /// A token as dispatch is given it, if that is encoded.
    pub fn given(self, format: TokenFormat, row: &[bf16], input_scale: f32) -> Encoded {
        if matches!(self, Self::Bf16 | Self::Encoded) {
            return encode_with(format, row, input_scale);
        }
        let mut bits = Bits::of(row);
        let scales = groups(format, row.len());
        let bytes = match self {
            Self::Packed => scales,
            _ => scales * format.sizes().scale_bytes as usize,
        };
        let payload = bits.bytes(row_bytes(format, row.len()));
        let scales = bits.bytes(bytes);
        // A word that does not travel, in scales that are not packed.
        let (scales, _) = match self {
            Self::Packed => (scales, Vec::new()),
            _ => passed::scales(&scales),
        };
        Encoded {
            payload,
            scales,
            row_scale: None,
        }
    }

    /// A token as it arrives.
    pub fn arrives(self, format: TokenFormat, row: &[bf16], input_scale: f32) -> Encoded {
        let given = self.given(format, row, input_scale);
        match self {
            Self::Bf16 => given,
            _ => given.passed(format, self == Self::Packed),
        }
    }
}

impl Encoded {
    /// The same after its way through a dispatch.
    #[must_use]
    pub fn passed(&self, format: TokenFormat, are_packed: bool) -> Self {
        Self {
            payload: passed::codes(&self.payload, format.sizes().element_bits == 8),
            scales: match are_packed {
                true => passed::unpacked(&self.scales),
                false => passed::scales(&self.scales).0,
            },
            row_scale: None,
        }
    }
}
