//! Replays of tokens that are encoded already.

use ferry::{CombineMode, ScaleLayout, TokenFormat};
use ferry_reference::Problem;
use ferry_rig::formats::given::Given;
use ferry_rig::formats::{Encoded, groups, row_bytes};
use ferry_rig::verify::Oracle;
use safetensors::{Dtype, SafeTensors};

use super::{SCALE, Tensors, file_of, options, problem_of_groups, refused_with, replay, tensors};

/// The tensors of a problem, and its tokens encoded.
fn with_codes(problem: &Problem, format: TokenFormat, given: Given) -> Tensors {
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
        let scales = (dtype, vec![input.tokens, width], part(|row| &row.scales));
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
        TokenFormat::BlockwiseFp8,
        TokenFormat::Mxfp8(ScaleLayout::RowMajor),
        TokenFormat::Mxfp4(ScaleLayout::RowMajor),
        TokenFormat::Nvfp4(ScaleLayout::RowMajor),
    ];
    for (index, format) in formats.into_iter().enumerate() {
        for given in [Given::AnyBits, Given::Packed] {
            let given = given.in_format(format, problem.hidden);
            let mut options = options(format).to_vec();
            options.extend(["--receive", "compact", "--pass-through"]);
            options.extend((index % 2 == 0).then_some("transposed"));
            let written = replay(
                "encoded",
                &file_of(&with_codes(&problem, format, given)),
                &options,
            );
            let written = written.unwrap();
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
    let given = with_codes(&problem, TokenFormat::BlockwiseFp8, Given::AnyBits);
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
