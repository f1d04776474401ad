//! Tokens that are encoded already: scales of the wrong shape, type or strides, what they exclude, and a
//! round without options.

use crate::support::*;
use ferry::*;

const WIDE: usize = 512;
const GROUPS: usize = WIDE / 128;

fn wide(format: TokenFormat) -> Config {
    Config {
        hidden: WIDE,
        format,
        options: true,
        ..config()
    }
}

/// One rank with three tokens of zeros, whose outputs are of this configuration, and memory for scales.
fn rank_of(config: Config) -> (Communicator, DispatchInput, DispatchBuffers, DevicePtr) {
    let group = Group::simulated(1, 1).unwrap();
    let config = Config {
        experts: 2,
        ..config
    };
    let plan = Plan::new(&group, config).unwrap();
    let rank = Communicator::new(&group, &plan).unwrap().remove(0);
    let memory = rank.device().alloc(1 << 14).unwrap();
    let ids = upload(&rank, &words(&[0, 1, 1, 0, 0, 1], i32::to_le_bytes));
    let codes = Tensor::contiguous(memory, DataType::of_tokens(config.format), [3, WIDE]);
    let ids = Tensor::contiguous(ids, DataType::I32, [3, TOP_K]);
    let buffers = DispatchBuffers::new(rank.device(), &plan).unwrap();
    (
        rank,
        DispatchInput::new(codes, ids),
        buffers,
        memory.plus(8192),
    )
}

/// The error text of a dispatch with these scales.
#[track_caller]
fn refused(
    of: &mut (Communicator, DispatchInput, DispatchBuffers, DevicePtr),
    scales: Option<Tensor<2>>,
) -> String {
    let input = DispatchInput {
        x_scales: scales,
        ..of.1
    };
    let made = of.0.dispatch(STREAM, &input, of.2.output());
    made.expect_err("was not refused").to_string()
}

#[test]
fn scales_that_do_not_fit_are_named() {
    let mut of = rank_of(wide(TokenFormat::BlockwiseFp8));
    let at = of.3;
    let dense = |data_type, dims| Tensor::contiguous(at, data_type, dims);
    let strided = |strides| Tensor {
        strides,
        ..dense(DataType::F32, [3, GROUPS])
    };
    for (scales, wanted) in [
        (
            None,
            "tensor x_scales: wanted a tensor, as x is e4m3, given none",
        ),
        (
            Some(dense(DataType::F32, [3, 5])),
            "tensor x_scales: wanted shape [3, 4], given [3, 5]",
        ),
        (
            Some(dense(DataType::F32, [4, 3])),
            "tensor x_scales: wanted shape [3, 4], given [4, 3]",
        ),
        (
            Some(dense(DataType::I32, [3, 4])),
            "tensor x_scales: wanted shape [3, 1], given [3, 4]",
        ),
        (
            Some(dense(DataType::E8m0, [3, 4])),
            "tensor x_scales: wanted elements of f32, given e8m0",
        ),
        (
            Some(Tensor {
                at: at.plus(2),
                ..dense(DataType::F32, [3, 4])
            }),
            "tensor x_scales: wanted an address that is a multiple of 4",
        ),
        (
            Some(strided([1 << 31, 1])),
            "tensor x_scales: wanted rows a multiple of 1 elements apart, fewer than 2^31",
        ),
        (
            Some(strided([1, 1 << 31])),
            "tensor x_scales: wanted columns fewer than 2^31 elements apart",
        ),
        (
            Some(strided([(1 << 31) - 1, 1])),
            "tensor x_scales: wanted at most 16 GiB from the first element to the last",
        ),
        (
            Some(strided([1, 1000])),
            "tensor x_scales: wanted 12012 bytes at its address (shape [3, 4]), given 8192",
        ),
    ] {
        let text = refused(&mut of, scales);
        assert!(text.starts_with(wanted), "{text}; wanted: {wanted}");
    }
    of.1.x.data_type = DataType::Bf16;
    assert_eq!(
        refused(&mut of, Some(dense(DataType::F32, [3, 4]))),
        "tensor x: wanted elements of e4m3, given bf16"
    );
    of.0.close().unwrap();
}

#[test]
fn scales_of_a_byte_are_read_in_words() {
    let mut of = rank_of(wide(TokenFormat::Mxfp8(ScaleLayout::RowMajor)));
    let scales = Tensor::contiguous(of.3, DataType::E8m0, [3, WIDE / 32]);
    for (strides, wanted) in [
        ([18, 1], "rows a multiple of 4 elements apart"),
        ([1, 3], "columns without gaps: make it contiguous"),
    ] {
        let text = refused(&mut of, Some(Tensor { strides, ..scales }));
        assert!(text.contains(wanted), "{text}");
    }
    let floats = Tensor::contiguous(of.3, DataType::F32, [3, WIDE / 32]);
    let text = refused(&mut of, Some(floats));
    assert_eq!(text, "tensor x_scales: wanted elements of e8m0, given f32");
    of.0.close().unwrap();
}

