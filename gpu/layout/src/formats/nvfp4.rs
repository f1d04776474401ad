//! NVFP4: e2m1 with one e4m3 scale for every 16 elements under a global f32 scale, the same bits
//! on every machine.
//!
//! `scale = e4m3(global · (amax · f32(1/6)))`, `multiplier = 1 / (f32(scale) · (1/global))`,
//! `code = e2m1(x · multiplier)`, and back `e2m1 · scale / global`; every operation is rounded to f32 in this
//! order. Format and group size are NVIDIA's ("Introducing NVFP4 for Efficient and Accurate Low-Precision
//! Inference", 2025; cuDNN and cuBLAS call it a block scale of 16). The association is that of the kernels in
//! TensorRT-LLM and vLLM (`cvt_warp_fp16_to_fp4`), whose reciprocals are approximate (`rcp.approx.ftz.f32`);
//! here they are correctly rounded.
//!
//! The global scale is either calibrated, one for the tensor, or one per row ([`inverse_global_bits`]) that
//! travels with the row as its BF16 inverse. A calibrated one is positive and normal, and so is its inverse:
//! 2^-126 to 2^126. Others do no harm: a multiplier that would not be finite is 0. With a scale that is not
//! 0, that happens only to groups of tiny elements: up to 6.4 · 2^-128, under a global scale above 2^118.
//!
//! e2m1 has neither NaN nor infinity:
//!
//! | group | scale | codes | decodes to |
//! |---|---|---|---|
//! | all zeros | 0 | zeros, with their signs | zeros |
//! | has a NaN | from the other elements (all NaN: 0) | 7 for the NaN | 6 · scale there |
//! | has an infinity, calibrated global scale | 448 | ±7 for it | ±6 · 448 / global there |
//! | has an infinity, global scale of the row | `0x7f`: NaN | 7 for it and a NaN, else zeros | NaN |
//! | without an infinity, in the row of one | 0 | 7 for a NaN, else zeros | NaN: the inverse is infinite |
//! | `amax` so small that the scale rounds to 0 | 0 | zeros | zeros |
//! | `scale / global`, rounded to f32, is 2^-128 or less | as any | zeros | zeros |
//! | `amax` above 6 · 448 / global | 448 | saturated | at most 6 · 448 / global |

use super::arithmetic::Arithmetic;
use super::float::{bf16_bits, f32_of_bf16_bits};
use super::{e2m1, fp8};

/// Elements that share a scale (NVIDIA, as above).
pub const GROUP: u32 = 16;
/// The largest magnitude under a global scale of 1: e2m1's 6 times e4m3's 448.
pub const MAX: f32 = e2m1::MAX * fp8::MAX;
/// Lower bound of the inverse of a row's global scale, 2^-126: the least normal f32 and BF16, so that its
/// reciprocal is finite.
pub const INVERSE_FLOOR: f32 = f32::MIN_POSITIVE;

/// The scale of a group with largest magnitude `amax` under the global scale `global`, before it is rounded
/// to e4m3; take `amax` with [`fp8::larger`], for which a NaN does not count.
#[inline(always)]
pub fn exact_scale(amax: f32, global: f32) -> f32 {
    global * (amax * (1.0 / e2m1::MAX))
}

/// The e4m3 scale of a group with largest magnitude `amax` under the global scale `global`, at most
/// 448.
#[inline(always)]
pub fn scale_bits(amax: f32, global: f32) -> u8 {
    fp8::e4m3_bits(exact_scale(amax, global))
}

/// Factor of elements before [`e2m1::e2m1_bits`], from the group's scale and `1.0 / global`: one division a
/// row, which is rounded and so not always the inverse that `global` was made of. 0 for a scale of 0, and if
/// the reciprocal would be infinite or NaN.
#[inline(always)]
pub fn multiplier(scale: u8, inverse_global: f32) -> f32 {
    finite_or_0(1.0 / (fp8::f32_of_e4m3_bits(scale) * inverse_global))
}

/// Returns the [`multiplier`] from the value of the scale. Unless that is 0 or NaN it is between 2^-9 and
/// 448, so its product with most inverses is a number whose reciprocal takes three instructions. All groups
/// under one global scale take the same branch.
#[inline(always)]
pub fn multiplier_of_value(scale: f32, inverse_global: f32, arithmetic: impl Arithmetic) -> f32 {
    const LEAST: f32 = f32::from_bits((127 - 117) << 23);
    const MOST: f32 = f32::from_bits((127 + 117) << 23);
    let product = scale * inverse_global;
    // From 2^-126 to 448 * 2^117, which is less than 2^126, or 0 or NaN.
    let reciprocal = if (LEAST..=MOST).contains(&inverse_global) {
        arithmetic.reciprocal(product)
    } else {
        1.0 / product
    };
    finite_or_0(reciprocal)
}

#[inline(always)]
fn finite_or_0(reciprocal: f32) -> f32 {
    // A comparison with NaN is false.
    if reciprocal < f32::INFINITY {
        reciprocal
    } else {
        0.0
    }
}

/// The value of an element, `code` in the low four bits, under a calibrated global scale:
/// e2m1 · scale is exact, the quotient rounded to f32.
#[inline(always)]
pub fn dequantised(code: u8, scale: u8, global: f32) -> f32 {
    e2m1::f32_of_e2m1_bits(code) * fp8::f32_of_e4m3_bits(scale) / global
}

/// The inverse of a row's own global scale, as BF16 bits, from the row's largest magnitude (a NaN does not
/// count): `row_max / 2688`, at least 2^-126, so that the row's largest scale is about 448; 1 for a row of
/// zeros.
#[inline(always)]
pub fn inverse_global_bits(row_max: f32) -> u16 {
    let quotient = row_max / MAX;
    let inverse = if row_max > 0.0 {
        if quotient > INVERSE_FLOOR {
            quotient
        } else {
            INVERSE_FLOOR
        }
    } else {
        1.0
    };
    bf16_bits(inverse)
}

/// A row's own global scale, `1 / f32(inverse)`: 0 for a row with an infinity.
#[inline(always)]
pub fn global_of_inverse(inverse: u16) -> f32 {
    1.0 / f32_of_bf16_bits(inverse)
}

/// The value of an element, `code` in the low four bits, under its row's own global scale, from its
/// BF16 inverse: e2m1 · scale is exact, the product rounded to f32.
#[inline(always)]
pub fn dequantised_by_row(code: u8, scale: u8, inverse: u16) -> f32 {
    e2m1::f32_of_e2m1_bits(code) * fp8::f32_of_e4m3_bits(scale) * f32_of_bf16_bits(inverse)
}
