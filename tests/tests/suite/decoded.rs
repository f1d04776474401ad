//! Outputs of a dispatch in each format, downloaded and decoded, are what the reference makes of the tokens.

use ferry::{
    CombineBuffers, Communicator, Config, DispatchBuffers, Group, Plan, ScaleLayout, TokenFormat,
    decode_rows,
};
use ferry_reference::workload::Routing;
use ferry_reference::{bf16, fp8, mxfp4, mxfp8, nvfp4};
use ferry_rig::formats::INPUT_SCALE;
use ferry_rig::{Case, Dice, Return, Run};

const EXPERTS: usize = 4;
const TOP_K: usize = 2;
const HIDDEN: usize = 256;

/// Fills tokens with elements of many sizes and both signs, some of them zeros.
fn fill(dice: &mut Dice, x: &mut [bf16]) {
    for x in x {
        *x = match dice.below(16) {
            0 => bf16::ZERO,
            _ => {
                let exponent = dice.below(9) as i32 - 4;
                let mantissa = dice.below(512) as f32 - 256.0;
                bf16::from_f32(mantissa * (exponent as f32).exp2())
            }
        };
    }
}

/// A row after the reference's encoder and decoder.
fn expected(format: TokenFormat, row: &[bf16]) -> Vec<f32> {
    let exact = match format {
        TokenFormat::Bf16 => row.iter().map(|&x| f64::from(x)).collect(),
        TokenFormat::BlockwiseFp8 => {
            let (codes, scales) = fp8::blockwise(row);
            let codes = codes.iter().enumerate();
            let value = |(at, &code)| fp8::value_of_code(code) * f64::from(scales[at / 128]);
            codes.map(value).collect()
        }
        TokenFormat::Mxfp8(_) => {
            let (codes, scales) = mxfp8::encode(row);
            mxfp8::decode(&codes, &scales)
        }
        TokenFormat::Mxfp4(_) => {
            let (codes, scales) = mxfp4::encode(row);
            mxfp4::decode(&codes, &scales)
        }
        TokenFormat::Nvfp4(_) => {
            let (codes, scales) = nvfp4::encode(row, INPUT_SCALE);
            nvfp4::decode(&codes, &scales, INPUT_SCALE)
        }
        TokenFormat::Nvfp4RowScaled(_) => {
            let (codes, scales, inverse) = nvfp4::encode_by_row(row);
            nvfp4::decode_by_row(&codes, &scales, inverse)
        }
    };
    exact.into_iter().map(|value: f64| value as f32).collect()
}

/// Rows of more than a tile for some experts; some slots go nowhere.
fn run(format: TokenFormat) {
    let case = Case {
        experts: EXPERTS,
        top_k: TOP_K,
        hidden: HIDDEN,
        tokens: vec![vec![250; 2]],
        routing: Routing::Holes { probability: 0.2 },
        format,
        how: Return::Exact,
        ..Case::small(5)
    };
    let (mut problems, mut dice) = (case.problems(), Dice::new(3));
    let inputs = problems[0].inputs.iter_mut();
    inputs.for_each(|input| fill(&mut dice, &mut input.x));
    let run = Run::with(&case, &problems, |_, _| {});
    let scale = matches!(format, TokenFormat::Nvfp4(_)).then_some(INPUT_SCALE);
    for (rank, tensors) in run.ranks.iter().zip(&run.tensors[0]) {
        let received = rank.download(&tensors.output).unwrap();
        let values = decode_rows(rank.plan(), &received, scale).unwrap();
        let (oracle, number) = run.expected[0].oracle(rank.rank().0 as usize);
        let mut counts = vec![0; rank.plan().groups()];
        for row in &oracle.placement(number).rows {
            let at = row.position();
            assert_eq!(received.src_info[at], row.info, "{format}, row {at}");
            assert!(
                received.rows_of(row.group).contains(&at),
                "{format}, row {at}"
            );
            counts[row.group] += 1;
            let x = &problems[0].inputs[row.source].x[row.token() * HIDDEN..][..HIDDEN];
            let found = &values[at * HIDDEN..][..HIDDEN];
            assert_eq!(found, expected(format, x), "{format}, row {at}");
        }
        for (group, count) in counts.into_iter().enumerate() {
            let padding = received.rows_of(group).len() - count;
            let most = format.sizes().row_alignment as usize;
            assert!(padding < most.max(1), "{format}: {padding} rows more");
        }
    }
    run.expect_success();
}

#[test]
fn every_format_and_layout_is_decoded_as_the_reference_does() {
    TokenFormat::ALL.into_iter().for_each(run);
}

#[test]
fn copies_that_do_not_fit_are_named() {
    let group = Group::simulated(1, 5).unwrap();
    let format = TokenFormat::Mxfp8(ScaleLayout::Tiled);
    let config = Config {
        format,
        ..Config::new(EXPERTS, TOP_K, HIDDEN, 2)
    };
    let plan = Plan::new(&group, config).unwrap();
    let rank = Communicator::new(&group, &plan).unwrap().remove(0);
    let mut rows = DispatchBuffers::new(rank.device(), &plan).unwrap();
    let mut sums = CombineBuffers::new(rank.device(), &plan).unwrap();
    let token = [bf16::ONE; HIDDEN];
    let text = |result: Result<(), ferry::Error>| result.unwrap_err().to_string();
    assert_eq!(
        text(rows.upload(&token, &[1], None).map(drop)),
        "tensor topk_ids: wanted 2 elements, given 1"
    );
    assert_eq!(
        text(rows.upload(&token[1..], &[0_i32; 0], None).map(drop)),
        "tensor x: wanted [tokens, 256], a multiple of 256 elements, given 255"
    );
    assert_eq!(
        text(rows.upload(&[1.0_f32; HIDDEN], &[1, 2], None).map(drop)),
        "tensor x: wanted elements of bf16, given f32"
    );
    let output = *rows.output();
    for given in [5 * HIDDEN, HIDDEN + 44] {
        assert_eq!(
            text(sums.upload(&output, &vec![bf16::ONE; given]).map(drop)),
            format!(
                "tensor expert_rows: wanted [rows, 256], a multiple of 256 elements, with at most 4 rows, \
                 given {given}"
            )
        );
    }
    assert_eq!(
        text(sums.download::<f32>(1).map(drop)),
        "tensor combined: wanted a download as bf16 or u16, given one as f32"
    );
    let mut received = rows.download().unwrap_or_default();
    received.row_offsets = vec![0, 1, 1, 1, 1];
    received.tokens = vec![0; HIDDEN];
    received.scale_offsets = vec![0; 4];
    received.scales = vec![127; 511];
    assert_eq!(
        text(decode_rows(&plan, &received, None).map(drop)),
        "tensor scales: wanted 1024 elements, given 511"
    );
    assert_eq!(
        text(decode_rows(&plan, &received, Some(2.0)).map(drop)),
        "the format is Mxfp8(Tiled), which takes no input scale"
    );
    rank.close().unwrap();
}
