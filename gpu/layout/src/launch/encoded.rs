//! Tokens that the user has encoded, in dispatch's options.

use bytemuck::{Pod, Zeroable};

use crate::formats::e8m0;
use crate::formats::format::TokenFormat;

/// Scales of tokens that are given encoded, whose codes are the input. [`NONE`](Self::NONE): the input is
/// BF16, and dispatch encodes it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct EncodedInput {
    /// The scales, read in words of 32 bits.
    pub scales: u64,
    /// Words from the scales of one token to those of the next.
    pub row_stride: u32,
    /// Words from one word of a token's scales to the next.
    pub word_stride: u32,
    /// Word that travels for a word of all ones of the input: [`TokenFormat::all_ones`] of the format, or of
    /// BF16 if the input is not encoded.
    pub all_ones: u32,
    /// Not zero: scales are e8m0, four in a word, and travel as f32.
    pub is_packed: u32,
}

impl EncodedInput {
    /// Input in BF16.
    pub const NONE: Self = Self {
        scales: 0,
        row_stride: 0,
        word_stride: 0,
        all_ones: TokenFormat::Bf16.all_ones(),
        is_packed: 0,
    };

    /// Whether the input is encoded.
    #[inline(always)]
    pub const fn is_on(&self) -> bool {
        self.all_ones != Self::NONE.all_ones
    }

    /// Index, in the user's scales, of the word that holds word `word` of a token's scales. The host refuses
    /// scales with more words than 32 bits number.
    #[inline(always)]
    pub const fn word_index(&self, token: u32, word: u32) -> u32 {
        let word = match self.is_packed {
            0 => word,
            _ => word / 4,
        };
        token * self.row_stride + word * self.word_stride
    }

    /// Word `word` of a token's scales, as rows carry them, from the user's word that holds it.
    #[inline(always)]
    pub const fn word_of(&self, given: u32, word: u32) -> u32 {
        match self.is_packed {
            0 => given,
            _ => e8m0::f32_bits((given >> (8 * (word % 4))) as u8),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::sentinel::SENTINEL;

    #[test]
    fn codes_of_every_format_are_told_from_bf16() {
        assert!(!EncodedInput::NONE.is_on());
        for format in TokenFormat::ALL {
            let all_ones = format.all_ones();
            let encoded = EncodedInput {
                all_ones,
                ..EncodedInput::NONE
            };
            assert_eq!(encoded.is_on(), format != TokenFormat::Bf16);
            // Where rows may have inline flags.
            let travels = all_ones != SENTINEL;
            assert_eq!(travels, format.never_encodes_sentinel(), "{format:?}");
        }
    }

    #[test]
    fn a_packed_word_has_four_scales() {
        let packed = EncodedInput {
            row_stride: 7,
            word_stride: 2,
            is_packed: 1,
            ..EncodedInput::NONE
        };
        assert_eq!(packed.word_index(3, 5), 21 + 2);
        for (word, value) in [(4, 0.5), (5, 1.0), (6, 2.0)] {
            assert_eq!(f32::from_bits(packed.word_of(0xff80_7f7e, word)), value);
        }
        assert!(f32::from_bits(packed.word_of(0xff80_7f7e, 7)).is_nan());
        let words = EncodedInput {
            is_packed: 0,
            ..packed
        };
        assert_eq!((words.word_index(3, 5), words.word_of(9, 5)), (31, 9));
    }
}
