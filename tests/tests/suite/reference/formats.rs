//! The block-scaled formats, bit for bit: the oracle, the kernels' arithmetic, and vectors made with
//! ml_dtypes by `tests/reference/vectors/make.py`.

use ferry_layout::e2m1::{e2m1_bits, e2m1x2_bits, f32_of_e2m1_bits};
use ferry_layout::e8m0::{e8m0_up, f32_of_e8m0_bits};
use ferry_layout::fp8::{e4m3_bits, f32_of_e4m3_bits, larger};
use ferry_reference::{bf16, e2m1, fp8, mxfp4, mxfp8, nvfp4, scale_layout};
use proptest::prelude::*;

const VECTORS: &str = concat!(
    include_str!("../../../reference/vectors/block-scaled.txt"),
    include_str!("../../../reference/vectors/wide.txt")
);

/// Payload and scales.
type Encoded = (Vec<u8>, Vec<u8>);

/// Encoders with the kernels' arithmetic.
mod portable {
    use super::*;
    use ferry_layout::{Arithmetic, fp8, mxfp4, mxfp8, nvfp4};

    pub fn amax(group: &[f32]) -> f32 {
        group.iter().copied().fold(0.0, larger)
    }

    fn packed(group: &[f32], multiplier: f32) -> impl Iterator<Item = u8> {
        let pairs = group.as_chunks().0.iter();
        pairs.map(move |&[even, odd]| e2m1x2_bits(even * multiplier, odd * multiplier))
    }

    /// The operations of a GPU.
    #[derive(Clone, Copy)]
    struct Std;

    impl Arithmetic for Std {
        fn multiply_add(self, a: f32, b: f32, c: f32) -> f32 {
            a.mul_add(b, c)
        }

        fn reciprocal(self, d: f32) -> f32 {
            1.0 / d
        }
    }

    /// Encodes blockwise FP8, and compares the kernels' division with an exact one.
    pub fn fp8(row: &[f32]) -> Encoded {
        let (mut codes, mut scales) = (Vec::new(), Vec::new());
        for group in row.chunks(fp8::GROUP as usize) {
            let scale = fp8::scale(amax(group));
            let divisor = fp8::Divisor::new(scale);
            scales.extend(scale.to_be_bytes());
            codes.extend(group.iter().map(|&x| {
                let code = e4m3_bits(x / scale);
                assert_eq!(e4m3_bits(divisor.divide(x, Std)), code, "{x:e} / {scale:e}");
                code
            }));
        }
        (codes, scales)
    }

    pub fn mxfp8(row: &[f32]) -> Encoded {
        let (mut codes, mut scales) = (Vec::new(), Vec::new());
        for group in row.chunks(mxfp8::GROUP as usize) {
            let scale = mxfp8::scale_bits(amax(group));
            let multiplier = mxfp8::multiplier(amax(group), scale);
            scales.push(scale);
            codes.extend(group.iter().map(|x| e4m3_bits(x * multiplier)));
        }
        (codes, scales)
    }

    pub fn mxfp4(row: &[f32]) -> Encoded {
        let (mut payload, mut scales) = (Vec::new(), Vec::new());
        for group in row.chunks(mxfp4::GROUP as usize) {
            let scale = mxfp4::scale_bits(amax(group));
            scales.push(scale);
            payload.extend(packed(group, mxfp4::multiplier(scale)));
        }
        (payload, scales)
    }

    pub fn nvfp4(row: &[f32], global: f32) -> Encoded {
        let (mut payload, mut scales) = (Vec::new(), Vec::new());
        for group in row.chunks(nvfp4::GROUP as usize) {
            let scale = nvfp4::scale_bits(amax(group), global);
            scales.push(scale);
            payload.extend(packed(group, nvfp4::multiplier(scale, 1.0 / global)));
        }
        (payload, scales)
    }
}

fn byte(hex: &str) -> u8 {
    u8::from_str_radix(hex, 16).expect("two hex digits")
}

fn bytes(hex: &str) -> Vec<u8> {
    (0..hex.len() / 2)
        .map(|at| byte(&hex[2 * at..2 * at + 2]))
        .collect()
}

