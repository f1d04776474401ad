//! MXFP8, MXFP4 and NVFP4: scales by hand, blocks made to break them, and bounds of the error.

use ferry_layout::Arithmetic;
use ferry_layout::e2m1::{e2m1_bits, f32_of_e2m1_bits};
use ferry_layout::fp8::{e4m3_bits, f32_of_e4m3_bits, larger};
use ferry_layout::{
    SENTINEL, avoid_sentinel, bf16_bits, e8m0, f32_of_bf16_bits, fp8, mxfp4, mxfp8, nvfp4,
    restore_sentinel,
};
use proptest::prelude::*;

/// The largest finite BF16.
const BF16_MAX: f32 = f32::from_bits(0x7f7f_0000);
/// The least BF16 above 0.
const BF16_LEAST: f32 = f32::from_bits(0x0001_0000);

fn amax(block: &[f32]) -> f32 {
    block.iter().copied().fold(0.0, larger)
}

/// A block's scale, and its values after encoding and decoding.
fn through_mxfp8(block: &[f32]) -> (u8, Vec<f32>) {
    let scale = mxfp8::scale_bits(amax(block));
    let multiplier = mxfp8::multiplier(amax(block), scale);
    let codes = block.iter().map(|x| e4m3_bits(x * multiplier));
    let values = codes.map(|code| mxfp8::dequantised(code, scale));
    (scale, values.collect())
}

fn through_mxfp4(block: &[f32]) -> (u8, Vec<f32>) {
    let scale = mxfp4::scale_bits(amax(block));
    let multiplier = mxfp4::multiplier(scale);
    let codes = block.iter().map(|x| e2m1_bits(x * multiplier));
    let values = codes.map(|code| mxfp4::dequantised(code, scale));
    (scale, values.collect())
}

fn through_nvfp4(block: &[f32], global: f32) -> (u8, Vec<f32>) {
    let scale = nvfp4::scale_bits(amax(block), global);
    let multiplier = nvfp4::multiplier(scale, 1.0 / global);
    let codes = block.iter().map(|x| e2m1_bits(x * multiplier));
    let values = codes.map(|code| nvfp4::dequantised(code, scale, global));
    (scale, values.collect())
}

#[test]
fn mxfp8_scales_by_hand() {
    let cases = [
        (0.0, 0),
        (BF16_LEAST, 0),
        (f32::MIN_POSITIVE, 0),
        (1.75 * 2f32.powi(-119), 0),        // 448 times 2^-127
        (1.757_812_5 * 2f32.powi(-119), 1), // the next BF16
        (448.0 * 2f32.powi(-126), 1),
        (1.0, 127 - 8), // 1/448 is above 2^-9
        (448.0, 127),
        (450.0, 128),
        (896.0, 128),
        (BF16_MAX, 127 + 120),
        (f32::MAX, 127 + 120),
        (f32::INFINITY, e8m0::NAN),
    ];
    for (amax, code) in cases {
        assert_eq!(mxfp8::scale_bits(amax), code, "{amax:e}");
    }
    assert_eq!(mxfp8::multiplier(0.0, 0), 0.0);
    assert_eq!(mxfp8::multiplier(BF16_LEAST, 0), 2f32.powi(127));
    assert_eq!(mxfp8::multiplier(450.0, 128), 0.5);
    assert!(mxfp8::multiplier(f32::INFINITY, e8m0::NAN).is_nan());
}

/// A payload of e4m3 has no word [`SENTINEL`], and scales have none that is sent in its place.
#[test]
fn words_of_formats_are_told_from_absent_ones() {
    for bits in 0..=u16::MAX {
        let value = f32_of_bf16_bits(bits);
        assert_ne!(e4m3_bits(value), 0xff, "{bits:#x}");
        let amax = larger(0.0, value);
        assert!(fp8::scale(amax).to_bits() < 1 << 31, "{bits:#x}");
        assert_ne!(mxfp8::scale_bits(amax), 254, "{bits:#x}");
        assert_ne!(mxfp4::scale_bits(amax), 254, "{bits:#x}");
    }
    for word in [0, u32::from_le_bytes([e8m0::NAN; 4]), SENTINEL - 2] {
        assert_ne!(avoid_sentinel(word), SENTINEL);
        assert_eq!(restore_sentinel(avoid_sentinel(word)), word);
    }
}

