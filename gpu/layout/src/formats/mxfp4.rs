//! MXFP4: e2m1 with one e8m0 scale for every 32 elements, the same bits on every machine.
//!
//! `exponent = clamp(biased_exponent(bits(amax) + 2^21) - 2, 0, 254)`, `scale = 2^(exponent - 127)`,
//! `code = e2m1(x / scale)`. Format and group size are OCP Microscaling Formats (MX) Specification
//! 1.0, section 5.2. The scale is the "even" mode of AMD Quark's MX quantisation: `amax` is first
//! rounded to e2m1's precision, halves up, so that 1.75·2^n and more counts as 2^(n+1); then
//! 2 is the exponent of e2m1's largest power, 4. Elements come to less than 7 and saturate at 6.
//!
//! e2m1 has neither NaN nor infinity:
//!
//! | group | scale | codes | decodes to |
//! |---|---|---|---|
//! | all zeros | 2^-127 | zeros, with their signs | zeros |
//! | has a NaN | from the other elements (all NaN: 2^-127) | 7 for the NaN | 6 · scale there |
//! | has an infinity | 2^126 | ±7 for it | infinity in f32; finite elements up to 2^124 become 0 |
//! | subnormal `amax` | 2^-127 | as any | multiples of 2^-128 |
//! | largest finite `amax` | 2^126 | 6, that is 4 | 2^128, which is infinity in f32 |

use super::{e2m1, e8m0};

/// Elements that share a scale (OCP MX 1.0, table 1).
pub const GROUP: u32 = 32;

/// The scale's code of a group with largest magnitude `amax`; take it with
/// [`fp8::larger`](crate::fp8::larger), for which a NaN does not count.
#[inline(always)]
pub fn scale_bits(amax: f32) -> u8 {
    // 2^21 is half of e2m1's last mantissa bit in f32: bit 23 - 1 - 1.
    let exponent = ((amax.to_bits() & 0x7fff_ffff) + (1 << 21)) >> 23;
    // At most 255 - 2 for infinity, so only the lower clamp is left to do; a NaN that got here in spite of
    // the above becomes 254 at most.
    exponent.saturating_sub(2) as u8
}

/// Factor of elements before [`e2m1::e2m1_bits`]: one over the scale, exact, so that multiplying equals
/// dividing. [`scale_bits`] is at most 253, and no such scale has a subnormal reciprocal:
/// [`e8m0::reciprocal`] without its ends.
#[inline(always)]
pub fn multiplier(scale: u8) -> f32 {
    f32::from_bits((254_u32 << 23).wrapping_sub(u32::from(scale) << 23))
}

/// The value of an element, `code` in the low four bits: e2m1 times scale. Exact, but infinity from 2^128 on.
#[inline(always)]
pub fn dequantised(code: u8, scale: u8) -> f32 {
    e2m1::f32_of_e2m1_bits(code) * e8m0::f32_of_e8m0_bits(scale)
}
