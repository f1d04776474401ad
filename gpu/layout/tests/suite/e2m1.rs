//! The portable e2m1 conversion against a search over all codes.

use std::num::NonZero;
use std::thread::{self, available_parallelism};

use crate::support;
use crate::support::Std;
use ferry_layout::e2m1::{
    e2m1_bits, e2m1x2_bits, e2m1x8_bits, e2m1x8_of_products, e2m1x8_of_scaled, f32_of_e2m1_bits,
};
use proptest::prelude::*;

/// The values of codes 0 to 7 (OCP MX 1.0, section 5.3.3).
const VALUES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// The nearest code, found by trying all of them; ties to the even one.
fn nearest(value: f32) -> u8 {
    if value.is_nan() {
        return 7;
    }
    let sign = if value.is_sign_negative() { 8 } else { 0 };
    let of_code = |code: u8| VALUES[usize::from(code)];
    sign | support::nearest(value.abs().min(6.0), 8, of_code)
}

#[test]
fn every_bf16_becomes_the_nearest_code() {
    for bits in 0..=u16::MAX {
        let value = f32::from_bits(u32::from(bits) << 16);
        assert_eq!(e2m1_bits(value), nearest(value), "{value:e} ({bits:#06x})");
    }
}

#[test]
fn ties_by_hand_and_their_neighbours() {
    let ties = [
        (0.25, 0.0),
        (0.75, 1.0),
        (1.25, 1.0),
        (1.75, 2.0),
        (2.5, 2.0),
        (3.5, 4.0),
        (5.0, 4.0),
    ];
    for (tie, wanted) in ties {
        assert_eq!(f32_of_e2m1_bits(e2m1_bits(tie)), wanted, "{tie}");
        for value in [f32::next_down(tie), tie, f32::next_up(tie)] {
            assert_eq!(e2m1_bits(value), nearest(value), "{value:e}");
            assert_eq!(e2m1_bits(-value), nearest(-value), "{value:e}");
        }
    }
}

#[test]
fn codes_come_back() {
    for code in 0..16 {
        let value = f32_of_e2m1_bits(code);
        assert_eq!(value.abs(), VALUES[usize::from(code & 7)]);
        assert_eq!(value.is_sign_negative(), code >= 8);
        assert_eq!(e2m1_bits(value), code);
        assert_eq!(f32_of_e2m1_bits(code | 0xa0).to_bits(), value.to_bits());
    }
}

#[test]
fn what_is_no_number_saturates() {
    assert_eq!(e2m1_bits(f32::INFINITY), 7);
    assert_eq!(e2m1_bits(f32::NEG_INFINITY), 0xf);
    assert_eq!(e2m1_bits(f32::MAX), 7);
    for bits in [0x7f80_0001, 0x7fc0_0000, 0xff80_0001, 0xffff_ffff] {
        assert_eq!(e2m1_bits(f32::from_bits(bits)), 7, "{bits:#x}");
    }
}

#[test]
fn the_first_element_is_lowest() {
    assert_eq!(e2m1x2_bits(0.5, -6.0), 0xf1);
    let values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, -6.0];
    assert_eq!(e2m1x8_bits(values), 0xf654_3210);
}

/// Converts eight numbers from `bits` on, `step` apart, in three ways.
#[inline(always)]
fn conversions(bits: u32, step: u32) -> ([f32; 8], [u32; 3]) {
    let values = core::array::from_fn(|index| {
        let value = f32::from_bits(bits.wrapping_add(index as u32 * step));
        // The second conversion takes no other NaN.
        if value.is_nan() { f32::NAN } else { value }
    });
    let scaled = e2m1x8_of_scaled(values, 1.0, Std);
    let converted = [e2m1x8_bits(values), e2m1x8_of_products(values, 1.0), scaled];
    (values, converted)
}

/// Compares the conversions of eight numbers from `bits` on, `step` apart.
fn compare_conversions(bits: u32, step: u32) {
    let (values, [wanted, of_products, of_scaled]) = conversions(bits, step);
    assert_eq!(of_products, wanted, "{values:?}");
    assert_eq!(of_scaled, wanted, "{values:?}");
}

/// Compares the conversions of 2^16 numbers from `bits` on.
fn compare_block(bits: u32) {
    let eights = || (0..1 << 13).map(|eight| bits | (8 * eight));
    // Without a branch for each, the compiler takes several at a time.
    let differences = eights().fold(0, |differences, bits| {
        let (_, [wanted, of_products, of_scaled]) = conversions(bits, 1);
        differences | (of_products ^ wanted) | (of_scaled ^ wanted)
    });
    if differences != 0 {
        eights().for_each(|bits| compare_conversions(bits, 1));
        panic!("{bits:#x}: they differ if several are taken at a time");
    }
}

#[test]
fn powers_of_two_scale_exactly() {
    // Every boundary between codes with its neighbours, before scaling, and all exponents.
    let boundaries = [0.25_f32, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0];
    for exponent in -126..=127 {
        let multiplier = 2f32.powi(exponent);
        let near = boundaries.into_iter().flat_map(|boundary| {
            // 5 * 2^126 does not fit in f32: it becomes infinity.
            let value = (f64::from(boundary) * 2f64.powi(-exponent)) as f32;
            [value.next_down(), value, value.next_up()]
        });
        let of_exponents = (0..512).flat_map(|top: u32| {
            let mantissas = [0, 1, 0x2a_aaaa, 0x40_0000, 0x7f_ffff];
            mantissas.map(|mantissa| f32::from_bits(top << 23 | mantissa))
        });
        for value in near.chain(of_exponents).filter(|value| !value.is_nan()) {
            for value in [value, -value] {
                let wanted = e2m1x8_bits([value * multiplier; 8]);
                let found = e2m1x8_of_scaled([value; 8], multiplier, Std);
                assert_eq!(found, wanted, "{value:e} * 2^{exponent}");
                assert_eq!(e2m1x8_of_products([value; 8], multiplier), wanted);
            }
        }
    }
}

#[test]
fn products_become_the_same_codes() {
    // All signs and exponents; of mantissas a regular sample.
    for bits in (0..=u32::MAX).step_by(1 << 15) {
        compare_conversions(bits.wrapping_sub(4), 1);
    }
    for bits in (0..=u32::MAX).step_by(127 * 8 * 4099) {
        compare_conversions(bits, 4099);
    }
}

#[test]
fn products_of_all_numbers_become_the_same_codes() {
    let threads = available_parallelism().map_or(1, NonZero::get);
    thread::scope(|scope| {
        for first in 0..threads {
            scope.spawn(move || {
                for high_half in (first as u32..1 << 16).step_by(threads) {
                    compare_block(high_half << 16);
                }
            });
        }
    });
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        cases: 20_000,
        ..ProptestConfig::default()
    })]

    #[test]
    fn any_f32_becomes_the_nearest_code(bits: u32) {
        let value = f32::from_bits(bits);
        prop_assert_eq!(e2m1_bits(value), nearest(value));
    }

    #[test]
    fn any_f32_in_range_becomes_the_nearest_code(value in -7f32..7.0) {
        prop_assert_eq!(e2m1_bits(value), nearest(value));
    }
}