#[test]
fn mxfp4_scales_by_hand() {
    let below_1_75 = f32::from_bits(0x3fdf_ffff);
    let cases = [
        (0.0, 0),
        (BF16_LEAST, 0),
        (f32::from_bits(0x0080_0000), 0),
        (1.75 * 2f32.powi(-125), 1),
        (1.0, 125),
        (below_1_75, 125),
        (1.75, 126),
        (2.0, 126),
        (6.0, 127),
        (7.0, 128),
        (2f32.powi(127), 252),
        (BF16_MAX, 253),
        (f32::INFINITY, 253),
    ];
    for (amax, code) in cases {
        assert_eq!(mxfp4::scale_bits(amax), code, "{amax:e}");
    }
    assert_eq!(mxfp4::multiplier(0), 2f32.powi(127));
    assert_eq!(mxfp4::multiplier(253), 2f32.powi(-126));
}

#[test]
fn nvfp4_scales_by_hand() {
    let cases = [
        (0.0, 1.0, 0x00),
        (6.0, 1.0, 0x38),
        (12.0, 0.5, 0x38),
        (2688.0, 1.0, 0x7e),
        (1e9, 1.0, 0x7e),
        (f32::INFINITY, 1.0, 0x7e),
        (6.0 * 2f32.powi(-9), 1.0, 0x01),
        (6.0 * 2f32.powi(-10), 1.0, 0x00), // a tie, to even
        (BF16_MAX, 2f32.powi(126), 0x7e),
        (BF16_LEAST, 2f32.powi(-126), 0x00),
    ];
    for (amax, global, code) in cases {
        assert_eq!(nvfp4::scale_bits(amax, global), code, "{amax:e} {global:e}");
    }
    assert_eq!(nvfp4::multiplier(0x38, 1.0), 1.0);
    assert_eq!(nvfp4::multiplier(0x40, 0.25), 2.0);
    assert_eq!(nvfp4::multiplier(0x00, 1.0), 0.0);
    // Scales of 1/4 and the next one: 2^-128, whose reciprocal is no f32, and its neighbour.
    assert_eq!(nvfp4::multiplier(0x28, 2f32.powi(-126)), 0.0);
    assert_eq!(
        nvfp4::multiplier(0x29, 2f32.powi(-126)),
        1.0 / (1.125 * 2f32.powi(-64)) * 2f32.powi(64)
    );
}

#[test]
fn nvfp4_multipliers_are_numbers() {
    let globals = [0.0, 1e-45, 2f32.powi(-126), 1.0, 2f32.powi(126), f32::MAX];
    let beyond = [f32::INFINITY, f32::NAN];
    for global in globals.into_iter().chain(beyond) {
        for scale in 0..=u8::MAX {
            let multiplier = nvfp4::multiplier(scale & 0x7f, 1.0 / global);
            assert!(multiplier.is_finite(), "{scale:#x} {global:e}");
        }
    }
}

/// Arithmetic whose reciprocals are NaN wherever those of a GPU may be wrong.
#[derive(Clone, Copy)]
struct Narrow;

impl Arithmetic for Narrow {
    fn multiply_add(self, a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }

    fn reciprocal(self, d: f32) -> f32 {
        if (f32::MIN_POSITIVE..2f32.powi(126)).contains(&d) {
            1.0 / d
        } else {
            f32::NAN
        }
    }
}

