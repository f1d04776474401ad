//! e2m1, the four-bit float: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.
//!
//! A sign, 2 exponent bits (bias 1), 1 mantissa bit, no infinities, no NaN (OCP Microscaling Formats (MX)
//! Specification 1.0, section 5.3.3). A byte holds two codes: the even element in the low half.
//!
//! GPUs before sm_100 have no instruction for it: [`e2m1x8_of_products`] computes the same codes with a few
//! additions and products.

use super::arithmetic::Arithmetic;

/// The largest magnitude (OCP MX 1.0, section 5.3.3).
pub const MAX: f32 = 6.0;

/// `value` as a code in the low four bits: rounded to nearest even, saturating at ±6 (infinities too); zeros
/// keep their sign. NaN of either sign becomes +6, code 7. The same bits as each half of PTX's
/// `cvt.rn.satfinite.e2m1x2.f32` (PTX ISA, "cvt": in a format without NaN it becomes the largest positive
/// number).
#[inline(always)]
pub fn e2m1_bits(value: f32) -> u8 {
    if value.is_nan() {
        return 7;
    }
    let x = value.abs();
    // Halfway between two codes the even one wins.
    let code = u8::from(x > 0.25)
        + u8::from(x >= 0.75)
        + u8::from(x > 1.25)
        + u8::from(x >= 1.75)
        + u8::from(x > 2.5)
        + u8::from(x >= 3.5)
        + u8::from(x > 5.0);
    code | u8::from(value.is_sign_negative()) << 3
}

/// Two elements as a byte: `even` in the low half.
#[inline(always)]
pub fn e2m1x2_bits(even: f32, odd: f32) -> u8 {
    e2m1_bits(even) | e2m1_bits(odd) << 4
}

/// Eight elements as a word, four bits each, the first lowest: as bytes in memory (CPUs and GPUs here are
/// little-endian) every even element is in a low half.
#[inline(always)]
pub fn e2m1x8_bits(values: [f32; 8]) -> u32 {
    let last_first = values.iter().rev();
    last_first.fold(0, |word, &value| word << 4 | u32::from(e2m1_bits(value)))
}

/// Encodes `values` times `multiplier` as [`e2m1x8_bits`] does, if no product is a negative NaN. Six
/// instructions an element, most of them additions and products, which a GPU issues at twice the rate of most
/// others (CUDA C++ Programming Guide, "Arithmetic Instructions").
#[inline(always)]
pub fn e2m1x8_of_products(values: [f32; 8], multiplier: f32) -> u32 {
    eight(values, |value| {
        let product = value * multiplier;
        let magnitude = product.abs().min(4.0);
        (BASE + magnitude, product * BEYOND)
    })
}

/// Encodes like [`e2m1x8_of_products`], if `multiplier` is a power of two, 2^-126 at least: its products are
/// exact wherever that matters, which saves an instruction an element.
#[inline(always)]
pub fn e2m1x8_of_scaled(values: [f32; 8], multiplier: f32, arithmetic: impl Arithmetic) -> u32 {
    // The largest number below `4 / multiplier`, which is finite; the sum is rounded to `BASE + 4`.
    let limit = f32::from_bits(0x7fff_ffff - multiplier.to_bits());
    // Exact even if it is subnormal, since `BEYOND` is a multiple of 4 units in its last place.
    let beyond = multiplier * BEYOND;
    eight(values, |value| {
        let magnitude = value.abs().min(limit);
        let beside_base = arithmetic.multiply_add(magnitude, multiplier, BASE);
        (beside_base, value * beyond)
    })
}

/// 2^23 - 2.
///
/// Below 2^23, numbers of this size are 1/2 apart, and above it 1: like e2m1 below and above 2. So `BASE`
/// plus a magnitude up to 4 is rounded as e2m1 is, ties to even included, and lands as many representable
/// numbers above `BASE` as the code says. Larger magnitudes, and NaN, count as 4 here.
const BASE: f32 = 8_388_606.0;

/// Just below 2/5: the product with a magnitude is rounded to 2 or more if the magnitude is above 5, at which
/// 4 becomes 6, and to less than 2 otherwise. From 2 on, and for NaN, bit 30 of an f32 is set.
const BEYOND: f32 = 0.4_f32.next_down();

/// Eight elements as codes, each from the sum of [`BASE`] and its magnitude, and from its product with
/// [`BEYOND`].
#[inline(always)]
fn eight(values: [f32; 8], of: impl Fn(f32) -> (f32, f32)) -> u32 {
    let put = |(word, tops): (u32, u32), value: f32| {
        let (beside_base, beyond) = of(value);
        (
            (word << 4).wrapping_add(beside_base.to_bits()),
            tops << 4 | beyond.to_bits() >> 28,
        )
    };
    // Spelled out: the compiler does not unroll a loop here, and runs out of registers.
    let [a, b, c, d, e, f, g, h] = values;
    let last = put(put(put(put((0, 0), h), g), f), e);
    let (word, tops) = put(put(put(put(last, d), c), b), a);
    const BASES: u32 = BASE.to_bits().wrapping_mul(0x1111_1111);
    // Signs in their places, and 1 more for magnitudes above 5.
    let more = tops & 0x8888_8888 | tops >> 2 & 0x1111_1111;
    word.wrapping_sub(BASES).wrapping_add(more)
}

/// The value of the code in the low four bits of `bits`: exact. The high four are ignored.
#[inline(always)]
pub fn f32_of_e2m1_bits(bits: u8) -> f32 {
    let sign = (u32::from(bits) & 8) << 28;
    let magnitude = u32::from(bits) & 7;
    // 0 and 0.5 are subnormal; the others have f32's exponent 126 higher.
    let value = if magnitude < 2 {
        magnitude * 0x3f00_0000
    } else {
        (magnitude << 22) + (126 << 23)
    };
    f32::from_bits(sign | value)
}
