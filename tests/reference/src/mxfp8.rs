//! MXFP8 in f64: e4m3 elements, a power-of-two scale for each 32 of them; slow and obvious.

use crate::fp8;

/// Elements that share a scale.
pub const GROUP: usize = 32;

/// The value of a scale's code: 2^(code - 127), 255 is NaN (OCP Microscaling Formats (MX)
/// Specification 1.0, section 5.4.1).
pub fn value_of_scale(code: u8) -> f64 {
    if code == 255 {
        f64::NAN
    } else {
        fp8::power_of_two(i32::from(code) - 127)
    }
}

/// The largest magnitude of a group, without NaNs; 0 if there is no number.
pub fn largest<T: Into<f64> + Copy>(group: &[T]) -> f64 {
    let magnitudes = group.iter().map(|&x| x.into().abs());
    magnitudes.filter(|x| !x.is_nan()).fold(0.0, f64::max)
}

/// The code of a group's scale: the least power of two that is not less than
/// `f32(amax · f32(1/448))`, 2^-127 if all are more; NaN if `amax` is infinite.
pub fn scale_of(amax: f64) -> u8 {
    let share = (amax * f64::from(1.0_f32 / 448.0)) as f32;
    let enough = |code: &u8| value_of_scale(*code) >= f64::from(share);
    (0..255).find(enough).unwrap_or(255)
}

/// A row `[hidden]` of BF16 or f32 as e4m3 codes `[hidden]` and scales' codes `[hidden / 32]`.
///
/// # Panics
/// If the row is not a whole number of groups.
pub fn encode<T: Into<f64> + Copy>(row: &[T]) -> (Vec<u8>, Vec<u8>) {
    assert!(row.len().is_multiple_of(GROUP), "{} elements", row.len());
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    for group in row.chunks(GROUP) {
        let scale = scale_of(largest(group));
        scales.push(scale);
        for &x in group {
            codes.push(fp8::nearest_code(x.into() / value_of_scale(scale)));
        }
    }
    (codes, scales)
}

/// Decodes a row of [`encode`].
pub fn decode(codes: &[u8], scales: &[u8]) -> Vec<f64> {
    let elements = codes.iter().enumerate();
    elements
        .map(|(at, code)| fp8::value_of_code(*code) * value_of_scale(scales[at / GROUP]))
        .collect()
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    fn group(elements: &[f32]) -> Vec<bf16> {
        crate::testing::group(elements, GROUP)
    }

    #[test]
    fn a_group_by_hand() {
        // 500 / 448 is a little more than 1, so the scale is 2, and 250 lies between 240 and 256.
        let (codes, scales) = encode(&group(&[500.0, -2.0, 3.0]));
        assert_eq!(scales, [128]);
        assert_eq!(codes[..4], [0x78, 0xb8, 0x3c, 0x00]);
        assert_eq!(decode(&codes, &scales)[..4], [512.0, -2.0, 3.0, 0.0]);
    }

    #[test]
    fn a_power_of_two_times_448_needs_no_more() {
        // f32(1/448) is not exact; this checks on which side the product falls.
        let (codes, scales) = encode(&group(&[448.0]));
        assert_eq!((codes[0], scales[0]), (0x7e, 127));
    }

    #[test]
    fn zeros_keep_their_signs() {
        let (codes, scales) = encode(&group(&[0.0, -0.0]));
        assert_eq!((codes[0], codes[1], scales[0]), (0x00, 0x80, 0));
    }

    #[test]
    fn a_nan_is_alone_and_an_infinity_is_not() {
        let (codes, scales) = encode(&group(&[f32::NAN, 448.0]));
        assert_eq!((codes[0], codes[1], scales[0]), (0x7f, 0x7e, 127));
        let (codes, scales) = encode(&group(&[f32::NEG_INFINITY, 448.0]));
        assert_eq!((codes, scales), (vec![0x7f; GROUP], vec![255]));
    }

    #[test]
    fn the_least_subnormal_survives() {
        let (codes, scales) = encode(&group(&[2f32.powi(-133)]));
        assert_eq!(scales, [0]);
        assert_eq!(decode(&codes, &scales)[0], 2f64.powi(-133));
    }

    #[test]
    fn the_largest_does_not_saturate() {
        let (codes, scales) = encode(&[bf16::MAX; GROUP]);
        // 2^128 (1 - 2^-8) / 448 is above 2^119; 255.0 rounds to 256.
        assert_eq!((codes[0], scales[0]), (0x78, 127 + 120));
    }
}
