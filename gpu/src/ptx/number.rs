//! Number conversions.

use core::arch::asm;

/// `cvt.rn.bf16x2.f32`: two f32 as two BF16, `low` in the low half. Rounds to nearest even;
/// every NaN becomes `0x7fff` (PTX ISA, "cvt").
#[inline(always)]
pub fn bf16_pair(low: f32, high: f32) -> u32 {
    let pair;
    // SAFETY: arithmetic on registers.
    unsafe {
        asm!("cvt.rn.bf16x2.f32 {}, {}, {};", out(reg32) pair, in(reg32) high, in(reg32) low,
            options(pure, nomem, nostack, preserves_flags));
    }
    pair
}

/// The two f32 of two BF16, the low half first: exact.
#[inline(always)]
pub fn f32_pair(pair: u32) -> (f32, f32) {
    (
        f32::from_bits(pair << 16),
        f32::from_bits(pair & 0xffff_0000),
    )
}

/// `mul.rn.f32` then `add.rn.f32`: product and sum each rounded to nearest even. With the
/// rounding written out, ptxas may not fuse them (PTX ISA, "add", "mul").
#[inline(always)]
pub fn add_product(sum: f32, weight: f32, value: f32) -> f32 {
    let result;
    // SAFETY: arithmetic on registers.
    unsafe {
        asm!("{{ .reg .f32 p; mul.rn.f32 p, {}, {}; add.rn.f32 {}, {}, p; }}",
            in(reg32) weight, in(reg32) value, out(reg32) result, in(reg32) sum,
            options(pure, nomem, nostack, preserves_flags));
    }
    result
}
