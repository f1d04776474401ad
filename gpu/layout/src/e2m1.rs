//! e2m1, the four-bit float: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.
//!
//! A sign, 2 exponent bits (bias 1), 1 mantissa bit, no infinities, no NaN (OCP Microscaling
//! Formats (MX) Specification 1.0, section 5.3.3). Two codes stand in a byte: the even element in
//! the low half.
//!
//! GPUs before sm_100 have no instruction for it, so the conversion is made of nine integer and float
//! operations, with no table and no branch on the value.

/// The largest magnitude (OCP MX 1.0, section 5.3.3).
pub const MAX: f32 = 6.0;

/// `value` as a code in the low four bits: rounded to nearest even, saturating at ±6 (infinities
/// too), zeros keep their sign. NaN of either sign becomes +6, code 7. The same bits as PTX's
/// `cvt.rn.satfinite.e2m1x2.f32` gives for each of its halves (PTX ISA, "cvt": a format without
/// NaN gets its positive largest number).
#[inline(always)]
pub fn e2m1_bits(value: f32) -> u8 {
    code(if value.is_nan() { f32::NAN } else { value }) as u8
}

/// As [`e2m1_bits`], of a value that is no negative NaN.
#[inline(always)]
fn code(value: f32) -> u32 {
    // The smaller one that is a number.
    let magnitude = value.abs().min(MAX);
    // Codes are p/2 apart in [p, 2p), and below 1 as in [1, 2). Beside p·2^22 f32 has the same
    // spacing, so that its own rounding to nearest even is the right one.
    let power = f32::from_bits(magnitude.to_bits() & 0x7f80_0000).max(1.0);
    let rounded = (power * 4_194_304.0 + magnitude).to_bits();
    // How many p/2 it is stands in the low bits; two codes for every doubling of p, from 2^22's
    // exponent field, 149, on.
    let code = rounded.wrapping_add(rounded >> 22).wrapping_sub(149 << 1);
    code & 7 | value.to_bits() >> 28 & 8
}

/// Two elements as a byte: `even` in the low half.
#[inline(always)]
pub fn e2m1x2_bits(even: f32, odd: f32) -> u8 {
    e2m1_bits(even) | e2m1_bits(odd) << 4
}

/// Eight elements as a word, four bits each, the first lowest: as bytes in memory (both CPUs and
/// GPUs here are little-endian) every even element stands in a low half.
#[inline(always)]
pub fn e2m1x8_bits(values: [f32; 8]) -> u32 {
    e2m1x8_of_products(values.map(|value| if value.is_nan() { f32::NAN } else { value }))
}

/// As [`e2m1x8_bits`], where the values come from an arithmetic that has no negative NaN.
#[inline(always)]
pub fn e2m1x8_of_products(values: [f32; 8]) -> u32 {
    let [a, b, c, d, e, f, g, h] = values;
    let pair = |low, high| code(low) | code(high) << 4;
    pair(a, b) | pair(c, d) << 8 | pair(e, f) << 16 | pair(g, h) << 24
}

/// The value of the code in the low four bits of `bits`: exact. The high four are not looked at.
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
