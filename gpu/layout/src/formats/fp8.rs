//! Blockwise FP8: e4m3 with one f32 scale for every 128 elements, the same bits on every machine.
//!
//! `scale = max(amax, 1e-4) / 448`, `value = e4m3(clamp(x / scale, ±448))`. The floor keeps all-zero
//! groups finite; it and the group size are DeepSeek-V3's (arXiv 2412.19437, section 3.3.2).
//! e4m3 has 4 exponent bits (bias 7), 3 mantissa bits, no infinities, and one NaN a sign
//! (Micikevicius et al., "FP8 Formats for Deep Learning", arXiv 2209.05433).
//!
//! A NaN element becomes NaN and does not count for `amax`. If an element is infinite, so is the
//! scale; infinite elements become NaN and the others 0. As 0 times infinity is NaN, the whole group
//! decodes to NaN.

use super::arithmetic::Arithmetic;

/// Elements that share a scale.
pub const GROUP: u32 = 128;
/// The largest finite e4m3 (arXiv 2209.05433, table 1).
pub const MAX: f32 = 448.0;
/// Lower bound of `amax`.
pub const AMAX_FLOOR: f32 = 1e-4;

/// The scale of a group with largest magnitude `amax`.
#[inline(always)]
pub fn scale(amax: f32) -> f32 {
    // Not `f32::max`, whose NaN handling is a library call on some targets; `amax` is not NaN.
    let amax = if amax > AMAX_FLOOR { amax } else { AMAX_FLOOR };
    amax / MAX
}

/// Divides by a scale with three instructions an element, to the same e4m3 as a division.
///
/// One Newton step on a quotient whose remainder is exact (Markstein, "Computation of elementary functions on
/// the IBM RISC System/6000", IBM J. Res. Dev. 34, 1990). A test compares it with the division for every BF16
/// and every mantissa of `amax`.
#[derive(Clone, Copy, Debug)]
pub struct Divisor {
    inverse: f32,
    /// The scale; 0 if it is infinite, so that the remainder is the element itself.
    scale: f32,
}

impl Divisor {
    /// Divisor for `scale`, which is positive.
    #[inline(always)]
    pub fn new(scale: f32) -> Self {
        Self {
            inverse: 1.0 / scale,
            scale: if scale < f32::INFINITY { scale } else { 0.0 },
        }
    }

    /// `value / scale`.
    #[inline(always)]
    pub fn divide(self, value: f32, arithmetic: impl Arithmetic) -> f32 {
        let quotient = value * self.inverse;
        // Negated twice, so that a zero keeps its sign through both sums.
        let excess = arithmetic.multiply_add(quotient, self.scale, -value);
        arithmetic.multiply_add(-excess, self.inverse, quotient)
    }
}

/// The larger magnitude of `amax` and `value`; a NaN does not count.
#[inline(always)]
pub fn larger(amax: f32, value: f32) -> f32 {
    let magnitude = value.abs();
    if magnitude > amax { magnitude } else { amax }
}

/// `value` as e4m3: rounded to nearest even, saturating at ±448, NaN as `0x7f`. The same bits as each half of
/// PTX's `cvt.rn.satfinite.e4m3x2.f32`.
pub fn e4m3_bits(value: f32) -> u8 {
    let bits = value.to_bits();
    let sign = (bits >> 24) as u8 & 0x80;
    let magnitude = bits & 0x7fff_ffff;
    if magnitude > 0x7f80_0000 {
        return 0x7f;
    }
    if f32::from_bits(magnitude) >= MAX {
        return sign | 0x7e;
    }
    // Below 2^-6 the spacing of values is 2^-9: adding 2^14 makes f32's own rounding the right one.
    if magnitude < 0x3c80_0000 {
        let rounded = f32::from_bits(magnitude) + 16_384.0;
        return sign | (rounded.to_bits() & 0xf) as u8;
    }
    // Drop 20 mantissa bits, to nearest even, and move the bias from 127 to 7.
    let rounded = magnitude + 0x7_ffff + (magnitude >> 20 & 1);
    sign | ((rounded >> 20) - (120 << 3)) as u8
}

/// The value of an e4m3: exact.
#[inline(always)]
pub fn f32_of_e4m3_bits(bits: u8) -> f32 {
    // Its exponent and mantissa in the places of f32's, whose bias is larger by 120: the product is exact,
    // for subnormals too.
    const TWO_TO_120: f32 = f32::from_bits((127 + 120) << 23);
    let magnitude = f32::from_bits((bits as u32 & 0x7f) << 20) * TWO_TO_120;
    let magnitude = if bits & 0x7f == 0x7f {
        f32::NAN
    } else {
        magnitude
    };
    f32::from_bits(magnitude.to_bits() | (bits as u32 & 0x80) << 24)
}
