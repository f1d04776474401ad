//! Blockwise FP8 in f64, by searching the codes: slow and obvious.

use std::array;
use std::sync::LazyLock;

/// Elements that share a scale.
pub const GROUP: usize = 128;

/// The values of codes 0 to `0x7e`, which ascend. To compute them in each search takes most of its time.
static MAGNITUDES: LazyLock<[f64; 127]> =
    LazyLock::new(|| array::from_fn(|code| value_of_code(code as u8)));

/// The value of an e4m3 code: a sign, 4 exponent bits with bias 7, 3 mantissa bits; `S.1111.111`
/// is NaN and there are no infinities (arXiv 2209.05433, table 1).
pub fn value_of_code(code: u8) -> f64 {
    let sign = if code >= 0x80 { -1.0 } else { 1.0 };
    let exponent = i32::from(code >> 3 & 0xf);
    let mantissa = f64::from(code & 7);
    match exponent {
        15 if code & 7 == 7 => f64::NAN,
        0 => sign * (mantissa / 8.0) * power_of_two(-6),
        _ => sign * (1.0 + mantissa / 8.0) * power_of_two(exponent - 7),
    }
}

/// 2^`exponent`, from -1,022 to 1,023: the exponent's bits of f64, with bias 1,023 (IEEE 754-2019, table
/// 3.5). `powi` multiplies, which takes several times as long.
pub(crate) fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

/// The e4m3 code nearest to `value`, ties to even, saturated at ±448, and `0x7f` for NaN.
pub fn nearest_code(value: f64) -> u8 {
    if value.is_nan() {
        return 0x7f;
    }
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    // The first code that is not smaller, or the one before it.
    let (magnitude, magnitudes) = (value.abs(), &*MAGNITUDES);
    let above = magnitudes.partition_point(|&of_code| of_code < magnitude);
    let (low, high) = match above {
        0 => return sign,
        _ => (above - 1, above.min(0x7e)),
    };
    let to_low = magnitude - magnitudes[low];
    let to_high = (magnitudes[high] - magnitude).abs();
    let take_low = to_low < to_high || to_low == to_high && low.is_multiple_of(2);
    sign | if take_low { low } else { high } as u8
}

/// A row of BF16 or f32 as e4m3 codes, and the f32 scale of each [`GROUP`] of its elements:
/// `scale = max(amax, 1e-4) / 448`, `code = e4m3(x / scale)`, scale and quotient rounded to f32.
/// A NaN does not count for `amax`.
///
/// # Panics
/// If the row is not a whole number of groups.
pub fn blockwise<T: Into<f64> + Copy>(row: &[T]) -> (Vec<u8>, Vec<f32>) {
    assert!(
        row.len().is_multiple_of(GROUP),
        "a row of {} elements",
        row.len()
    );
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    for group in row.chunks(GROUP) {
        let numbers = group
            .iter()
            .map(|&x| x.into().abs())
            .filter(|x| !x.is_nan());
        let amax = numbers.fold(f64::from(1e-4_f32), f64::max);
        let scale = (amax / 448.0) as f32;
        for &x in group {
            let quotient = (x.into() / f64::from(scale)) as f32;
            codes.push(if quotient.is_infinite() {
                0x7e
            } else {
                nearest_code(f64::from(quotient))
            });
            if quotient.is_infinite() && quotient < 0.0 {
                *codes.last_mut().expect("just pushed") |= 0x80;
            }
        }
        scales.push(scale);
    }
    (codes, scales)
}

/// Row offsets with every expert's rows padded to a multiple of `alignment`.
pub fn padded_offsets(row_offsets: &[u32], alignment: u32) -> Vec<u32> {
    let mut padded = vec![0];
    for pair in row_offsets.windows(2) {
        let start = padded[padded.len() - 1];
        padded.push(start + (pair[1] - pair[0]).next_multiple_of(alignment));
    }
    padded
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    #[test]
    fn codes_by_hand() {
        assert_eq!(value_of_code(0x7e), 448.0);
        assert_eq!(value_of_code(0x01), 2f64.powi(-9));
        for exponent in [-1022, -127, -1, 0, 1, 127, 1023] {
            assert_eq!(power_of_two(exponent), 2f64.powi(exponent));
        }
        assert_eq!(nearest_code(1.0), 0x38);
        assert_eq!(
            nearest_code(-1.0625),
            0xb8,
            "a tie goes to the even mantissa"
        );
        assert_eq!(nearest_code(1.1875), 0x3a, "likewise upwards");
        assert_eq!(nearest_code(1e9), 0x7e);
        assert_eq!(nearest_code(2f64.powi(-10)), 0x00);
        assert_eq!(nearest_code(f64::NAN), 0x7f);
    }

    #[test]
    fn the_search_finds_the_nearest() {
        for step in 0..500_000 {
            let value = f64::from(step) * 0.001;
            let distance = |code: u8| (value_of_code(code) - value).abs();
            let found = nearest_code(value);
            assert!(
                (0..0x7f).all(|code| distance(found) <= distance(code)),
                "{value}: {found:#x}"
            );
        }
    }

    #[test]
    fn the_largest_element_becomes_448() {
        let mut row = vec![bf16::ZERO; GROUP];
        row[5] = bf16::from_f32(-3.5);
        row[6] = bf16::from_f32(1.75);
        let (codes, scales) = blockwise(&row);
        assert_eq!((codes[5], codes[6], codes[7]), (0xfe, 0x76, 0x00));
        assert_eq!(scales, [3.5 / 448.0]);
    }

    #[test]
    fn padding_by_hand() {
        assert_eq!(padded_offsets(&[0, 10, 20, 30, 40], 4), [0, 12, 24, 36, 48]);
    }
}
