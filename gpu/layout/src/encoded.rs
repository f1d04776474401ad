//! Tokens that the user has encoded, in dispatch's options.

use bytemuck::{Pod, Zeroable};

use crate::formats::e8m0;
#[cfg(doc)]
use crate::formats::format::TokenFormat;

/// Scales of tokens that are given encoded, whose codes are the input. All zero: the input is BF16, and
/// dispatch encodes it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct EncodedInput {
    /// The scales, read in words of 32 bits.
    pub scales: u64,
    /// Words from the scales of one token to those of the next.
    pub row_stride: u32,
    /// Words from one word of a token's scales to the next.
    pub word_stride: u32,
    /// [`TokenFormat::all_ones`]: word of codes that travels for one of all ones. 0: the input is BF16.
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
        all_ones: 0,
        is_packed: 0,
    };

    /// Whether the input is encoded.
    #[inline(always)]
    pub const fn is_on(&self) -> bool {
        self.all_ones != 0
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
