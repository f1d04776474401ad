//! Replays of tokens that are encoded already.

use ferry::{ReceiveLayout, ScaleLayout, TokenFormat};
use ferry_reference::Problem;
use ferry_rig::formats::given::{Given, Strides};
use ferry_rig::formats::{Encoded, INPUT_SCALE, groups, row_bytes};
use ferry_rig::{Case, Places};
use safetensors::Dtype;

use super::{
    Tensors, comes_back, file_of, groups_case, numbers, places, refused_with, replay, same_tensors,
    tensors,
};

/// `rows` of scales as `[scales of a token, tokens]`.
fn across(rows: &[u8], tokens: usize, bytes: usize) -> Vec<u8> {
    let width = rows.len() / tokens.max(1);
    let scale = |at: usize| (0..tokens).flat_map(move |token| &rows[token * width + at..][..bytes]);
    (0..width).step_by(bytes).flat_map(scale).copied().collect()
}

/// The tensors of a case's problem, and its tokens encoded, with scales in the case's places.
pub(super) fn with_codes(problem: &Problem, case: &Case) -> Tensors {
    let (format, places) = (case.format, places(case));
    let given = case.given.in_format(format, problem.hidden);
    let mut all = tensors(problem, !case.is_unweighted(0));
    for (rank, input) in problem.inputs.iter().enumerate() {
        let rows = input.x.chunks(problem.hidden);
        let encoded: Vec<Encoded> = rows
            .map(|row| given.given(format, row, INPUT_SCALE))
            .collect();
        let part = |part: fn(&Encoded) -> &[u8]| -> Vec<u8> {
            encoded.iter().flat_map(|row| part(row).to_vec()).collect()
        };
        let codes = (
            Dtype::U8,
            vec![input.tokens, row_bytes(format, problem.hidden)],
            part(|row| &row.payload),
        );
        let (dtype, width) = match (given, format) {
            (Given::Packed, _) => (Dtype::I32, groups(format, problem.hidden) / 4),
            (_, TokenFormat::BlockwiseFp8) => (Dtype::F32, groups(format, problem.hidden)),
            _ => (Dtype::U8, groups(format, problem.hidden)),
        };
        let scales = part(|row| &row.scales);
        let scales = match places {
            Places::RowMajor => (dtype, vec![input.tokens, width], scales),
            Places::Transposed => {
                let scales = across(&scales, input.tokens, dtype.bitsize() / 8);
                (dtype, vec![width, input.tokens], scales)
            }
        };
        all.insert(format!("codes.{rank}"), codes);
        all.insert(format!("x_scales.{rank}"), scales);
    }
    all
}

/// A case of tokens that are encoded.
fn encoded(format: TokenFormat, given: Given, strides: Strides) -> Case {
    Case {
        format,
        given,
        strides,
        receive: ReceiveLayout::Compact,
        // Packed scales are of whole words.
        hidden: 512,
        ..groups_case(5)
    }
}

/// Its tensors.
fn given(case: &Case) -> Tensors {
    with_codes(&case.problem(0), case)
}

#[test]
fn codes_and_scales_come_back() {
    let formats = [
        (TokenFormat::BlockwiseFp8, Strides::RowMajor),
        (TokenFormat::BlockwiseFp8, Strides::Transposed),
        (TokenFormat::Mxfp8(ScaleLayout::RowMajor), Strides::RowMajor),
        (TokenFormat::Mxfp4(ScaleLayout::RowMajor), Strides::RowMajor),
        (TokenFormat::Nvfp4(ScaleLayout::RowMajor), Strides::RowMajor),
    ];
    for (format, strides) in formats {
        for given in [Given::AnyBits, Given::Packed] {
            comes_back("encoded", encoded(format, given, strides));
        }
    }
}

const FP8: TokenFormat = TokenFormat::BlockwiseFp8;

#[test]
fn codes_that_do_not_fit_are_named() {
    let case = encoded(FP8, Given::AnyBits, Strides::RowMajor);
    let given = given(&case);
    let of = |format: &'static str| ["--format", format, "--receive", "compact", "--pass-through"];
    let refused = |given: &Tensors, format, words: &str| {
        refused_with("encoded-refused", given, &of(format), words);
    };
    refused(
        &given,
        "mxfp4",
        "--pass-through: codes and x_scales of a token are U8 [512] and F32 [4]",
    );
    refused(
        &given,
        "bf16",
        "--pass-through: --format bf16 takes no scales",
    );
    let mut lacks = given.clone();
    lacks.remove("x_scales.1");
    refused(&lacks, "fp8", "tensor x_scales.1 is missing");
    let mut short = given;
    let codes = short.get_mut("codes.1").unwrap();
    codes.1[0] -= 1;
    codes.2.truncate(codes.1[0] * codes.1[1]);
    refused(&short, "fp8", "tensor codes.1 is U8");
    let bare = tensors(&case.problem(0), true);
    refused(&bare, "fp8", "tensor codes.0 is missing");
}

/// Tokens are as many as scales of a token, so that only the option tells rows from columns.
#[test]
fn square_scales_are_read_as_the_option_says() {
    let written = [Strides::RowMajor, Strides::Transposed].map(|strides| {
        let case = Case {
            tokens: vec![vec![4, 4]],
            ..encoded(FP8, Given::AnyBits, strides)
        };
        let mut options = vec!["--format", "fp8", "--receive", "compact", "--pass-through"];
        options.extend((strides == Strides::Transposed).then_some("transposed"));
        replay("encoded-square", &file_of(&given(&case)), &options).unwrap()
    });
    same_tensors(&written[0], &written[1]);
}

#[test]
fn what_has_no_effect_on_scales_is_refused() {
    let encoded = |format, strides| given(&encoded(format, Given::AnyBits, strides));
    let refused = |given: &Tensors, options: &str, words: &str| {
        let options: Vec<_> = options.split(' ').collect();
        refused_with("encoded-no-effect", given, &options, words);
    };
    let fp8 = encoded(FP8, Strides::RowMajor);
    let transposed = "--format fp8 --receive compact --pass-through transposed";
    refused(
        &fp8,
        transposed,
        "takes scales as [scales of a token, tokens]",
    );
    refused(
        &fp8,
        transposed,
        "tensor x_scales.0 is F32 [140, 4], wanted F32 [140, 140]",
    );
    let across = encoded(FP8, Strides::Transposed);
    refused(
        &across,
        "--format fp8 --receive compact --pass-through",
        "--pass-through takes scales as [tokens, scales of a token]: tensor x_scales.0 is F32 [4, 140]",
    );
    let mut mxfp8 = encoded(TokenFormat::Mxfp8(ScaleLayout::RowMajor), Strides::RowMajor);
    for (name, tensor) in &mut mxfp8 {
        if name.starts_with("x_scales") {
            tensor.1.reverse();
        }
    }
    refused(
        &mxfp8,
        "--format mxfp8 --scales row-major --receive compact --pass-through transposed",
        "--pass-through transposed: dispatch takes transposed scales in fp8, in mxfp8 only row-major ones",
    );
    let mut nvfp4 = encoded(TokenFormat::Nvfp4(ScaleLayout::RowMajor), Strides::RowMajor);
    nvfp4.insert("input_scale".into(), numbers(&[1.0]));
    refused(
        &nvfp4,
        "--format nvfp4 --scales row-major --receive compact --pass-through",
        "tensor input_scale is given, but with --pass-through dispatch takes none",
    );
    for format in ["bf16", "fp8"] {
        let words = format!("--scales: with --format {format} there are no scales of one byte");
        refused(&fp8, &format!("--format {format} --scales tiled"), &words);
    }
}
