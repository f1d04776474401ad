//! Replays of tokens that are encoded already.

use ferry::{CombineMode, ScaleLayout, TokenFormat};
use ferry_reference::Problem;
use ferry_rig::Places;
use ferry_rig::formats::given::Given;
use ferry_rig::formats::{Encoded, groups, row_bytes};
use ferry_rig::verify::Oracle;
use safetensors::{Dtype, SafeTensors};

use super::{
    SCALE, Tensors, file_of, options, problem_of_groups, refused_with, replay, same_tensors,
    tensors,
};

/// `rows` of scales as `[scales of a token, tokens]`.
fn across(rows: &[u8], tokens: usize, bytes: usize) -> Vec<u8> {
    let width = rows.len() / tokens.max(1);
    let scale = |at: usize| (0..tokens).flat_map(move |token| &rows[token * width + at..][..bytes]);
    (0..width).step_by(bytes).flat_map(scale).copied().collect()
}

/// The tensors of a problem, and its tokens encoded, with scales in these places.
fn with_codes(problem: &Problem, format: TokenFormat, given: Given, places: Places) -> Tensors {
    let mut all = tensors(problem, true);
    for (rank, input) in problem.inputs.iter().enumerate() {
        let rows = input.x.chunks(problem.hidden);
        let encoded: Vec<Encoded> = rows.map(|row| given.given(format, row, 1.0)).collect();
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

/// A problem whose tokens have packed scales, too.
fn problem() -> Problem {
    let problem = problem_of_groups();
    ferry_rig::problem(
        problem.inputs.iter().map(|input| input.tokens).collect(),
        [problem.experts, problem.top_k, 512],
        ferry_reference::workload::Routing::Uniform,
        5,
    )
}

#[test]
fn codes_and_scales_come_back() {
    let problem = problem();
    let formats = [
        (TokenFormat::BlockwiseFp8, Places::RowMajor),
        (TokenFormat::BlockwiseFp8, Places::Transposed),
        (TokenFormat::Mxfp8(ScaleLayout::RowMajor), Places::RowMajor),
        (TokenFormat::Mxfp4(ScaleLayout::RowMajor), Places::RowMajor),
        (TokenFormat::Nvfp4(ScaleLayout::RowMajor), Places::RowMajor),
    ];
    for (format, places) in formats {
        for given in [Given::AnyBits, Given::Packed] {
            let given = given.in_format(format, problem.hidden);
            let mut options = options(format);
            options.extend(["--receive", "compact", "--pass-through"]);
            options.extend((places == Places::Transposed).then_some("transposed"));
            let file = file_of(&with_codes(&problem, format, given, places));
            let written = replay("encoded", &file, &options).unwrap();
            let file = SafeTensors::deserialize(&written).unwrap();
            let mut rows = 0;
            for rank in 0..problem.ranks {
                let tensor = |name: &str| file.tensor(&format!("{name}.{rank}")).unwrap();
                let (tokens, scales, info) =
                    (tensor("tokens"), tensor("scales"), tensor("src_info"));
                let count = info.shape()[0];
                let widths = [tokens.data().len() / count, scales.data().len() / count];
                for (row, info) in info.data().as_chunks::<8>().0.iter().enumerate() {
                    let [source, token] = [0, 4].map(|at| info[at] as usize);
                    let x = &problem.inputs[source].x[token * problem.hidden..][..problem.hidden];
                    let wanted = given.arrives(format, x, 1.0);
                    assert!(tokens.data()[row * widths[0]..][..widths[0]] == wanted.payload);
                    assert!(scales.data()[row * widths[1]..][..widths[1]] == wanted.scales);
                    rows += 1;
                }
                let combined = Oracle::new(&problem, &SCALE[..problem.experts], format)
                    .combined(CombineMode::Reduced, true);
                let sums: Vec<u8> = combined[rank]
                    .iter()
                    .flat_map(|x| x.to_le_bytes())
                    .collect();
                assert!(tensor("combined").data() == sums, "{options:?}");
            }
            assert!(rows > 100, "{rows}");
        }
    }
}

#[test]
fn codes_that_do_not_fit_are_named() {
    let problem = problem();
    let fp8 = TokenFormat::BlockwiseFp8;
    let given = with_codes(&problem, fp8, Given::AnyBits, Places::RowMajor);
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
    refused(&tensors(&problem, true), "fp8", "tensor codes.0 is missing");
}

/// Tokens are as many as scales of a token, so that only the option tells rows from columns.
#[test]
fn square_scales_are_read_as_the_option_says() {
    let routing = ferry_reference::workload::Routing::Uniform;
    let problem = ferry_rig::problem(vec![4, 4], [12, 2, 512], routing, 5);
    let fp8 = TokenFormat::BlockwiseFp8;
    let written = [Places::RowMajor, Places::Transposed].map(|places| {
        let given = with_codes(&problem, fp8, Given::AnyBits, places);
        let mut options = vec!["--format", "fp8", "--receive", "compact", "--pass-through"];
        options.extend((places == Places::Transposed).then_some("transposed"));
        replay("encoded-square", &file_of(&given), &options).unwrap()
    });
    same_tensors(&written[0], &written[1]);
}

#[test]
fn what_has_no_effect_on_scales_is_refused() {
    let problem = problem();
    let refused = |given: &Tensors, options: &str, words: &str| {
        let options: Vec<_> = options.split(' ').collect();
        refused_with("encoded-no-effect", given, &options, words);
    };
    let fp8 = with_codes(
        &problem,
        TokenFormat::BlockwiseFp8,
        Given::AnyBits,
        Places::RowMajor,
    );
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
    let across = with_codes(
        &problem,
        TokenFormat::BlockwiseFp8,
        Given::AnyBits,
        Places::Transposed,
    );
    refused(
        &across,
        "--format fp8 --receive compact --pass-through",
        "--pass-through takes scales as [tokens, scales of a token]: tensor x_scales.0 is F32 [4, 140]",
    );
    let mxfp8 = TokenFormat::Mxfp8(ScaleLayout::RowMajor);
    let mxfp8 = with_codes(&problem, mxfp8, Given::AnyBits, Places::Transposed);
    refused(
        &mxfp8,
        "--format mxfp8 --scales row-major --receive compact --pass-through transposed",
        "--pass-through transposed: dispatch takes transposed scales in fp8, in mxfp8 only row-major ones",
    );
    let nvfp4 = TokenFormat::Nvfp4(ScaleLayout::RowMajor);
    let mut nvfp4 = with_codes(&problem, nvfp4, Given::AnyBits, Places::RowMajor);
    nvfp4.insert(
        "input_scale".into(),
        (Dtype::F32, vec![1], 1_f32.to_le_bytes().to_vec()),
    );
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
