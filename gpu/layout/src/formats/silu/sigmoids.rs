//! A table of the sigmoids of all BF16 gates: looking one up takes a GPU fewer instructions than computing
//! it. Its entries are values of [`Activation::sigmoid`], so the bits are the same.
//!
//! A sigmoid's argument is the gate, or the activation's `alpha` times the lesser of gate and limit. All
//! arguments below 2^-24.6 in magnitude have the sigmoid 1/2, and all above 98.5 have 1 or 0, by their sign.
//! Fewer than [`MAGNITUDES`] BF16s are between, and `alpha` decides where the table begins: gates below it
//! have the sigmoid of the first entry, gates above it that of the last. A limit does not change that: all
//! gates above it have one sigmoid, too. The entry for a NaN does not matter: it is multiplied with the NaN.

use super::Activation;
use crate::formats::arithmetic::Arithmetic;

/// Magnitudes of either sign: a power of two, so that the sign is a bit of the place.
pub const MAGNITUDES: u32 = 1 << 12;
/// Places of an f32 each: positive gates, then negative ones.
pub const PLACES: u32 = 2 * MAGNITUDES;
/// The last magnitude, counted from the first.
pub const LAST: u32 = MAGNITUDES - 1;

// Two offsets in bytes fit in a word, a half each.
const _: () = assert!(4 * PLACES <= 1 << 16);

/// Range of gates that a launch's table covers.
#[derive(Clone, Copy, Debug)]
pub struct GateRange {
    /// The first magnitude of either sign, as bits of a BF16.
    first: u32,
}

impl GateRange {
    /// Range for an activation.
    #[inline(always)]
    pub const fn of(activation: Activation) -> Self {
        match activation {
            Activation::Silu => Self::of_steepness(1.0),
            Activation::Clamped { alpha, .. } => Self::of_steepness(alpha),
        }
    }

    /// Range for a sigmoid of steepness `alpha`.
    ///
    /// The bits of a number are its logarithm, less by 0 to 0.0861 octaves (Mitchell, "Computer
    /// Multiplication and Division Using Binary Logarithms", IRE Trans. EC-11, 1962), so a difference of bits
    /// approximates a quotient: `alpha` times the first gate is between 2^-25 and 2^-24.8, and `alpha` times
    /// the last one between 127 and 145. If `alpha` is so large that no gate is small enough, the table
    /// begins with 0; if it is so small that no gate is large enough, the table contains infinity, and only
    /// NaNs look up the places after it.
    #[inline(always)]
    const fn of_steepness(alpha: f32) -> Self {
        const ONE: u32 = 1.0_f32.to_bits() >> 16;
        /// 2^-25.
        const FIRST: u32 = ONE - (25 << 7);
        Self {
            first: (FIRST + ONE).saturating_sub(alpha.abs().to_bits() >> 16),
        }
    }

    /// Bytes from the start of the table to the sigmoids of two BF16s, each in the half of its BF16.
    /// `distances` is [`distances`] or an equivalent.
    #[inline(always)]
    pub fn offsets(self, pair: u32, distances: impl Fn(u32, u32) -> u32) -> u32 {
        // Half of the sign bits of two BF16s.
        const SIGNS: u32 = 4 * MAGNITUDES * 0x1_0001;
        const _: () = assert!(4 * MAGNITUDES == 0x8000 / 2);
        distances(pair & 0x7fff_7fff, self.first) << 2 | pair >> 1 & SIGNS
    }

    /// Sigmoid at a place of the table.
    #[inline(always)]
    pub fn sigmoid(self, place: u32, activation: Activation, arithmetic: impl Arithmetic) -> f32 {
        let (magnitude, sign) = (self.first + place % MAGNITUDES, place / MAGNITUDES);
        let gate = f32::from_bits(magnitude << 16 | sign << 31);
        activation.sigmoid(gate, arithmetic)
    }
}

/// Distances of the magnitudes in both halves from `first`, at least 0 and at most [`LAST`].
#[inline(always)]
pub fn distances(magnitudes: u32, first: u32) -> u32 {
    let distance = |magnitude: u32| magnitude.saturating_sub(first).min(LAST);
    distance(magnitudes & 0xffff) | distance(magnitudes >> 16) << 16
}
