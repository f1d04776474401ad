//! NVFP4 in f64: e2m1 elements, an e4m3 scale for each 16 of them, and a global scale; slow and
//! obvious. "Rounded to f32" means that the exact result is rounded once.

use half::bf16;

use crate::mxfp8::largest;
use crate::{e2m1, fp8};

/// Elements that share a scale.
pub const GROUP: usize = 16;

/// The nearest f32.
fn rounded(value: f64) -> f64 {
    f64::from(value as f32)
}

/// The e4m3 code of a group's scale: `global · (amax · 1/6)`, everything rounded to f32.
pub fn scale_of(amax: f64, global: f32) -> u8 {
    let share = rounded(amax * rounded(1.0 / 6.0));
    fp8::nearest_code(rounded(f64::from(global) * share))
}

/// Factor for the elements of a group: `1 / (scale · (1 / global))`, everything rounded to f32; 0
/// if that is infinite or NaN.
pub fn multiplier_of(scale: u8, global: f32) -> f64 {
    let inverse = rounded(1.0 / f64::from(global));
    let multiplier = rounded(1.0 / rounded(fp8::value_of_code(scale) * inverse));
    if multiplier.is_finite() {
        multiplier
    } else {
        0.0
    }
}

/// A row `[hidden]` of BF16 or f32 under the global scale `global` as packed e2m1 codes `[hidden / 2]` and
/// scales' e4m3 codes `[hidden / 16]`.
///
/// # Panics
/// If the row is not a whole number of groups.
pub fn encode<T: Into<f64> + Copy>(row: &[T], global: f32) -> (Vec<u8>, Vec<u8>) {
    assert!(row.len().is_multiple_of(GROUP), "{} elements", row.len());
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    for group in row.chunks(GROUP) {
        let scale = scale_of(largest(group), global);
        let multiplier = multiplier_of(scale, global);
        scales.push(scale);
        for &x in group {
            codes.push(e2m1::nearest_code(rounded(x.into() * multiplier)));
        }
    }
    (e2m1::pack(&codes), scales)
}

/// Decodes a row of [`encode`]: code · scale / global.
pub fn decode(payload: &[u8], scales: &[u8], global: f32) -> Vec<f64> {
    let codes = e2m1::unpack(payload);
    let elements = codes.iter().enumerate();
    elements
        .map(|(at, code)| {
            let scale = fp8::value_of_code(scales[at / GROUP]);
            e2m1::value_of_code(*code) * scale / f64::from(global)
        })
        .collect()
}

/// The inverse of a row's own global scale: the row's largest magnitude over 2688 = 6 · 448, at
/// least 2^-126, as BF16; 1 for a row of zeros.
pub fn inverse_global_of(row: &[bf16]) -> bf16 {
    let row_max = largest(row);
    if row_max > 0.0 {
        let inverse = rounded(row_max / 2688.0).max(2f64.powi(-126));
        bf16::from_f32(inverse as f32)
    } else {
        bf16::ONE
    }
}

/// Encodes like [`encode`] with the row's own global scale, and returns that scale's inverse too.
pub fn encode_by_row(row: &[bf16]) -> (Vec<u8>, Vec<u8>, bf16) {
    let inverse = inverse_global_of(row);
    let global = (1.0 / inverse.to_f64()) as f32;
    let (payload, scales) = encode(row, global);
    (payload, scales, inverse)
}

/// Decodes a row of [`encode_by_row`]: code · scale · inverse.
pub fn decode_by_row(payload: &[u8], scales: &[u8], inverse: bf16) -> Vec<f64> {
    let values = decode(payload, scales, 1.0);
    values.iter().map(|x| x * inverse.to_f64()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(elements: &[f32]) -> Vec<bf16> {
        crate::testing::group(elements, GROUP)
    }

    #[test]
    fn a_group_by_hand() {
        let (payload, scales) = encode(&group(&[12.0, -1.0, 0.4, 3.0]), 1.0);
        assert_eq!(scales, [0x40], "a scale of 2");
        assert_eq!(payload[..3], [0x97, 0x30, 0x00]);
        let values = decode(&payload, &scales, 1.0);
        assert_eq!(values[..4], [12.0, -1.0, 0.0, 3.0]);
    }

    #[test]
    fn the_global_scale_moves_the_scales() {
        let (payload, scales) = encode(&group(&[12.0, -1.0, 0.4, 3.0]), 0.25);
        assert_eq!(scales, [0x30], "a scale of 1/2");
        assert_eq!(payload[..3], [0x97, 0x30, 0x00]);
        assert_eq!(decode(&payload, &scales, 0.25)[0], 12.0);
    }

    #[test]
    fn the_ends_of_the_scale() {
        // amax / 6 = 2^-11 is nearer to 0 than to e4m3's least, 2^-9.
        let (payload, scales) = encode(&group(&[6.0 * 2f32.powi(-11)]), 1.0);
        assert_eq!((payload[0], scales[0]), (0x00, 0x00));
        let (payload, scales) = encode(&group(&[1e6, 1e3]), 1.0);
        assert_eq!((payload[0], scales[0]), (0x47, 0x7e));
        let (payload, scales) = encode(&group(&[f32::NEG_INFINITY, 1e3, f32::NAN]), 1.0);
        assert_eq!((payload[..2].to_vec(), scales[0]), (vec![0x4f, 0x07], 0x7e));
    }

    #[test]
    fn zeros_keep_their_signs() {
        let (payload, scales) = encode(&group(&[0.0, -0.0, f32::NAN]), 1.0);
        assert_eq!((payload[0], payload[1], scales[0]), (0x80, 0x07, 0x00));
    }

    #[test]
    fn a_row_fills_the_range() {
        let mut row = group(&[2688.0, -1344.0]);
        row.extend(group(&[6.0]));
        let (payload, scales, inverse) = encode_by_row(&row);
        assert_eq!(inverse, bf16::ONE);
        assert_eq!(scales, [0x7e, 0x38]);
        assert_eq!((payload[0], payload[8]), (0xd7, 0x07));
        assert_eq!(decode_by_row(&payload, &scales, inverse)[1], -1344.0);
    }

    #[test]
    fn inverses_by_hand() {
        assert_eq!(inverse_global_of(&group(&[])), bf16::ONE);
        assert_eq!(inverse_global_of(&group(&[f32::NAN])), bf16::ONE);
        assert_eq!(inverse_global_of(&group(&[-5376.0])).to_f64(), 2.0);
        let least = inverse_global_of(&group(&[2f32.powi(-133)]));
        assert_eq!(least.to_f64(), 2f64.powi(-126));
        let infinite = inverse_global_of(&group(&[f32::INFINITY]));
        assert_eq!(infinite, bf16::INFINITY);
    }

    #[test]
    fn an_infinity_makes_its_row_nan() {
        let mut row = group(&[f32::INFINITY]);
        row.extend(group(&[1.0]));
        let (payload, scales, inverse) = encode_by_row(&row);
        assert_eq!(scales, [0x7f, 0x00]);
        assert_eq!((payload[0], payload[8]), (0x07, 0x00));
        let values = decode_by_row(&payload, &scales, inverse);
        assert!(values.iter().all(|x| x.is_nan()));
    }
}
