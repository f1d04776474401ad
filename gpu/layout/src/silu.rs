//! The gated activation between an expert's two matrix multiplications, the same bits on every
//! machine: `silu(gate) * up` with `silu(x) = x / (1 + exp(-x))` (Elfwing, Uchibe, Doya, "Sigmoid-
//! Weighted Linear Units", arXiv 1702.03118; as a gate: Shazeer, "GLU Variants Improve
//! Transformer", arXiv 2002.05202), and the clamped form of gpt-oss ("swigluoai").
//!
//! All arithmetic is f32, each operation rounded to nearest even; what is contracted is written as
//! [`MultiplyAdd`]. Against f64
//! the relative error is below 2^-20, in the clamped form `2^-20 + |alpha gate| 2^-24`, wherever the
//! result is not subnormal (a test looks at every BF16 gate). A NaN gives NaN; a gate of minus infinity too, since its product with 0 has no value.

/// What is done with gate and up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// `silu(gate) * up`.
    Silu,
    /// `(clamp(up, -limit, limit) + 1) * g * sigmoid(alpha * g)` with `g = min(gate, limit)`.
    Clamped {
        /// Steepness of the sigmoid; gpt-oss has 1.702.
        alpha: f32,
        /// Bound of gate and up; gpt-oss has 7.
        limit: f32,
    },
}

/// `a * b + c`, rounded once, to nearest even: an instruction on every GPU, `f32::mul_add` elsewhere.
pub trait MultiplyAdd: Fn(f32, f32, f32) -> f32 + Copy {}
impl<F: Fn(f32, f32, f32) -> f32 + Copy> MultiplyAdd for F {}

impl Activation {
    /// Of one element.
    #[inline(always)]
    pub fn apply(self, gate: f32, up: f32, fma: impl MultiplyAdd) -> f32 {
        match self {
            Self::Silu => gate * sigmoid(gate, fma) * up,
            Self::Clamped { alpha, limit } => {
                // Comparisons that are false for NaN, which passes through.
                let gate = if gate > limit { limit } else { gate };
                let up = if up > limit { limit } else { up };
                let up = if up < -limit { -limit } else { up };
                (up + 1.0) * (gate * sigmoid(alpha * gate, fma))
            }
        }
    }
}

/// `1 / (1 + exp(-x))`, by way of an exponential that cannot overflow.
#[inline(always)]
fn sigmoid(x: f32, fma: impl MultiplyAdd) -> f32 {
    let decay = exp_of_negative(-x.abs(), fma);
    let numerator = if x < 0.0 { decay } else { 1.0 };
    numerator * reciprocal(1.0 + decay, fma)
}

/// `1 / d` for `d` from 1 to 2: the quadratic with the smallest largest error, 1/99 (a Chebyshev
/// polynomial's), and two steps of Newton's, each of which squares the error. NaN for NaN.
#[inline(always)]
fn reciprocal(d: f32, fma: impl MultiplyAdd) -> f32 {
    let mut y = fma(d, 32.0 / 99.0, -144.0 / 99.0);
    y = fma(d, y, 210.0 / 99.0);
    y = fma(y, fma(-d, y, 1.0), y);
    fma(y, fma(-d, y, 1.0), y)
}

/// `exp(x)` for `x` up to 0: `2^n * exp(r)` with `|r| <= ln(2) / 2`. The polynomial and the split of
/// ln(2) are those of Cephes' `expf` (Moshier, netlib.org/cephes).
#[inline(always)]
fn exp_of_negative(x: f32, fma: impl MultiplyAdd) -> f32 {
    // Below, the result is 0; a NaN passes through.
    let x = if x < -104.0 { -104.0 } else { x };
    // Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let shifted = fma(x, core::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = fma(n, -0.693_359_4, x);
    let r = fma(n, 2.121_944_4e-4, r);
    let mut p = fma(1.987_569_2e-4, r, 1.398_199_9e-3);
    p = fma(p, r, 8.333_452e-3);
    p = fma(p, r, 4.166_579_6e-2);
    p = fma(p, r, 0.166_666_66);
    p = fma(p, r, 0.5);
    let power = fma(p * r, r, r) + 1.0;
    // The exponent grows by n + 24, which keeps it that of a normal number; 2^-24 takes the rest
    // back, rounding where the result is subnormal.
    const TWO_TO_MINUS_24: f32 = f32::from_bits((127 - 24) << 23);
    let exponent = shifted
        .to_bits()
        .wrapping_sub(ROUND.to_bits())
        .wrapping_add(24)
        << 23;
    f32::from_bits(power.to_bits().wrapping_add(exponent)) * TWO_TO_MINUS_24
}
