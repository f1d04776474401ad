//! Conversions of sums to the types they are stored as, and of BF16 to f32: the same bits on every machine.

use half::{bf16, f16};

/// `value` rounded to BF16, to nearest even; every NaN becomes `0x7fff`, as the PTX instruction
/// `cvt.rn.bf16.f32` does (PTX ISA, "cvt": the result of a NaN input is canonical NaN).
pub fn bf16_bits(value: f32) -> u16 {
    if value.is_nan() {
        0x7fff
    } else {
        bf16::from_f32(value).to_bits()
    }
}

/// The f32 of a BF16's bits: exact.
pub const fn f32_of_bf16_bits(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// `value` rounded to half precision, to nearest even, infinity if it is too large; every NaN becomes
/// `0x7fff`, as the PTX instruction `cvt.rn.f16.f32` does (PTX ISA, "cvt").
pub fn f16_bits(value: f32) -> u16 {
    if value.is_nan() {
        0x7fff
    } else {
        f16::from_f32(value).to_bits()
    }
}

/// The bits of `value`; every NaN becomes `0x7fff_ffff`, as results of a GPU's arithmetic are (PTX ISA,
/// "add").
pub const fn f32_bits(value: f32) -> u32 {
    if value.is_nan() {
        0x7fff_ffff
    } else {
        value.to_bits()
    }
}
