//! Tokens that were encoded before dispatch: what becomes of their codes and scales on the way.

/// The first of four scales of a byte that cannot travel together, and the other three; the same 32 bits of
/// an f32.
const LOST: [u8; 4] = [0xfe, 0xff, 0xff, 0xff];

/// Codes as they arrive. Those of a byte are looked at in fours, from the row's first on: `0xff` four times
/// is a word that means something else on the way, so the first of them loses its sign. All are NaNs.
/// Smaller codes arrive as they are.
pub fn codes(given: &[u8], are_bytes: bool) -> Vec<u8> {
    let mut arrived = given.to_vec();
    for word in arrived.chunks_mut(4) {
        if are_bytes && word == [0xff; 4] {
            word[0] = 0x7f;
        }
    }
    arrived
}

/// Scales as they arrive, and the words, of four bytes each, that could not travel: all ones arrive instead.
pub fn scales(given: &[u8]) -> (Vec<u8>, Vec<usize>) {
    let (mut arrived, mut lost) = (given.to_vec(), Vec::new());
    for (index, word) in arrived.chunks_mut(4).enumerate() {
        if word == LOST {
            word[0] = 0xff;
            lost.push(index);
        }
    }
    (arrived, lost)
}

/// Packed scales as they arrive: each byte is an exponent with bias 127, 255 is NaN, and an f32 of that value
/// arrives.
pub fn unpacked(given: &[u8]) -> Vec<u8> {
    let value = |&code: &u8| match code {
        255 => f32::from_bits(0x7fff_ffff),
        _ => 2f64.powi(i32::from(code) - 127) as f32,
    };
    given
        .iter()
        .flat_map(|code| value(code).to_le_bytes())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn four_nans_stay_nans_and_everything_else_stays() {
        let given = [
            0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f, 0, 0xff, 0xff, 0xff, 0xff, 1, 2, 3,
        ];
        let mut arrived = given;
        arrived[0] = 0x7f;
        assert_eq!(codes(&given, true), arrived);
        assert_eq!(codes(&given, false), given);
    }

    #[test]
    fn a_word_that_cannot_travel_is_named() {
        let given = [[0xff; 4], LOST, [0xff, 0xfe, 0xff, 0xff], [0, 1, 2, 3]];
        let (arrived, lost) = scales(given.as_flattened());
        assert_eq!(lost, [1]);
        assert_eq!(arrived[4..8], [0xff; 4]);
        assert_eq!(arrived[..4], given.as_flattened()[..4]);
        assert_eq!(arrived[8..], given.as_flattened()[8..]);
    }

    #[test]
    fn every_packed_power_of_two_is_exact() {
        for code in 0..=255_u8 {
            let bytes = unpacked(&[code]);
            let value = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            assert_eq!(value.is_nan(), code == 255);
            if code < 255 {
                assert_eq!(f64::from(value), crate::mxfp8::value_of_scale(code));
            }
        }
    }
}