#[test]
fn nvfp4_multipliers_need_no_other_reciprocals() {
    for inverse in (0..=u32::MAX).step_by(4099 * 16).map(f32::from_bits) {
        for scale in 0..0x80 {
            let found = nvfp4::multiplier_of_value(f32_of_e4m3_bits(scale), inverse, Narrow);
            let wanted = nvfp4::multiplier(scale, inverse);
            assert_eq!(found.to_bits(), wanted.to_bits(), "{scale:#x} {inverse:e}");
        }
    }
}

#[test]
fn nvfp4_inverses_by_hand() {
    let cases = [
        (0.0, 0x3f80),
        (2688.0, 0x3f80),
        (5376.0, 0x4000),
        (BF16_LEAST, 0x0080),
        (2688.0 * 2f32.powi(-126), 0x0080),
        (BF16_MAX, 0x79c2), // 255/256 · 2^128 / 2688 = 1.5179 · 2^116
        (f32::INFINITY, 0x7f80),
    ];
    for (row_max, bits) in cases {
        assert_eq!(nvfp4::inverse_global_bits(row_max), bits, "{row_max:e}");
    }
    assert_eq!(nvfp4::global_of_inverse(0x0080), 2f32.powi(126));
    assert_eq!(nvfp4::global_of_inverse(0x7f80), 0.0);
    assert_eq!(nvfp4::dequantised_by_row(0x7, 0x7e, 0x4000), 5376.0);
}

#[test]
fn zeros_stay_zeros_with_their_signs() {
    for block in [[0.0; 32], [-0.0; 32]] {
        let of_nvfp4 = through_nvfp4(&block[..16], 1.0).1;
        let all = [through_mxfp8(&block).1, through_mxfp4(&block).1, of_nvfp4];
        for value in all.into_iter().flatten() {
            assert_eq!(value.to_bits(), block[0].to_bits());
        }
    }
}

#[test]
fn a_nan_harms_no_other_element() {
    let mut block = [2.0; 32];
    block[7] = -f32::NAN;
    let (_, values) = through_mxfp8(&block);
    assert!(values[7].is_nan());
    assert!((0..32).all(|at| at == 7 || values[at] == 2.0));
    // e2m1 has no NaN: it becomes 6, here times scales of 1/2 and f32(e4m3(1/3)).
    let (_, values) = through_mxfp4(&block);
    assert_eq!((values[6], values[7]), (2.0, 3.0));
    let (scale, values) = through_nvfp4(&block[..16], 1.0);
    assert_eq!(values[7], 6.0 * f32_of_e4m3_bits(scale));
    assert_eq!(values[6], values[7]);
    // A block of NaNs has the least scale, or none.
    assert!(through_mxfp8(&[f32::NAN; 32]).1[0].is_nan());
    assert_eq!(through_mxfp4(&[f32::NAN; 32]).1[0], 6.0 * 2f32.powi(-127));
    assert_eq!(through_nvfp4(&[f32::NAN; 16], 1.0).1[0], 0.0);
}

#[test]
fn infinities_end_where_the_format_says() {
    let mut block = [1.0; 32];
    block[7] = f32::NEG_INFINITY;
    assert!(through_mxfp8(&block).1.iter().all(|value| value.is_nan()));
    let (_, values) = through_mxfp4(&block);
    assert_eq!((values[6], values[7]), (0.0, f32::NEG_INFINITY));
    let (_, values) = through_nvfp4(&block[..16], 0.5);
    assert_eq!((values[6], values[7]), (0.0, -5376.0));
    let inverse = nvfp4::inverse_global_bits(amax(&block));
    let global = nvfp4::global_of_inverse(inverse);
    for (amax, code) in [(0.0, 0), (1.0, 0), (f32::INFINITY, 0x7f)] {
        let scale = nvfp4::scale_bits(amax, global);
        assert_eq!(scale, code, "{amax:e}");
        assert_eq!(nvfp4::multiplier(scale, 1.0 / global), 0.0);
        assert!(nvfp4::dequantised_by_row(0x7, scale, inverse).is_nan());
    }
}

