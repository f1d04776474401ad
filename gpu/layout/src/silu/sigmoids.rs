//! A table of the sigmoids of all BF16 gates: to look one up takes a GPU fewer instructions than to
//! compute it. What stands in it is [`Activation::sigmoid`], so that the bits are the same.
//!
//! A sigmoid's argument is the gate, or the activation's `alpha` times the lesser of gate and limit.
//! Arguments below 2^-24.6 have one sigmoid, 1/2, and so have those of one sign above 98.5, 1 or 0. Fewer
//! than [`MAGNITUDES`] BF16s are between, and the table begins where `alpha` puts them: what is below
//! has the sigmoid of the first one, and what is above has that of the last one. A limit does not change
//! that: all gates above it have one sigmoid, too. A NaN's is multiplied with the NaN.

use super::Activation;
use crate::formats::arithmetic::Arithmetic;

/// Magnitudes of either sign: a power of two, so that the sign is a bit of the place.
pub const MAGNITUDES: u32 = 1 << 12;
/// Places, of an f32 each: positive gates, then negative ones.
pub const PLACES: u32 = 2 * MAGNITUDES;
/// The last magnitude, counted from the first.
pub const LAST: u32 = MAGNITUDES - 1;

// Offsets in bytes are halves of a word.
const _: () = assert!(4 * PLACES <= 1 << 16);

/// Where in the table a launch's gates are.
#[derive(Clone, Copy, Debug)]
pub struct GateRange {
    /// The magnitude, as bits of a BF16, that the table begins with for either sign.
    first: u32,
}

impl GateRange {
    /// Of an activation.
    #[inline(always)]
    pub const fn of(activation: Activation) -> Self {
        match activation {
            Activation::Silu => Self::of_steepness(1.0),
            Activation::Clamped { alpha, .. } => Self::of_steepness(alpha),
        }
    }

    /// The bits of a number are its logarithm, less by 0 to 0.0861 octaves (Mitchell, "Computer
    /// Multiplication and Division Using Binary Logarithms", IRE Trans. EC-11, 1962), so that their
    /// difference does for a quotient: `alpha` times the first gate is between 2^-25 and 2^-24.8, and
    /// times the last one between 127 and 145. Where no gate is so small, since `alpha` is huge, the table
    /// begins with 0; where none is so large, since it is tiny, it has infinity, and what is behind
    /// that only NaNs ask for.
    #[inline(always)]
    const fn of_steepness(alpha: f32) -> Self {
        const ONE: u32 = 1.0_f32.to_bits() >> 16;
        /// 2^-25.
        const FIRST: u32 = ONE - (25 << 7);
        Self {
            first: (FIRST + ONE).saturating_sub(alpha.abs().to_bits() >> 16),
        }
    }

    /// Bytes from the start of the table to the sigmoids of two BF16s, in the halves that they are in.
    /// `distances` is [`distances`] or does the same.
    #[inline(always)]
    pub fn offsets(self, pair: u32, distances: impl Fn(u32, u32) -> u32) -> u32 {
        // Half of where signs are in a BF16.
        const SIGNS: u32 = 4 * MAGNITUDES * 0x1_0001;
        const _: () = assert!(4 * MAGNITUDES == 0x8000 / 2);
        distances(pair & 0x7fff_7fff, self.first) << 2 | pair >> 1 & SIGNS
    }

    /// What stands at a place.
    #[inline(always)]
    pub fn sigmoid(self, place: u32, activation: Activation, arithmetic: impl Arithmetic) -> f32 {
        let (magnitude, sign) = (self.first + place % MAGNITUDES, place / MAGNITUDES);
        let gate = f32::from_bits(magnitude << 16 | sign << 31);
        activation.sigmoid(gate, arithmetic)
    }
}

/// How far the magnitudes in both halves are behind `first`, at least 0 and at most [`LAST`].
#[inline(always)]
pub fn distances(magnitudes: u32, first: u32) -> u32 {
    let distance = |magnitude: u32| magnitude.saturating_sub(first).min(LAST);
    distance(magnitudes & 0xffff) | distance(magnitudes >> 16) << 16
}
