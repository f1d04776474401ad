//! e8m0, the power-of-two scale: code `c` is 2^(c - 127), `0xff` is NaN.
//!
//! No sign, no mantissa, no zero, no infinity (OCP Microscaling Formats (MX) Specification 1.0,
//! section 5.4.1). Codes 0 and 254 are powers whose f32, or whose reciprocal's f32, is subnormal
//! but exact; targets that flush subnormals to zero would break them.

/// The code of NaN (OCP MX 1.0, section 5.4.1).
pub const NAN: u8 = 0xff;

/// The f32 with bits of 2^-127, half the least normal one.
const LEAST: u32 = 0x0040_0000;

/// The code of the least power of two that is not less than `value`, ignoring its sign: `0x403f_ffff` (just
/// below 3) becomes 2^2, and 0 becomes 2^-127, the least there is. Values above 2^127 become [`NAN`], and so
/// do infinities and NaN.
///
/// Rounding up keeps a group's largest element from saturating.
#[inline(always)]
pub fn e8m0_up(value: f32) -> u8 {
    let magnitude = value.to_bits() & 0x7fff_ffff;
    if magnitude <= LEAST {
        return 0;
    }
    // Any mantissa bit carries into the exponent, even from a subnormal above 2^-127.
    let exponent = (magnitude + 0x7f_ffff) >> 23;
    if exponent > 0xff { NAN } else { exponent as u8 }
}

/// The value of a code: exact, NaN for [`NAN`].
#[inline(always)]
pub fn f32_of_e8m0_bits(bits: u8) -> f32 {
    f32::from_bits(f32_bits(bits))
}

/// The bits of the value of a code, `0x7fff_ffff` for [`NAN`].
#[inline(always)]
pub const fn f32_bits(code: u8) -> u32 {
    match code {
        0 => LEAST,
        NAN => 0x7fff_ffff,
        code => (code as u32) << 23,
    }
}

/// One over the value of a code: exact, NaN for [`NAN`].
#[inline(always)]
pub fn reciprocal(bits: u8) -> f32 {
    // -(c - 127) = (254 - c) - 127, and 254 - 255 wraps to NaN's own code.
    f32_of_e8m0_bits(254_u8.wrapping_sub(bits))
}
