//! The portable e4m3 conversion against a search over all codes.

use crate::support;
use ferry_layout::fp8::{Divisor, e4m3_bits, f32_of_e4m3_bits, scale};

/// The nearest code, found by trying all of them; ties to the even one.
fn nearest(value: f32) -> u8 {
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    sign | support::nearest(value.abs(), 0x7f, f32_of_e4m3_bits)
}

#[test]
fn every_bf16_becomes_the_nearest_code() {
    for bits in 0..=u16::MAX {
        let value = f32::from_bits(u32::from(bits) << 16);
        let wanted = match value {
            value if value.is_nan() => 0x7f,
            value if value.abs() >= 448.0 => nearest(448f32.copysign(value)),
            value => nearest(value),
        };
        assert_eq!(e4m3_bits(value), wanted, "{value:e} ({bits:#06x})");
    }
}

#[test]
fn ties_and_their_neighbours_round_right() {
    for code in 0..0x7e_u8 {
        let tie = (f32_of_e4m3_bits(code) + f32_of_e4m3_bits(code + 1)) / 2.0;
        for value in [tie.next_down(), tie, tie.next_up()] {
            assert_eq!(e4m3_bits(value), nearest(value), "{value:e}");
            assert_eq!(e4m3_bits(-value), nearest(-value), "{value:e}");
        }
    }
}

#[test]
fn codes_come_back() {
    for code in (0..=u8::MAX).filter(|code| code & 0x7f != 0x7f) {
        assert_eq!(e4m3_bits(f32_of_e4m3_bits(code)), code);
    }
    assert!(f32_of_e4m3_bits(0x7f).is_nan() && f32_of_e4m3_bits(0xff).is_nan());
}

#[test]
fn scales_have_a_floor() {
    assert_eq!(scale(0.0), 1e-4 / 448.0);
    assert_eq!(scale(448.0), 1.0);
}

#[test]
fn an_infinity_makes_nan_of_its_group() {
    let scale = scale(f32::INFINITY);
    assert_eq!(scale, f32::INFINITY);
    for (value, code) in [(f32::INFINITY, 0x7f), (1.0, 0), (f32::MAX, 0), (-0.0, 0x80)] {
        assert_eq!(e4m3_bits(value / scale), code, "{value:e}");
        assert!((f32_of_e4m3_bits(code) * scale).is_nan(), "{value:e}");
    }
}

/// Divides every BF16 by the scale of every mantissa of `amax`, at exponents from the smallest to the
/// largest.
#[test]
fn a_divisor_divides_as_a_division_does() {
    let exponents = [0, 1, 60, 100, 113, 114, 127, 128, 200, 254];
    for exponent in exponents {
        for mantissa in 0..128_u32 {
            let amax = f32::from_bits(exponent << 23 | mantissa << 16);
            compare_division(amax);
        }
    }
    compare_division(f32::INFINITY);
}

fn compare_division(amax: f32) {
    let scale = scale(amax);
    let divisor = Divisor::new(scale);
    // Smaller values become 0.
    let lowest = (amax * 1e-7).to_bits() >> 16;
    let magnitudes = (lowest..=amax.to_bits() >> 16).chain([0, 1, 0x7fc0]);
    let values = magnitudes.flat_map(|bits| [bits << 16, bits << 16 | 1 << 31]);
    for value in values.map(f32::from_bits) {
        let (wanted, found) = (value / scale, divisor.divide(value, support::Std));
        assert_eq!(
            e4m3_bits(found),
            e4m3_bits(wanted),
            "{value:e} / {scale:e}: {found:e}, not {wanted:e}"
        );
    }
}
