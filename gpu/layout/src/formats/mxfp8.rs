//! MXFP8: e4m3 with one e8m0 scale for every 32 elements, the same bits on every machine.
//!
//! `scale = e8m0_up(amax · f32(1/448))`, `code = e4m3(x · 1/scale)`, each product rounded to f32. Format and
//! group size are OCP Microscaling Formats (MX) Specification 1.0, section 5.2; rounding the scale up, unlike
//! the specification's example, keeps `amax` from saturating ("Recipes for Pre-training LLMs with MXFP8",
//! arXiv 2506.08027).
//!
//! | group | scale | codes | decodes to |
//! |---|---|---|---|
//! | all zeros | 2^-127 | zeros, with their signs | zeros |
//! | has a NaN | from the other elements | `0x7f` for the NaN alone | NaN there |
//! | has an infinity | NaN | `0x7f` for all | NaN |
//! | `amax` up to 448 · 2^-127 | 2^-127 | as any | within e4m3's error |
//! | largest finite `amax` | 2^120 | as any | finite |

use super::{e8m0, fp8};

/// Elements that share a scale (OCP MX 1.0, table 1).
pub const GROUP: u32 = 32;

/// The scale's code of a group with largest magnitude `amax`; take it with
/// [`fp8::larger`], for which a NaN does not count.
#[inline(always)]
pub fn scale_bits(amax: f32) -> u8 {
    // One rounding in the reciprocal, one in the product, as in other libraries' kernels.
    e8m0::e8m0_up(amax * (1.0 / fp8::MAX))
}

/// Factor of elements before [`fp8::e4m3_bits`]: one over the scale, but 0 if `amax` is 0. NaN if `amax` is
/// infinite.
#[inline(always)]
pub fn multiplier(amax: f32, scale: u8) -> f32 {
    if amax == 0.0 {
        0.0
    } else {
        e8m0::reciprocal(scale)
    }
}

/// The value of an element: e4m3 times scale, exact. No scale of [`scale_bits`] leads to 2^128 or more, which
/// no f32 holds.
#[inline(always)]
pub fn dequantised(code: u8, scale: u8) -> f32 {
    fp8::f32_of_e4m3_bits(code) * e8m0::f32_of_e8m0_bits(scale)
}
