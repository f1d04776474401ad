//! The gated activation between an expert's two matrix multiplications, the same bits on every
//! machine: `silu(gate) * up` with `silu(x) = x / (1 + exp(-x))` (Elfwing, Uchibe, Doya, "Sigmoid-
//! Weighted Linear Units", arXiv 1702.03118; as a gate: Shazeer, "GLU Variants Improve
//! Transformer", arXiv 2002.05202), and the clamped form of gpt-oss ("swigluoai").
//!
//! All arithmetic is f32, each operation rounded to nearest even; contracted operations are written as
//! [`Arithmetic::multiply_add`]. Against f64 the relative error is below `2^-20 + |x| 2^-24`, where `x` is
//! the sigmoid's argument, unless the sigmoid or the result is subnormal (a test checks every BF16 gate). A
//! NaN yields NaN; so does a gate of minus infinity, since its product with 0 has no value. A GPU looks the
//! sigmoid up (see [`sigmoids`]), which changes no bit.

pub mod sigmoids;

use crate::formats::arithmetic::Arithmetic;

/// Gated activation, a function of gate and up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// `silu(gate) * up`.
    Silu,
    /// `(clamp(up, -limit, limit) + 1) * g * sigmoid(alpha * g)` with `g = min(gate, limit)`.
    Clamped {
        /// Steepness of the sigmoid; gpt-oss has 1.702.
        alpha: f32,
        /// Bound of gate and up, above 0, infinity included; gpt-oss has 7.
        limit: f32,
    },
}

impl Activation {
    /// Returns the activation of one element.
    #[inline(always)]
    pub fn apply(self, gate: f32, up: f32, arithmetic: impl Arithmetic) -> f32 {
        self.with_sigmoid(gate, self.sigmoid(gate, arithmetic), up, arithmetic)
    }

    /// The sigmoid that is part of the activation, a function of the gate alone; any number for NaN.
    #[inline(always)]
    pub fn sigmoid(self, gate: f32, arithmetic: impl Arithmetic) -> f32 {
        match self {
            Self::Silu => sigmoid(gate, arithmetic),
            Self::Clamped { alpha, limit } => {
                sigmoid(alpha * arithmetic.at_most(gate, limit), arithmetic)
            }
        }
    }

    /// Returns the activation of a gate whose [`sigmoid`](Self::sigmoid) is known.
    #[inline(always)]
    pub fn with_sigmoid(
        self,
        gate: f32,
        sigmoid: f32,
        up: f32,
        arithmetic: impl Arithmetic,
    ) -> f32 {
        match self {
            Self::Silu => gate * sigmoid * up,
            Self::Clamped { limit, .. } => {
                let gate = arithmetic.at_most(gate, limit);
                let up = arithmetic.at_least(arithmetic.at_most(up, limit), -limit);
                (up + 1.0) * (gate * sigmoid)
            }
        }
    }
}

/// Factor that keeps powers of two away from the ends of f32.
const SCALE: f32 = 1.0 / 65_536.0;

/// `1 / (1 + exp(-x))`; any number for NaN.
#[inline(always)]
pub fn sigmoid(x: f32, arithmetic: impl Arithmetic) -> f32 {
    let denominator = scaled_exp_of_minus(x, arithmetic) + SCALE;
    SCALE * arithmetic.reciprocal(denominator)
}

/// `SCALE * exp(-x)`: `exp(-x) = 2^n * 2^r` with `|r| <= 1/2`.
///
/// Saturation keeps `n` and `r` in their bounds at no cost on a GPU: both derive from numbers between 0 and
/// 1. A NaN becomes a bound there: the activation multiplies the result with the NaN again.
#[inline(always)]
fn scaled_exp_of_minus(x: f32, arithmetic: impl Arithmetic) -> f32 {
    use core::f32::consts::LOG2_E;
    // The exponent, less by 16 for the scale. At the lower bound the sum does not change, at the
    // upper one the reciprocal is 0.
    const LOWEST: f32 = -66.0;
    const RANGE: f32 = 192.0;
    // Adding 1.5 * 2^23 rounds to an integer, which is then in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let fma = |a, b, c| arithmetic.multiply_add(a, b, c);
    let part = arithmetic.saturated_multiply_add(x, -LOG2_E / RANGE, (-16.0 - LOWEST) / RANGE);
    let shifted = fma(part, RANGE, ROUND + LOWEST);
    // (r + 1) / 2, since at the bounds r may be anything; all constants are exact.
    let half_less_n = fma(shifted, -0.5, 0.5 * (ROUND - 15.0));
    let s = arithmetic.saturated_multiply_add(x, -0.5 * LOG2_E, half_less_n);
    // The polynomial of degree 5 with the smallest largest relative error, 2^-23.6 (found by Remez'
    // exchange).
    let mut p = fma(4.248_471e-2, s, 4.859_688_5e-2);
    p = fma(p, s, 0.240_651_52);
    p = fma(p, s, 0.473_906_3);
    p = fma(p, s, 0.694_324_1);
    p = fma(p, s, 0.499_915_06);
    f32::from_bits(p.to_bits().wrapping_add(shifted.to_bits() << 23))
}