#[test]
fn the_ends_of_bf16() {
    assert_eq!(through_mxfp8(&[BF16_MAX; 32]).1[0], 2f32.powi(120) * 256.0);
    assert_eq!(through_mxfp8(&[BF16_LEAST; 32]).1[0], BF16_LEAST);
    assert_eq!(through_mxfp4(&[BF16_MAX; 32]).1[0], f32::INFINITY);
    assert_eq!(through_mxfp4(&[BF16_LEAST; 32]).1[0], 0.0);
    let inverse = nvfp4::inverse_global_bits(BF16_MAX);
    let global = nvfp4::global_of_inverse(inverse);
    let scale = nvfp4::scale_bits(BF16_MAX, global);
    let code = e2m1_bits(BF16_MAX * nvfp4::multiplier(scale, 1.0 / global));
    let value = nvfp4::dequantised_by_row(code, scale, inverse);
    assert!((value / BF16_MAX - 1.0).abs() < 2f32.powi(-7), "{value:e}");
}

/// Error bound of e2m1 for `y`, in units of the scale: half the distance of its neighbours, or the part
/// beyond 6.
fn e2m1_bound(y: f64) -> f64 {
    match y {
        y if y <= 2.0 => 0.25,
        y if y <= 4.0 => 0.5,
        y if y <= 7.0 => 1.0,
        y => y - 6.0,
    }
}

/// Checks that `value` is at most `bound` units of `scale` away from `x`. The 2^-20 allows for f32's own
/// rounding of multiplier and product.
fn close(x: f32, value: f32, scale: f64, bound: f64) -> Result<(), TestCaseError> {
    let error = (f64::from(x) - f64::from(value)).abs();
    let bound = scale * bound * (1.0 + 2f64.powi(-20));
    prop_assert!(error <= bound, "{x:e} became {value:e}, scale {scale:e}");
    Ok(())
}

/// Whether the value of a scale is so small, 2^-128 at most, that its reciprocal is no f32.
fn has_no_reciprocal(code: u8, global: f32) -> bool {
    f32_of_e4m3_bits(code) * (1.0 / global) <= 2f32.powi(-64) * 2f32.powi(-64)
}

/// Numbers times a power of two, as the nearest BF16s.
fn scaled(xs: &[f32], exponent: i32) -> Vec<f32> {
    let scaled = xs.iter().map(|&x| f64::from(x) * 2f64.powi(exponent));
    scaled
        .map(|x| f32_of_bf16_bits(bf16_bits(x as f32)))
        .collect()
}