#[test]
fn packed_scales_need_whole_words() {
    let config = Config {
        hidden: 384,
        ..wide(TokenFormat::BlockwiseFp8)
    };
    let mut of = rank_of(config);
    of.1.x = Tensor::contiguous(of.1.x.at, DataType::E4m3, [3, 384]);
    let scales = Tensor::contiguous(of.3, DataType::I32, [3, 1]);
    assert_eq!(
        refused(&mut of, Some(scales)),
        "tensor x_scales: wanted elements of f32, as hidden 384 is no multiple of 512: a word holds scales \
         of so many elements, given i32"
    );
    of.0.close().unwrap();
}

#[test]
fn formats_and_arguments_that_exclude_scales() {
    let mut of = rank_of(wide(TokenFormat::Bf16));
    let any = Some(Tensor::contiguous(of.3, DataType::F32, [3, 4]));
    assert_eq!(
        refused(&mut of, any),
        "tensor x_scales: wanted none (format bf16, whose x has no scales), given a tensor"
    );
    of.0.close().unwrap();
    let mut of = rank_of(wide(TokenFormat::Nvfp4RowScaled(ScaleLayout::RowMajor)));
    let text = refused(&mut of, any);
    assert!(
        text.contains("whose rows have scales of their own, too"),
        "{text}"
    );
    of.0.close().unwrap();
    let mut of = rank_of(wide(TokenFormat::Nvfp4(ScaleLayout::RowMajor)));
    of.1.input_scale = Some(Tensor::contiguous(of.3, DataType::F32, [1]));
    let scales = Tensor::contiguous(of.3, DataType::E4m3, [3, WIDE / 16]);
    assert_eq!(
        refused(&mut of, Some(scales)),
        "tensor input_scale: wanted none, as x is encoded: it comes with scales, given a tensor"
    );
    of.0.close().unwrap();
}

/// Kernels with options are needed by expert; where rows stay as they came all have them.
#[test]
fn options_are_needed_by_expert_alone() {
    let config = wide(TokenFormat::BlockwiseFp8);
    let mut of = rank_of(Config {
        options: false,
        ..config
    });
    let scales = Some(Tensor::contiguous(of.3, DataType::F32, [3, GROUPS]));
    assert!(refused(&mut of, scales).contains("`options` is false"));
    of.0.close().unwrap();
    let (mut rank, input, buffers, _) = rank_of(Config {
        options: false,
        receive: Receive::of(ReceiveLayout::Compact),
        ..config
    });
    let input = DispatchInput {
        x_scales: scales.map(|scales| Tensor {
            at: rank.device().alloc(64).unwrap(),
            ..scales
        }),
        ..input
    };
    rank.dispatch(STREAM, &input, buffers.output()).unwrap();
    rank.give_up(STREAM).unwrap();
    assert_eq!(rank.synchronize(STREAM).unwrap().fault(), None);
    rank.close().unwrap();
}

/// Scales with gaps: no output may begin before their last element.
#[test]
fn outputs_in_the_memory_of_scales_are_refused() {
    let (mut rank, input, buffers, at) = rank_of(wide(TokenFormat::BlockwiseFp8));
    let scales = Tensor {
        strides: [1, 5],
        ..Tensor::contiguous(at, DataType::F32, [3, GROUPS])
    };
    let input = DispatchInput {
        x_scales: Some(scales),
        ..input
    };
    // Elements 0 to 2 + 3 * 5.
    for (element, is_taken) in [(0, false), (17, false), (18, true)] {
        let expert_ids = Tensor::contiguous(at.plus(4 * element), DataType::I32, [2]);
        let output = DispatchOutput {
            expert_ids: Some(expert_ids),
            ..*buffers.output()
        };
        match rank.dispatch(STREAM, &input, &output) {
            Ok(()) => {
                assert!(is_taken, "element {element}");
                rank.give_up(STREAM).unwrap();
            }
            Err(Error::TensorsOverlap { first, second }) => {
                assert_eq!([first, second], ["expert_ids", "x_scales"]);
                assert!(!is_taken, "element {element}");
            }
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!(rank.synchronize(STREAM).unwrap().fault(), None);
    rank.close().unwrap();
}

/// An output may be between rows of codes, but not reach into one.
#[test]
fn outputs_between_rows_of_codes_are_taken() {
    let (mut rank, input, buffers, at) = rank_of(wide(TokenFormat::BlockwiseFp8));
    let input = DispatchInput {
        x: input.x.with_row_stride(WIDE + 16),
        x_scales: Some(Tensor::contiguous(at, DataType::F32, [3, GROUPS])),
        ..input
    };
    for (byte, is_taken) in [
        (WIDE - 4, false),
        (WIDE, true),
        (WIDE + 8, true),
        (WIDE + 12, false),
    ] {
        let expert_ids = Tensor::contiguous(input.x.at.plus(byte as u64), DataType::I32, [2]);
        let output = DispatchOutput {
            expert_ids: Some(expert_ids),
            ..*buffers.output()
        };
        let made = rank.dispatch(STREAM, &input, &output);
        assert_eq!(made.is_ok(), is_taken, "byte {byte}: {made:?}");
        if is_taken {
            rank.give_up(STREAM).unwrap();
        }
    }
    assert_eq!(rank.synchronize(STREAM).unwrap().fault(), None);
    rank.close().unwrap();
}