fn bf16s(hex: &str) -> Vec<bf16> {
    let pairs = bytes(hex);
    let numbers = pairs.chunks(2).map(|pair| [pair[0], pair[1]]);
    numbers
        .map(|pair| bf16::from_bits(u16::from_be_bytes(pair)))
        .collect()
}

/// Converts exactly.
fn widened(row: &[bf16]) -> Vec<f32> {
    row.iter().map(|x| x.to_f32()).collect()
}

fn f32_of(hex: &str) -> f32 {
    f32::from_bits(u32::from_str_radix(hex, 16).expect("eight hex digits"))
}

/// Lines of the vectors that begin with `kind`, as words.
fn lines(kind: &str) -> impl Iterator<Item = Vec<&str>> {
    let lines = VECTORS
        .lines()
        .map(|line| line.split(' ').collect::<Vec<_>>());
    lines.filter(move |words| words[0] == kind)
}

#[test]
fn codes_have_the_vectors_values() {
    let (mut formats, same) = (0, |a: f32, b: f32| a == b || a.is_nan() && b.is_nan());
    for words in lines("values") {
        for (code, word) in (0_u8..=255).zip(&words[2..]) {
            let wanted = if *word == "nan" {
                f32::NAN
            } else {
                f32_of(word)
            };
            let (oracle, portable) = match words[1] {
                "e2m1" => (e2m1::value_of_code(code), f32_of_e2m1_bits(code)),
                "e4m3" => (fp8::value_of_code(code), f32_of_e4m3_bits(code)),
                "e8m0" => (mxfp8::value_of_scale(code), f32_of_e8m0_bits(code)),
                format => panic!("{format}"),
            };
            assert!(same(portable, wanted), "{} {code:#x}", words[1]);
            assert!(same(oracle as f32, wanted), "{} {code:#x}", words[1]);
        }
        assert_eq!(words.len() - 2, if words[1] == "e2m1" { 16 } else { 256 });
        formats += 1;
    }
    assert_eq!(formats, 3);
}

#[test]
fn every_bf16_becomes_the_vectors_code() {
    let mut formats = 0;
    for words in lines("cast") {
        let changes: Vec<(u16, u8)> = words[2..]
            .iter()
            .filter_map(|word| word.split_once(':'))
            .map(|(bits, code)| (u16::from_str_radix(bits, 16).expect("hex"), byte(code)))
            .collect();
        for bits in 0..=u16::MAX {
            let value = bf16::from_bits(bits);
            let next = changes.partition_point(|(start, _)| *start <= bits);
            let wanted = changes[next - 1].1;
            let portable = match words[1] {
                "e2m1" => e2m1_bits(value.to_f32()),
                "e4m3" => e4m3_bits(value.to_f32()),
                "e8m0" => e8m0_up(value.to_f32()),
                format => panic!("{format}"),
            };
            assert_eq!(portable, wanted, "{} of {bits:#06x}", words[1]);
            let oracle = match words[1] {
                "e2m1" => e2m1::nearest_code(value.to_f64()),
                "e4m3" => fp8::nearest_code(value.to_f64()),
                // The oracle has no e8m0 cast apart from scales.
                _ => continue,
            };
            assert_eq!(oracle, wanted, "{} of {bits:#06x}", words[1]);
        }
        formats += 1;
    }
    assert_eq!(formats, 3);
}

