//! The power-of-two scale, by hand and against f64.

use ferry_layout::e8m0::{NAN, e8m0_up, f32_of_e8m0_bits, reciprocal};
use proptest::prelude::*;

fn value_of(code: u8) -> f64 {
    2f64.powi(i32::from(code) - 127)
}

/// The first code whose value is not less, found by trying all.
fn first_not_less(value: f32) -> u8 {
    if !value.is_finite() {
        return NAN;
    }
    let enough = |code: &u8| value_of(*code) >= f64::from(value.abs());
    (0..NAN).find(enough).unwrap_or(NAN)
}

#[test]
fn rounding_up_by_hand() {
    let cases = [
        (0x0000_0000, 0),         // 0 -> 2^-127
        (0x0000_0001, 0),         // the least subnormal
        (0x0040_0000, 0),         // 2^-127 itself
        (0x0040_0001, 1),         // -> 2^-126
        (0x007f_ffff, 1),         // the largest subnormal
        (0x0080_0000, 1),         // 2^-126 itself
        (0x0080_0001, 2),         // -> 2^-125
        (0x3f80_0000, 127),       // 1
        (0x3f80_0001, 128),       // -> 2
        (0x403f_ffff, 127 + 2),   // just below 3 -> 4
        (0x7f00_0000, 127 + 127), // 2^127
        (0x7f00_0001, NAN),       // nothing is above
        (0x7f80_0000, NAN),       // infinity
        (0x7fc0_0000, NAN),
        (0xffff_ffff, NAN),
        (0xc03f_ffff, 127 + 2), // signs do not count
    ];
    for (bits, code) in cases {
        assert_eq!(e8m0_up(f32::from_bits(bits)), code, "{bits:#010x}");
    }
}

#[test]
fn every_bf16_becomes_the_first_code_that_is_not_less() {
    for bits in 0..=u16::MAX {
        let value = f32::from_bits(u32::from(bits) << 16);
        assert_eq!(e8m0_up(value), first_not_less(value), "{bits:#06x}");
    }
}

#[test]
fn codes_come_back_and_reciprocals_are_exact() {
    for code in 0..NAN {
        let value = f32_of_e8m0_bits(code);
        assert_eq!(f64::from(value), value_of(code));
        assert_eq!(f64::from(reciprocal(code)), 1.0 / value_of(code));
        assert_eq!(e8m0_up(value), code);
        assert_eq!(
            e8m0_up(value.next_up()),
            code + 1,
            "{code}: 255 is NaN's own"
        );
    }
    assert!(f32_of_e8m0_bits(NAN).is_nan() && reciprocal(NAN).is_nan());
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        cases: 5_000,
        ..ProptestConfig::default()
    })]

    #[test]
    fn any_f32_becomes_the_first_code_that_is_not_less(bits: u32) {
        let value = f32::from_bits(bits);
        prop_assert_eq!(e8m0_up(value), first_not_less(value));
    }
}