/// Blocks of BF16s as f32s, finite and less than 2^127: of any exponents, or of one octave or few.
fn blocks() -> impl Strategy<Value = Vec<f32>> {
    let wide = any::<u16>().prop_map(|bits| match f32_of_bf16_bits(bits) {
        value if value.abs() < 2f32.powi(127) => value,
        _ => 1.0,
    });
    let narrow = (-134i32..120, prop::collection::vec(-8f32..8.0, 32))
        .prop_map(|(exponent, xs)| scaled(&xs, exponent));
    prop_oneof![prop::collection::vec(wide, 32), narrow]
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        cases: 2000,
        ..ProptestConfig::default()
    })]

    #[test]
    fn mxfp8_is_within_its_bound(block in blocks()) {
        let (code, values) = through_mxfp8(&block);
        let scale = f64::from(e8m0::f32_of_e8m0_bits(code));
        prop_assert!(f64::from(amax(&block)) <= 448.0 * scale);
        prop_assert!(code == 0 || f64::from(amax(&block)) > 224.0 * scale, "scale is too large");
        for (x, value) in block.iter().zip(values) {
            // Half a step: 2^-10 for subnormals, 2^-4 of the value for others.
            let y = f64::from(x.abs()) / scale;
            close(*x, value, scale, (y / 16.0).max(2f64.powi(-10)))?;
        }
    }

    #[test]
    fn mxfp4_is_within_its_bound(block in blocks()) {
        let (code, values) = through_mxfp4(&block);
        let scale = f64::from(e8m0::f32_of_e8m0_bits(code));
        prop_assert!(f64::from(amax(&block)) < 7.0 * scale);
        prop_assert!(code == 0 || f64::from(amax(&block)) >= 3.5 * scale, "scale is too large");
        for (x, value) in block.iter().zip(values) {
            close(*x, value, scale, e2m1_bound(f64::from(x.abs()) / scale))?;
        }
    }

    /// The documented bound, for any allowed global scale and any block whose scale under it is
    /// normal.
    #[test]
    fn nvfp4_is_within_its_bound(
        block in prop::collection::vec(-1f32..1.0, 16),
        exponent in -126i32..126,
        mantissa in 1f32..2.0,
        above in -5i32..12,
    ) {
        let global = mantissa * 2f32.powi(exponent);
        // The largest magnitude times `global` is up to 2^above.
        let block = scaled(&block, above - exponent - 1);
        // From 2^127 on, the decoded value may be beyond f32.
        prop_assume!(amax(&block) < 2f32.powi(127));
        let product = f64::from(amax(&block)) * f64::from(global);
        prop_assume!((6.0 * 2f64.powi(-6)..=2688.0).contains(&product));
        let (code, values) = through_nvfp4(&block, global);
        let scale = f64::from(f32_of_e4m3_bits(code)) / f64::from(global);
        for (x, value) in block.iter().zip(values) {
            if has_no_reciprocal(code, global) {
                prop_assert_eq!(value, 0.0);
                continue;
            }
            let y = f64::from(x.abs()) / scale;
            close(*x, value, scale, 0.25 * y.max(1.0))?;
        }
    }

    #[test]
    fn nvfp4_by_row_is_within_its_bound(row in blocks()) {
        let inverse = nvfp4::inverse_global_bits(amax(&row));
        let global = nvfp4::global_of_inverse(inverse);
        for block in row.chunks(16) {
            let code = nvfp4::scale_bits(amax(block), global);
            let multiplier = nvfp4::multiplier(code, 1.0 / global);
            let unit = f64::from(f32_of_bf16_bits(inverse));
            let scale = f64::from(f32_of_e4m3_bits(code)) * unit;
            for x in block {
                let value = nvfp4::dequantised_by_row(e2m1_bits(x * multiplier), code, inverse);
                if code == 0 {
                    // Lost: less than half of the least scale, times 6.
                    close(*x, value, unit, 6.0 * 2f64.powi(-10))?;
                    prop_assert_eq!(value, 0.0);
                    continue;
                }
                if has_no_reciprocal(code, global) {
                    prop_assert_eq!(value, 0.0);
                    continue;
                }
                // A normal scale is off by 1/16 at most, a subnormal one by half a step.
                let y = f64::from(x.abs()) / scale;
                let steps = if code < 8 { f64::from(code) } else { 8.0 };
                prop_assert!(y <= 6.0 * (1.0 + 0.5 / steps) * (1.0 + 2f64.powi(-20)), "{y}");
                close(*x, value, scale, e2m1_bound(y))?;
            }
        }
    }

    #[test]
    fn nvfp4_is_the_same_for_row_and_tensor_where_powers_of_two_are(
        block in blocks(),
        exponent in -20i32..20,
    ) {
        let inverse = 2f32.powi(-exponent);
        let global = nvfp4::global_of_inverse(bf16_bits(inverse));
        prop_assert_eq!(global, 2f32.powi(exponent));
        let (scale, values) = through_nvfp4(&block[..16], global);
        for (x, value) in block.iter().zip(values) {
            let code = e2m1_bits(x * nvfp4::multiplier(scale, inverse));
            prop_assert_eq!(value, nvfp4::dequantised_by_row(code, scale, bf16_bits(inverse)));
            prop_assert_eq!(value, f32_of_e2m1_bits(code) * f32_of_e4m3_bits(scale) * inverse);
        }
    }
}
