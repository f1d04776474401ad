//! BF16 and back, against `half` and by hand.

use ferry_layout::{bf16_bits, f32_of_bf16_bits};
use half::bf16;
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn bf16_is_rounded_as_half_does(bits in any::<u32>()) {
        let value = f32::from_bits(bits);
        let expected = if value.is_nan() { 0x7fff } else { bf16::from_f32(value).to_bits() };
        prop_assert_eq!(bf16_bits(value), expected);
    }
}

#[test]
fn every_bf16_comes_back() {
    for bits in 0..=u16::MAX {
        let (ours, theirs) = (f32_of_bf16_bits(bits), bf16::from_bits(bits));
        if theirs.is_nan() {
            assert!(ours.is_nan());
            assert_eq!(bf16_bits(ours), 0x7fff);
        } else {
            assert_eq!(ours.to_bits(), theirs.to_f32().to_bits());
            assert_eq!(bf16_bits(ours), bits);
        }
    }
}

#[test]
fn bf16_ties_go_to_even() {
    // Half way between two neighbours, and just above and below.
    for (bits, expected) in [
        (0x3f80_8000, 0x3f80),
        (0x3f80_8001, 0x3f81),
        (0x3f81_8000, 0x3f82),
        (0x3f81_7fff, 0x3f81),
        (0x7f7f_8000, 0x7f80),
        (0xff80_0001, 0x7fff),
        (0x0000_8001, 0x0001),
    ] {
        assert_eq!(bf16_bits(f32::from_bits(bits)), expected, "{bits:#x}");
    }
}
