//! MXFP4 in f64: e2m1 elements, a power-of-two scale for each 32 of them; slow and obvious.

use crate::e2m1;
use crate::fp8::power_of_two;
use crate::mxfp8::{largest, value_of_scale};

/// Elements that share a scale.
pub const GROUP: usize = 32;

/// The code of a group's scale: 2^(n-2) for `amax` in [1.75 · 2^(n-1), 1.75 · 2^n), at least
/// 2^-127. Infinity is treated like 2^128 and gets 2^126.
pub fn scale_of(amax: f64) -> u8 {
    let enough = |exponent: &i32| amax < 1.75 * power_of_two(*exponent);
    let exponent = (-125..128).find(enough).unwrap_or(128);
    (exponent - 2 + 127) as u8
}

/// A row `[hidden]` of BF16 or f32 as packed e2m1 codes `[hidden / 2]` and scales' codes `[hidden / 32]`.
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
            codes.push(e2m1::nearest_code(x.into() / value_of_scale(scale)));
        }
    }
    (e2m1::pack(&codes), scales)
}

/// Decodes a row of [`encode`].
pub fn decode(payload: &[u8], scales: &[u8]) -> Vec<f64> {
    let codes = e2m1::unpack(payload);
    let elements = codes.iter().enumerate();
    elements
        .map(|(at, code)| e2m1::value_of_code(*code) * value_of_scale(scales[at / GROUP]))
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
    fn scales_by_hand() {
        let cases = [
            (0.0, 0),
            (1.0, 125),
            (1.74, 125),
            (1.75, 126),
            (2.0, 126),
            (4.0, 127),
            (6.0, 127),
            (6.99, 127),
            (7.0, 128),
            (2f64.powi(-126), 0),
            (2f64.powi(-124), 1),
            (2f64.powi(127), 252),
            (1.75 * 2f64.powi(127), 253),
            (bf16::MAX.to_f64(), 253),
            (f64::INFINITY, 253),
        ];
        for (amax, code) in cases {
            assert_eq!(scale_of(amax), code, "{amax:e}");
        }
    }

    #[test]
    fn a_group_by_hand() {
        let (payload, scales) = encode(&group(&[6.5, -1.0, 0.3, -0.2, 2.5]));
        assert_eq!(scales, [127]);
        assert_eq!(payload[..3], [0xa7, 0x81, 0x04]);
        let values = decode(&payload, &scales);
        assert_eq!(values[..6], [6.0, -1.0, 0.5, -0.0, 2.0, 0.0]);
    }

    #[test]
    fn what_is_no_number() {
        let (payload, scales) = encode(&group(&[f32::NAN, 4.0]));
        assert_eq!((payload[0], scales[0]), (0x67, 127));
        let (payload, scales) = encode(&group(&[f32::NEG_INFINITY, 4.0]));
        assert_eq!((payload[0], scales[0]), (0x0f, 253));
    }
}
