//! The four-bit float, by trying every code: slow and obvious.

/// The magnitudes of codes 0 to 7: 2 exponent bits with bias 1, 1 mantissa bit (OCP Microscaling
/// Formats (MX) Specification 1.0, section 5.3.3). Bit 3 is the sign.
pub const MAGNITUDES: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// The value of a code, 0 to 15.
pub fn value_of_code(code: u8) -> f64 {
    let sign = if code & 8 == 0 { 1.0 } else { -1.0 };
    sign * MAGNITUDES[usize::from(code & 7)]
}

/// The code nearest to `value`, ties to even, saturated at ±6, and 7 for NaN of either sign, like PTX's
/// `cvt.rn.satfinite.e2m1x2.f32`.
pub fn nearest_code(value: f64) -> u8 {
    if value.is_nan() {
        return 7;
    }
    let magnitude = value.abs().min(6.0);
    let mut best = 0;
    for code in 1..8 {
        let distance = |code: u8| (value_of_code(code) - magnitude).abs();
        let tie_to_even = distance(code) == distance(best) && code.is_multiple_of(2);
        if distance(code) < distance(best) || tie_to_even {
            best = code;
        }
    }
    if value.is_sign_negative() {
        best + 8
    } else {
        best
    }
}

/// Packs two codes per byte, the even element in the low half.
///
/// # Panics
/// If the number of codes is odd.
pub fn pack(codes: &[u8]) -> Vec<u8> {
    let pairs = codes.chunks(2);
    pairs.map(|pair| pair[0] + 16 * pair[1]).collect()
}

/// Unpacks the codes of [`pack`].
pub fn unpack(payload: &[u8]) -> Vec<u8> {
    let halves = payload.iter().flat_map(|byte| [byte % 16, byte / 16]);
    halves.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_by_hand() {
        let cases = [
            (0.0, 0),
            (-0.0, 8),
            (0.25, 0),
            (0.26, 1),
            (0.75, 2),
            (-1.25, 8 + 2),
            (1.75, 4),
            (2.5, 4),
            (3.5, 6),
            (5.0, 6),
            (5.01, 7),
            (-100.0, 15),
            (f64::INFINITY, 7),
            (f64::NAN, 7),
            (-f64::NAN, 7),
        ];
        for (value, code) in cases {
            assert_eq!(nearest_code(value), code, "{value}");
        }
        assert!((0..16).all(|code| nearest_code(value_of_code(code)) == code));
    }

    #[test]
    fn the_even_element_is_low() {
        assert_eq!(pack(&[1, 2, 15, 0]), [0x21, 0x0f]);
        assert_eq!(unpack(&[0x21, 0x0f]), [1, 2, 15, 0]);
    }
}
