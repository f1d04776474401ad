//! Outputs of a dispatch in each format, downloaded and decoded, are what the reference makes of the tokens.

use ferry::{
    CombineBuffers, CombineMode, Communicator, Config, DispatchBuffers, Group, Plan, ScaleLayout,
    Stream, TokenFormat, decode_rows,
};
use ferry_reference::{bf16, fp8, mxfp4, mxfp8, nvfp4};
use ferry_rig::Dice;
use ferry_rig::formats::INPUT_SCALE;

const RANKS: usize = 2;
const EXPERTS: usize = 4;
const TOP_K: usize = 2;
const HIDDEN: usize = 256;
/// More than a tile of rows for an expert.
const TOKENS: usize = 150;

/// Tokens of a rank.
struct Brought {
    x: Vec<bf16>,
    ids: Vec<i32>,
}

/// Elements of many sizes and both signs, some of them zeros; most tokens go to expert 1, some nowhere.
fn brought(dice: &mut Dice) -> Brought {
    let mut element = || match dice.below(16) {
        0 => bf16::ZERO,
        _ => {
            let exponent = dice.below(9) as i32 - 4;
            let mantissa = dice.below(512) as f32 - 256.0;
            bf16::from_f32(mantissa * (exponent as f32).exp2())
        }
    };
    let x = (0..TOKENS * HIDDEN).map(|_| element()).collect();
    let ids = (0..TOKENS).flat_map(|_| match dice.below(8) {
        0 => [0, 3],
        1 => [-1, 2],
        2 => [3, 1],
        _ => [1, 0],
    });
    Brought {
        x,
        ids: ids.collect(),
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

fn run(format: TokenFormat) {
    let group = Group::simulated(RANKS as u32, 5).unwrap();
    let config = Config {
        format,
        combine: CombineMode::Exact,
        ..Config::new(EXPERTS, TOP_K, HIDDEN, TOKENS)
    };
    let plan = Plan::new(&group, config).unwrap();
    let mut ranks = Communicator::new(&group, &plan).unwrap();
    let mut dice = Dice::new(3);
    let given: Vec<Brought> = (0..RANKS).map(|_| brought(&mut dice)).collect();
    let scale = matches!(format, TokenFormat::Nvfp4(_)).then_some(INPUT_SCALE);
    let mut buffers: Vec<_> = (ranks.iter())
        .map(|rank| {
            let buffers = DispatchBuffers::new(rank.device(), &plan).unwrap();
            buffers.fill(0).unwrap();
            (buffers, CombineBuffers::new(rank.device(), &plan).unwrap())
        })
        .collect();
    for ((rank, (rows, _)), given) in ranks.iter_mut().zip(&mut buffers).zip(&given) {
        let device = rank.device().clone();
        let mut input = rows.upload(&given.x, &given.ids, None).unwrap();
        input.input_scale = scale.map(|scale| device.upload_tensor([1], &[scale]).unwrap());
        rank.dispatch(Stream::DEFAULT, &input, rows.output())
            .unwrap();
    }
    for (rank, (rows, _)) in ranks.iter().zip(&buffers) {
        assert_eq!(rank.synchronize(Stream::DEFAULT).unwrap().fault(), None);
        let received = rows.download().unwrap();
        let values = decode_rows(&plan, &received, scale).unwrap();
        for group in 0..plan.groups() {
            let expert = (plan.first_expert(rank.rank()) + group) as i32;
            let mut rows = received.rows_of(group);
            for given in &given {
                let assignments = given.ids.iter().enumerate();
                for (at, _) in assignments.filter(|(_, id)| **id == expert) {
                    let (token, row) =
                        (at / TOP_K, rows.next().expect("a row for each assignment"));
                    let source = [token as i32, (at % TOP_K) as i32];
                    assert_eq!(received.src_info[row], source, "{format}, row {row}");
                    let wanted = expected(format, &given.x[token * HIDDEN..][..HIDDEN]);
                    let found = &values[row * HIDDEN..][..HIDDEN];
                    assert_eq!(found, wanted, "{format}, row {row}");
                }
            }
            let padding = format.sizes().row_alignment as usize;
            assert!(
                rows.len() < padding.max(1),
                "{format}: {} rows more",
                rows.len()
            );
        }
    }
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