#[test]
fn rows_become_the_vectors_bytes() {
    let (mut row, mut narrow, mut encodings) = (Vec::new(), Vec::new(), 0);
    for words in VECTORS.lines().map(|line| line.split(' ').collect()) {
        let words: Vec<&str> = words;
        let (oracle, portable) = match words[0] {
            "row" => {
                narrow = bf16s(words[1]);
                row = widened(&narrow);
                continue;
            }
            "row-f32" => {
                let numbers = bytes(words[1]);
                let numbers = numbers.as_chunks().0.iter();
                row = numbers.map(|&bits| f32::from_be_bytes(bits)).collect();
                continue;
            }
            "fp8" => {
                let (codes, scales) = fp8::blockwise(&row);
                let scales = scales.into_iter().flat_map(f32::to_be_bytes);
                ((codes, scales.collect()), portable::fp8(&row))
            }
            "mxfp8" => (mxfp8::encode(&row), portable::mxfp8(&row)),
            "mxfp4" => (mxfp4::encode(&row), portable::mxfp4(&row)),
            "nvfp4" => {
                let global = f32_of(words[1]);
                (nvfp4::encode(&row, global), portable::nvfp4(&row, global))
            }
            "nvfp4-by-row" => {
                let inverse = ferry_layout::nvfp4::inverse_global_bits(portable::amax(&row));
                let (payload, scales, of_oracle) = nvfp4::encode_by_row(&narrow);
                assert_eq!(format!("{inverse:04x}"), words[1], "{row:?}");
                assert_eq!(of_oracle.to_bits(), inverse, "{row:?}");
                let global = ferry_layout::nvfp4::global_of_inverse(inverse);
                ((payload, scales), portable::nvfp4(&row, global))
            }
            _ => continue,
        };
        let [.., payload, scales] = words[..] else {
            panic!("a short line")
        };
        let wanted = (bytes(payload), bytes(scales));
        assert_eq!(portable, wanted, "kernels, {}: {row:?}", words[0]);
        assert_eq!(oracle, wanted, "oracle, {}: {row:?}", words[0]);
        encodings += 1;
    }
    assert_eq!(encodings, 77 * 5 + 49 + 33 * 5);
}

/// Whether `exact`, rounded once, is `value`; NaNs are equal.
fn rounds_to(exact: f64, value: f32) -> bool {
    exact as f32 == value || exact.is_nan() && value.is_nan()
}

/// Rows of two MX groups, of any bits or of small numbers.
fn rows() -> impl Strategy<Value = Vec<bf16>> {
    let anything = any::<u16>().prop_map(bf16::from_bits);
    let below_2 = any::<u16>().prop_map(|bits| bf16::from_bits(bits & 0xbfff));
    let near = (-8f32..8.0).prop_map(bf16::from_f32);
    prop_oneof![
        prop::collection::vec(anything, 64),
        prop::collection::vec(below_2, 64),
        prop::collection::vec(near, 64),
    ]
}

