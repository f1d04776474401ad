//! Number conversions.

use core::arch::asm;

use ferry_layout::Arithmetic;

// Not assembly: negated operands cost nothing only if the compiler sees them.
unsafe extern "C" {
    #[link_name = "llvm.fma.f32"]
    fn llvm_multiply_add(a: f32, b: f32, c: f32) -> f32;
}

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

/// `cvt.rn.f16x2.f32`: two f32 as two of half precision, `low` in the low half. Rounds to nearest even;
/// numbers too large become infinity, every NaN `0x7fff` (PTX ISA, "cvt").
#[inline(always)]
pub fn f16_pair(low: f32, high: f32) -> u32 {
    let pair;
    // SAFETY: arithmetic on registers.
    unsafe {
        asm!("cvt.rn.f16x2.f32 {}, {}, {};", out(reg32) pair, in(reg32) high, in(reg32) low,
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

/// `dp4a`, unsigned: the products of the bytes of two words, added to a third.
#[inline(always)]
pub fn dot_bytes(a: u32, b: u32, sum: u32) -> u32 {
    let result;
    // SAFETY: arithmetic on registers.
    unsafe {
        asm!("dp4a.u32.u32 {}, {}, {}, {};", out(reg32) result, in(reg32) a, in(reg32) b,
            in(reg32) sum, options(pure, nomem, nostack, preserves_flags));
    }
    result
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

/// `fma.rn.f32`: `a * b + c`, rounded once, to nearest even.
#[inline(always)]
pub fn multiply_add(a: f32, b: f32, c: f32) -> f32 {
    // SAFETY: arithmetic on registers.
    unsafe { llvm_multiply_add(a, b, c) }
}

/// `fma.rn.sat.f32`: [`multiply_add`] clamped to 0..=1; NaN becomes 0 (PTX ISA, "fma").
#[inline(always)]
fn saturated_multiply_add(a: f32, b: f32, c: f32) -> f32 {
    let result;
    // SAFETY: arithmetic on registers.
    unsafe {
        asm!("fma.rn.sat.f32 {}, {}, {}, {};", out(reg32) result, in(reg32) a, in(reg32) b,
            in(reg32) c, options(pure, nomem, nostack, preserves_flags));
    }
    result
}

/// Declares a function for one instruction of two f32.
macro_rules! of_two {
    ($(#[$doc:meta])* $name:ident, $instruction:literal) => {
        $(#[$doc])*
        #[inline(always)]
        fn $name(a: f32, b: f32) -> f32 {
            let result;
            // SAFETY: arithmetic on registers.
            unsafe {
                asm!(concat!($instruction, " {}, {}, {};"), out(reg32) result, in(reg32) a,
                    in(reg32) b, options(pure, nomem, nostack, preserves_flags));
            }
            result
        }
    };
}

of_two!(
    /// `min.NaN.f32`: the lesser one; NaN if one is (PTX ISA, "min").
    at_most,
    "min.NaN.f32"
);
of_two!(
    /// `max.NaN.f32`: the greater one; NaN if one is (PTX ISA, "max").
    at_least,
    "max.NaN.f32"
);

/// `1 / d` for a positive normal `d`, rounded to nearest even; 0 if `d` is above 2^126: an approximation
/// within a unit in the last place (PTX ISA, "rcp.approx.ftz.f32") and a Newton step, which makes it the
/// nearest number (Markstein, "Computation of elementary functions on the IBM RISC System/6000", IBM J. Res.
/// Dev. 34, 1990). One mantissa needs more: if all its bits are ones, the approximation must be the upper
/// neighbour of `1 / d`. `ferry-tests gpu` compares every mantissa.
#[inline(always)]
pub fn reciprocal(d: f32) -> f32 {
    let near: f32;
    // SAFETY: arithmetic on registers.
    unsafe {
        asm!("rcp.approx.ftz.f32 {}, {};", out(reg32) near, in(reg32) d,
            options(pure, nomem, nostack, preserves_flags));
    }
    multiply_add(near, multiply_add(-d, near, 1.0), near)
}

/// Arithmetic with a GPU's instructions.
#[derive(Clone, Copy)]
pub struct Instructions;

impl Arithmetic for Instructions {
    #[inline(always)]
    fn multiply_add(self, a: f32, b: f32, c: f32) -> f32 {
        multiply_add(a, b, c)
    }

    #[inline(always)]
    fn reciprocal(self, d: f32) -> f32 {
        reciprocal(d)
    }

    #[inline(always)]
    fn at_most(self, value: f32, limit: f32) -> f32 {
        at_most(value, limit)
    }

    #[inline(always)]
    fn at_least(self, value: f32, limit: f32) -> f32 {
        at_least(value, limit)
    }

    #[inline(always)]
    fn saturated_multiply_add(self, a: f32, b: f32, c: f32) -> f32 {
        saturated_multiply_add(a, b, c)
    }
}

/// [`sigmoids::distances`](ferry_layout::sigmoids::distances) by `add.s16x2` and `min.s16x2.relu`, which are
/// one instruction of the machine (PTX ISA, "add", "min"; sm_90 and later). Magnitudes and `first` are not
/// negative, so no difference overflows.
#[cfg(ferry_sm = "90")]
#[inline(always)]
pub fn distances(magnitudes: u32, first: u32) -> u32 {
    const BOTH: u32 = 0x1_0001;
    let negative = first.wrapping_neg() & 0xffff;
    let distances;
    // SAFETY: arithmetic on registers.
    unsafe {
        asm!("{{ .reg .b32 s; add.s16x2 s, {}, {}; min.s16x2.relu {}, s, {}; }}",
            in(reg32) magnitudes, in(reg32) negative * BOTH, out(reg32) distances,
            in(reg32) ferry_layout::sigmoids::LAST * BOTH,
            options(pure, nomem, nostack, preserves_flags));
    }
    distances
}

/// [`sigmoids::distances`](ferry_layout::sigmoids::distances), if there are no instructions for it.
#[cfg(not(ferry_sm = "90"))]
#[inline(always)]
pub fn distances(magnitudes: u32, first: u32) -> u32 {
    ferry_layout::sigmoids::distances(magnitudes, first)
}

/// The low and the high half of a word. The low one by `mad.lo`: a product, since the pipe of logical
/// instructions is busier (CUDA C++ Programming Guide, "Arithmetic Instructions").
#[inline(always)]
pub fn halves(word: u32) -> (u32, u32) {
    let (low, high): (u32, u32);
    high = word >> 16;
    // SAFETY: arithmetic on registers.
    unsafe {
        asm!("mad.lo.u32 {}, {}, 0xffff0000, {};", out(reg32) low, in(reg32) high, in(reg32) word,
            options(pure, nomem, nostack, preserves_flags));
    }
    (low, high)
}

/// `prmt`: the low halves of two words, the first one's in the low half (PTX ISA, "prmt").
#[inline(always)]
pub fn low_halves(first: u32, second: u32) -> u32 {
    let pair;
    // SAFETY: arithmetic on registers.
    unsafe {
        asm!("prmt.b32 {}, {}, {}, 0x5410;", out(reg32) pair, in(reg32) first, in(reg32) second,
            options(pure, nomem, nostack, preserves_flags));
    }
    pair
}

/// `max.f32` of magnitudes: the larger one, and the other if one is NaN (PTX ISA, "max"), as in
/// `fp8::larger`.
#[inline(always)]
pub fn larger(amax: f32, value: f32) -> f32 {
    let larger;
    // SAFETY: arithmetic on registers.
    unsafe {
        asm!("{{ .reg .f32 m, n; abs.f32 m, {}; abs.f32 n, {}; max.f32 {}, n, m; }}",
            in(reg32) value, in(reg32) amax, out(reg32) larger,
            options(pure, nomem, nostack, preserves_flags));
    }
    larger
}

/// Four f32 as e4m3, `a` in the lowest byte: rounded to nearest even, saturating at ±448, NaN
/// `0x7f`. The instruction is `cvt.rn.satfinite.e4m3x2.f32` (PTX ISA, "cvt"; sm_89 and later).
#[cfg(ferry_sm = "89")]
#[inline(always)]
pub fn e4m3_quad(a: f32, b: f32, c: f32, d: f32) -> u32 {
    let quad;
    // SAFETY: arithmetic on registers.
    unsafe {
        asm!("{{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, {}, {};",
            "cvt.rn.satfinite.e4m3x2.f32 h, {}, {}; mov.b32 {}, {{l, h}}; }}",
            in(reg32) b, in(reg32) a, in(reg32) d, in(reg32) c, out(reg32) quad,
            options(pure, nomem, nostack, preserves_flags));
    }
    quad
}

/// An f32 as e4m3, as in [`e4m3_quad`].
#[cfg(ferry_sm = "89")]
#[inline(always)]
pub fn e4m3(value: f32) -> u8 {
    let pair: u16;
    // SAFETY: arithmetic on registers.
    unsafe {
        asm!("cvt.rn.satfinite.e4m3x2.f32 {}, 0f00000000, {};", out(reg16) pair, in(reg32) value,
            options(pure, nomem, nostack, preserves_flags));
    }
    pair as u8
}

/// An f32 as e4m3, if there is no instruction for it.
#[cfg(not(ferry_sm = "89"))]
#[inline(always)]
pub fn e4m3(value: f32) -> u8 {
    ferry_layout::fp8::e4m3_bits(value)
}

/// The value of an e4m3, exact: `cvt.rn.f16x2.e4m3x2`, since f16 has all of them, then `cvt.f32.f16`
/// (PTX ISA, "cvt"; sm_89 and later).
#[cfg(ferry_sm = "89")]
#[inline(always)]
pub fn f32_of_e4m3(code: u8) -> f32 {
    let value;
    // SAFETY: arithmetic on registers.
    unsafe {
        asm!("{{ .reg .b16 l, h; .reg .b32 p; cvt.rn.f16x2.e4m3x2 p, {}; mov.b32 {{l, h}}, p;",
            "cvt.f32.f16 {}, l; }}", in(reg16) code as u16, out(reg32) value,
            options(pure, nomem, nostack, preserves_flags));
    }
    value
}

/// The value of an e4m3, if there is no instruction for it.
#[cfg(not(ferry_sm = "89"))]
#[inline(always)]
pub fn f32_of_e4m3(code: u8) -> f32 {
    ferry_layout::fp8::f32_of_e4m3_bits(code)
}

/// Four f32 as e4m3, `a` in the lowest byte, if there is no instruction for it.
#[cfg(not(ferry_sm = "89"))]
#[inline(always)]
pub fn e4m3_quad(a: f32, b: f32, c: f32, d: f32) -> u32 {
    use ferry_layout::fp8::e4m3_bits;
    u32::from_le_bytes([e4m3_bits(a), e4m3_bits(b), e4m3_bits(c), e4m3_bits(d)])
}

/// Eight f32 times `multiplier` as e2m1, the first in the lowest four bits: rounded to nearest
/// even, saturating at ±6, NaN 6. The instruction is `cvt.rn.satfinite.e2m1x2.f32` (PTX ISA,
/// "cvt"; sm_100a).
#[cfg(ferry_sm = "100a")]
#[inline(always)]
pub fn e2m1_eight(values: [f32; 8], multiplier: f32) -> u32 {
    let [a, b, c, d, e, f, g, h] = values.map(|value| value * multiplier);
    let eight;
    // SAFETY: arithmetic on registers.
    unsafe {
        asm!("{{ .reg .b8 p, q, r, s; cvt.rn.satfinite.e2m1x2.f32 p, {}, {};",
            "cvt.rn.satfinite.e2m1x2.f32 q, {}, {}; cvt.rn.satfinite.e2m1x2.f32 r, {}, {};",
            "cvt.rn.satfinite.e2m1x2.f32 s, {}, {}; mov.b32 {}, {{p, q, r, s}}; }}",
            in(reg32) b, in(reg32) a, in(reg32) d, in(reg32) c, in(reg32) f, in(reg32) e,
            in(reg32) h, in(reg32) g, out(reg32) eight,
            options(pure, nomem, nostack, preserves_flags));
    }
    eight
}

/// Eight f32 times `multiplier` as e2m1, if there is no instruction for it. Arithmetic here has only one NaN,
/// a positive one (PTX ISA, "Floating point").
#[cfg(not(ferry_sm = "100a"))]
#[inline(always)]
pub fn e2m1_eight(values: [f32; 8], multiplier: f32) -> u32 {
    ferry_layout::e2m1::e2m1x8_of_products(values, multiplier)
}

/// Returns the same as [`e2m1_eight`], if `multiplier` is a power of two, 2^-126 at least.
#[inline(always)]
pub fn e2m1_eight_scaled(values: [f32; 8], multiplier: f32) -> u32 {
    #[cfg(ferry_sm = "100a")]
    return e2m1_eight(values, multiplier);
    #[cfg(not(ferry_sm = "100a"))]
    ferry_layout::e2m1::e2m1x8_of_scaled(values, multiplier, Instructions)
}