/// Rows of 128 elements, one group of blockwise FP8: any bits, any bits below 2, or numbers from -8 to 8.
fn rows_of_f32() -> impl Strategy<Value = Vec<f32>> {
    let anything = any::<u32>().prop_map(f32::from_bits);
    let below_2 = any::<u32>().prop_map(|bits| f32::from_bits(bits & 0xbfff_ffff));
    prop_oneof![
        prop::collection::vec(anything, 128),
        prop::collection::vec(below_2, 128),
        prop::collection::vec(-8f32..8.0, 128),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        cases: 1000,
        ..ProptestConfig::default()
    })]

    #[test]
    fn mx_of_any_row(row in rows()) {
        let (codes, scales) = mxfp8::encode(&row);
        prop_assert_eq!(portable::mxfp8(&widened(&row)), (codes.clone(), scales.clone()));
        for (at, exact) in mxfp8::decode(&codes, &scales).into_iter().enumerate() {
            let value = ferry_layout::mxfp8::dequantised(codes[at], scales[at / 32]);
            prop_assert!(rounds_to(exact, value), "{exact} {value}");
        }
        let (payload, scales) = mxfp4::encode(&row);
        prop_assert_eq!(portable::mxfp4(&widened(&row)), (payload.clone(), scales.clone()));
        for (at, exact) in mxfp4::decode(&payload, &scales).into_iter().enumerate() {
            let code = payload[at / 2] >> (4 * (at % 2));
            let value = ferry_layout::mxfp4::dequantised(code, scales[at / 32]);
            prop_assert!(rounds_to(exact, value), "{exact} {value}");
        }
    }

    #[test]
    fn any_row_of_f32(row in rows_of_f32(), exponent in -126i32..=125, mantissa in 1f32..2.0) {
        let global = mantissa * 2f32.powi(exponent);
        let (codes, scales) = fp8::blockwise(&row);
        let scales: Vec<u8> = scales.into_iter().flat_map(f32::to_be_bytes).collect();
        prop_assert_eq!(portable::fp8(&row), (codes, scales));
        prop_assert_eq!(portable::mxfp8(&row), mxfp8::encode(&row));
        prop_assert_eq!(portable::mxfp4(&row), mxfp4::encode(&row));
        prop_assert_eq!(portable::nvfp4(&row, global), nvfp4::encode(&row, global));
    }

    #[test]
    fn nvfp4_of_any_row(row in rows(), exponent in -126i32..=125, mantissa in 1f32..2.0) {
        let global = mantissa * 2f32.powi(exponent);
        let (payload, scales) = nvfp4::encode(&row, global);
        prop_assert_eq!(portable::nvfp4(&widened(&row), global), (payload.clone(), scales.clone()));
        for (at, exact) in nvfp4::decode(&payload, &scales, global).into_iter().enumerate() {
            let code = payload[at / 2] >> (4 * (at % 2));
            let value = ferry_layout::nvfp4::dequantised(code, scales[at / 16], global);
            prop_assert!(rounds_to(exact, value), "{exact} {value}");
        }
    }

    #[test]
    fn nvfp4_of_any_row_by_itself(row in rows()) {
        let (payload, scales, inverse) = nvfp4::encode_by_row(&row);
        let bits = ferry_layout::nvfp4::inverse_global_bits(portable::amax(&widened(&row)));
        prop_assert_eq!(bits, inverse.to_bits());
        let global = ferry_layout::nvfp4::global_of_inverse(bits);
        prop_assert_eq!(portable::nvfp4(&widened(&row), global), (payload.clone(), scales.clone()));
        let values = nvfp4::decode_by_row(&payload, &scales, inverse);
        for (at, exact) in values.into_iter().enumerate() {
            let code = payload[at / 2] >> (4 * (at % 2));
            let value = ferry_layout::nvfp4::dequantised_by_row(code, scales[at / 16], bits);
            prop_assert!(rounds_to(exact, value), "{exact} {value}");
        }
    }

    #[test]
    fn scales_stand_where_the_oracle_puts_them(
        counts in prop::collection::vec(0usize..300, 1..5),
        groups in 1usize..14,
    ) {
        let scale = |expert: usize, row: usize, group: usize| {
            (expert * 89 + row * 31 + group * 7) as u8 | 1
        };
        let experts: Vec<Vec<Vec<u8>>> = (0..counts.len())
            .map(|expert| (0..counts[expert])
                .map(|row| (0..groups).map(|group| scale(expert, row, group)).collect())
                .collect())
            .collect();
        let (tensor, offsets) = scale_layout::place(&experts, groups);
        let mut row_offsets = vec![0];
        for count in &counts {
            row_offsets.push(row_offsets[row_offsets.len() - 1] + *count as u32);
        }
        prop_assert_eq!(tensor.len() as u64, portable_tensor(&row_offsets, &offsets, &experts, &tensor)?);
        let filled = tensor.iter().filter(|byte| **byte != 0).count();
        prop_assert_eq!(filled, counts.iter().sum::<usize>() * groups);
    }
}

/// Checks each scale's place and `scales_offsets`, and returns the bytes of the tensor.
fn portable_tensor(
    row_offsets: &[u32],
    offsets: &[u32],
    experts: &[Vec<Vec<u8>>],
    tensor: &[u8],
) -> Result<u64, TestCaseError> {
    use ferry_layout::scale_placement::{bytes, first_block, first_blocks, offset, scales_offset};
    let blocks: Vec<u32> = first_blocks(row_offsets).collect();
    let groups = tensor_groups(experts);
    for (expert, rows) in experts.iter().enumerate() {
        let scales_offset = scales_offset(blocks[expert], row_offsets[expert]);
        prop_assert_eq!(scales_offset, offsets[expert]);
        let first = first_block(row_offsets[expert], scales_offset);
        prop_assert_eq!(first, blocks[expert]);
        for (row, scales) in rows.iter().enumerate() {
            for (group, scale) in scales.iter().enumerate() {
                let at = offset(first, row as u32, group as u32, groups);
                prop_assert_eq!(tensor[at as usize], *scale);
            }
        }
    }
    Ok(bytes(u64::from(blocks[experts.len()]), groups))
}

/// Scales per row; 1 if there are no rows.
fn tensor_groups(experts: &[Vec<Vec<u8>>]) -> u32 {
    let rows = experts.iter().flatten();
    rows.map(|scales| scales.len() as u32).next().unwrap_or(1)
}
