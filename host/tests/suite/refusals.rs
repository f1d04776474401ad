//! Arguments and call orders that are refused before anything is launched.

use crate::support::*;
use ferry::*;

fn sentence<T>(result: Result<T, Error>) -> String {
    result.err().expect("was not refused").to_string()
}

#[test]
fn every_dispatch_tensor_is_checked_by_name() {
    type Change = fn(&mut DispatchInput, &mut DispatchOutput);
    let changes: [(Change, &str); 7] = [
        (
            |input, _| input.x = Tensor::contiguous(input.x.at, DataType::Bf16, [1, 16]),
            "tensor x: wanted shape [1, 8], given [1, 16]",
        ),
        (
            |input, _| input.topk_ids.dims = [2, 2],
            "tensor topk_ids: wanted shape [1, 2], given [2, 2]",
        ),
        (
            |input, _| {
                let weights = Tensor::contiguous(DevicePtr::NULL, DataType::F32, [1, 2]);
                input.topk_weights = Some(weights);
            },
            "tensor topk_weights: wanted an address",
        ),
        (
            |_, output| {
                let tokens = output.tokens.as_mut().unwrap();
                tokens.at = tokens.at.plus(8);
            },
            "tensor tokens: wanted an address that is a multiple of 16",
        ),
        (
            |_, output| output.row_offsets.as_mut().unwrap().dims = [2],
            "tensor row_offsets: wanted shape [3], given [2]",
        ),
        (
            |_, output| output.expert_ids.as_mut().unwrap().dims = [1],
            "tensor expert_ids: wanted shape [2], given [1]",
        ),
        (
            |_, output| output.src_info.dims = [1, 2],
            "tensor src_info: wanted shape [",
        ),
    ];
    let (mut rank, t) = alone(config());
    for (change, wanted) in changes {
        let (mut input, mut output) = (t.input, t.output);
        change(&mut input, &mut output);
        let text = sentence(rank.dispatch(STREAM, &input, &output));
        // A whole sentence has both shapes.
        let is_right = match wanted.contains("given") {
            true => text == wanted,
            false => text.starts_with(wanted),
        };
        assert!(is_right, "{text}, wanted: {wanted}");
    }
    rank.close().unwrap();
}

#[test]
fn too_many_tokens_are_named() {
    let (mut rank, t) = alone(config());
    let input = DispatchInput {
        x: Tensor::contiguous(t.input.x.at, DataType::Bf16, [4, HIDDEN]),
        ..t.input
    };
    let refused = rank.dispatch(STREAM, &input, &t.output);
    assert!(matches!(
        refused,
        Err(Error::TooManyTokens { given: 4, max: 3 })
    ));
    let refused = rank.dispatch_async(STREAM, &input);
    assert!(matches!(
        refused,
        Err(Error::TooManyTokens { given: 4, max: 3 })
    ));
    rank.close().unwrap();
}

/// Error text of a combine with these arguments, after a fresh dispatch.
fn combine(mode: CombineMode, weights: bool, apart: bool) -> Result<(), Error> {
    let (mut rank, t) = alone(Config {
        combine: mode,
        ..config()
    });
    let input = t.combine_input(weights.then_some(t.weights));
    rank.dispatch(STREAM, &t.input, &t.output)?;
    let combined = rank.combine(STREAM, &input, &t.combine_output(apart));
    assert_eq!(rank.synchronize(STREAM)?.fault(), None);
    assert_eq!(combined.is_err(), rank.round() == Round::Dispatched);
    combined
}

#[test]
fn weights_output_and_mode_must_fit_together() {
    use CombineMode::{Exact, Reduced};
    assert!(combine(Reduced, false, false).is_ok());
    assert!(matches!(
        combine(Reduced, true, false),
        Err(Error::WeightsInReducedMode)
    ));
    assert!(matches!(
        combine(Reduced, false, true),
        Err(Error::ApartInReducedMode)
    ));
    assert!(combine(Exact, true, false).is_ok());
    assert!(combine(Exact, false, true).is_ok());
    let wrong = combine(Exact, true, true);
    assert!(matches!(
        wrong,
        Err(Error::WrongCombineOutput { weights: true })
    ));
    assert!(sentence(wrong).contains("was given topk_weights"));
    let wrong = combine(Exact, false, false);
    assert!(matches!(
        wrong,
        Err(Error::WrongCombineOutput { weights: false })
    ));
    assert!(sentence(wrong).contains("[tokens, top_k, hidden]"));
}

#[test]
fn an_output_of_another_mode_is_told_before_its_weights() {
    let (mut rank, t) = alone(Config {
        combine: CombineMode::Exact,
        ..config()
    });
    rank.dispatch(STREAM, &t.input, &t.output).unwrap();
    let CombineOutput::Summed(combined) = t.combine_output(false) else {
        panic!("sums");
    };
    let weights = t.weights;
    let output = CombineOutput::Weighted { combined, weights };
    let refused = rank.combine(STREAM, &t.combine_input(Some(weights)), &output);
    assert!(matches!(
        refused,
        Err(Error::WrongCombineOutput { weights: true })
    ));
    rank.give_up(STREAM).unwrap();
    assert_eq!(rank.synchronize(STREAM).unwrap().fault(), None);
    rank.close().unwrap();
}

#[test]
fn a_refused_combine_can_be_made_again() {
    let (mut rank, t) = alone(config());
    let rows = t.output.tokens.unwrap();
    let capacity = rows.dims[0];
    let short = CombineInput::new(Tensor::contiguous(
        rows.at,
        DataType::Bf16,
        [capacity - 1, HIDDEN],
    ));
    rank.dispatch(STREAM, &t.input, &t.output).unwrap();
    let refused = sentence(rank.combine(STREAM, &short, &t.combine_output(false)));
    assert!(refused.starts_with("tensor expert_rows: wanted shape [6, 8], given [5, 8]"));
    rank.combine(STREAM, &t.combine_input(None), &t.combine_output(false))
        .unwrap();
    assert_eq!(rank.round(), Round::Idle);
    assert_eq!(rank.synchronize(STREAM).unwrap().fault(), None);
    rank.close().unwrap();
}

#[test]
fn a_result_in_the_memory_of_the_experts_rows_is_refused() {
    let (mut rank, t) = alone(config());
    let rows = t.output.tokens.unwrap();
    let bytes = (2 * rows.elements()) as u64;
    rank.dispatch(STREAM, &t.input, &t.output).unwrap();
    let mut combine = |at: DevicePtr| {
        let combined = Tensor::contiguous(at, DataType::Bf16, [1, HIDDEN]);
        let output = CombineOutput::Summed(combined);
        rank.combine(STREAM, &t.combine_input(None), &output)
    };
    for at in [rows.at, rows.at.plus(bytes - 16)] {
        let refused = combine(at);
        assert!(matches!(
            refused,
            Err(Error::TensorsOverlap {
                first: "combined",
                second: "expert_rows"
            })
        ));
        assert!(sentence(refused).contains("tensor combined overlaps tensor expert_rows"));
    }
    combine(t.summed.at).unwrap();
    assert_eq!(rank.synchronize(STREAM).unwrap().fault(), None);
    rank.close().unwrap();
}

#[test]
fn more_scales_than_kernels_can_count_are_refused() {
    // SAFETY: no kernel is launched with it.
    let at = unsafe { DevicePtr::new(1 << 20, u64::MAX) };
    let tiled = |blocks| ScaleTensor::Tiled {
        scales: Tensor::contiguous(at, DataType::E8m0, [blocks, 1, 32, 4, 4]),
        offsets: Tensor::contiguous(at, DataType::U32, [2]),
    };
    let row_major = |rows| ScaleTensor::RowMajor(Tensor::contiguous(at, DataType::E8m0, [rows, 4]));
    let (rows, blocks) = (1 << 32, 1 << 25);
    let refused = [
        (
            ScaleLayout::RowMajor,
            row_major(rows + 1),
            rows + 1,
            "4294967297 rows, and at most 4294967296",
        ),
        (
            ScaleLayout::Tiled,
            tiled(blocks + 1),
            8,
            "33554433 blocks, and at most 33554432",
        ),
    ];
    for (layout, scales, capacity, wanted) in refused {
        let format = TokenFormat::Mxfp8(layout);
        let (mut rank, t) = alone(Config {
            format,
            hidden: 128,
            ..config()
        });
        let input = DispatchInput {
            x: Tensor::contiguous(at, DataType::Bf16, [1, 128]),
            ..t.input
        };
        let output = DispatchOutput {
            tokens: Some(Tensor::contiguous(at, DataType::E4m3, [capacity, 128])),
            scales: Some(scales),
            ..t.output
        };
        let refused = rank.dispatch(STREAM, &input, &output);
        assert!(
            matches!(refused, Err(Error::TooManyScales { .. })),
            "{layout:?}"
        );
        let sentence = sentence(refused);
        assert!(sentence.contains(wanted), "{sentence}");
        rank.close().unwrap();
    }
}

#[test]
fn a_plan_for_another_group_is_refused() {
    let plan = Plan::new(&Group::simulated(2, 1).unwrap(), config()).unwrap();
    let refused = Communicator::new(&Group::simulated(4, 1).unwrap(), &plan);
    assert!(matches!(
        refused,
        Err(Error::PlanForOtherGroup { plan: 2, group: 4 })
    ));
}

#[test]
fn outputs_without_room_for_the_shared_experts_rows_are_refused() {
    let config = Config {
        shared_expert: true,
        ..config()
    };
    let (mut rank, t) = alone(config);
    assert_eq!(t.output.row_offsets.unwrap().dims, [4]);
    let output = DispatchOutput {
        tokens: Some(Tensor::contiguous(
            t.output.tokens.unwrap().at,
            DataType::Bf16,
            [0, HIDDEN],
        )),
        src_info: Tensor::contiguous(t.output.src_info.at, DataType::I32, [0, 2]),
        ..t.output
    };
    assert_eq!(
        sentence(rank.dispatch(STREAM, &t.input, &output)),
        "the capacity of a dispatch's outputs does not work: rows is 0, but the \
         shared expert's 1 tokens alone take 1"
    );
    rank.close().unwrap();

    let (mut rank, _) = alone(Config {
        hidden: 128,
        format: TokenFormat::Mxfp8(ScaleLayout::Tiled),
        ..config
    });
    let at = rank.device().alloc(1 << 16).unwrap();
    let buffers = DispatchBuffers::new(rank.device(), rank.plan()).unwrap();
    let offsets = Tensor::contiguous(at, DataType::U32, [3]);
    let output = DispatchOutput {
        scales: Some(ScaleTensor::Tiled {
            scales: Tensor::contiguous(at, DataType::E8m0, [0, 1, 32, 4, 4]),
            offsets,
        }),
        ..*buffers.output()
    };
    let input = DispatchInput::new(
        Tensor::contiguous(at, DataType::Bf16, [1, 128]),
        Tensor::contiguous(at, DataType::I32, [1, TOP_K]),
    );
    assert_eq!(
        sentence(rank.dispatch(STREAM, &input, &output)),
        "the capacity of a dispatch's outputs does not work: scale_blocks is 0, but the \
         shared expert's 1 tokens alone take 1"
    );
    rank.close().unwrap();
}

#[test]
fn a_number_of_tokens_on_the_device_is_one_word_and_takes_kernels_with_options() {
    let (mut rank, t) = alone(config());
    let counted = |dims: usize| DispatchInput {
        tokens_on_device: Some(Tensor::contiguous(t.input.x.at, DataType::U32, [dims])),
        ..t.input
    };
    assert_eq!(
        sentence(rank.dispatch(STREAM, &counted(2), &t.output)),
        "tensor tokens_on_device: wanted shape [1], given [2]"
    );
    assert_eq!(
        sentence(rank.dispatch(STREAM, &counted(1), &t.output)),
        "the call has tokens_on_device, but the plan's `options` is false: set it in the configuration"
    );
    rank.close().unwrap();
}

#[test]
fn a_plan_lists_every_problem() {
    let group = Group::simulated(3, 1).unwrap();
    let refused = Plan::new(
        &group,
        Config {
            hidden: 12,
            ..config()
        },
    );
    let Err(Error::Plan(error)) = refused else {
        panic!("{refused:?}")
    };
    let fields: Vec<_> = error.problems.iter().map(|problem| problem.field).collect();
    assert_eq!(fields, ["experts", "hidden"]);
}

#[test]
fn transposed_scales_stand_where_bulk_copies_can_read_them() {
    let (mut rank, t) = alone(Config {
        hidden: 128,
        format: TokenFormat::BlockwiseFp8,
        ..config()
    });
    let at = rank.device().alloc(1 << 16).unwrap();
    let mut dispatch = |rows: usize, place: u64| {
        let scales = Tensor::contiguous(at.plus(place), DataType::F32, [1, rows]);
        let input = DispatchInput {
            x: Tensor::contiguous(at, DataType::Bf16, [1, 128]),
            ..t.input
        };
        let output = DispatchOutput {
            tokens: Some(Tensor::contiguous(at, DataType::E4m3, [rows, 128])),
            scales: Some(ScaleTensor::Transposed(scales)),
            src_info: Tensor::contiguous(at, DataType::I32, [rows, 2]),
            ..t.output
        };
        sentence(rank.dispatch(STREAM, &input, &output))
    };
    let text = dispatch(8, 4);
    assert!(
        text.contains("tensor scales: wanted an address that is a multiple of 16"),
        "{text}"
    );
    for rows in [7, 9, 10] {
        let text = dispatch(rows, 0);
        assert!(
            text.contains("tensor scales: wanted a number of rows that is a multiple of 4"),
            "{text}"
        );
        assert!(text.contains(&format!("given {rows}")), "{text}");
    }
    rank.close().unwrap();
}

#[test]
fn outputs_of_a_dispatch_in_the_memory_of_its_inputs_are_refused() {
    let (mut rank, t) = alone(Config {
        options: true,
        ..config()
    });
    let mut overlap = |input: DispatchInput, output: DispatchOutput| {
        sentence(rank.dispatch(STREAM, &input, &output))
    };
    let counted = DispatchInput {
        tokens_on_device: Some(Tensor::contiguous(
            t.output.row_offsets.unwrap().at,
            DataType::U32,
            [1],
        )),
        ..t.input
    };
    let text = overlap(counted, t.output);
    assert!(
        text.starts_with("tensor row_offsets overlaps tensor tokens_on_device"),
        "{text}"
    );
    let ids = DispatchOutput {
        expert_ids: Some(Tensor::contiguous(t.input.topk_ids.at, DataType::I32, [2])),
        ..t.output
    };
    let text = overlap(t.input, ids);
    assert!(
        text.starts_with("tensor expert_ids overlaps tensor topk_ids"),
        "{text}"
    );
    let x = DispatchInput {
        x: Tensor::contiguous(
            t.output.tokens.unwrap().at.plus(16),
            DataType::Bf16,
            [1, HIDDEN],
        ),
        ..t.input
    };
    let text = overlap(x, t.output);
    assert!(
        text.starts_with("tensor tokens overlaps tensor x"),
        "{text}"
    );
    // The sent tokens are not read any more.
    rank.dispatch_async(STREAM, &x).unwrap();
    rank.dispatch_wait(STREAM, &t.output).unwrap();
    finish(rank, &t);
}

/// A GPU may reach such a tensor, or not.
#[test]
fn the_simulator_refuses_tensors_of_other_ranks_and_groups() {
    let (mut ranks, mut tensors) = two_ranks(3, config());
    let (others, foreign) = two_ranks(4, config());
    let good = tensors[0];
    let ids = good.input.topk_ids;
    let refused = |ranks: &mut [Communicator], input: &DispatchInput, owner: &str| {
        let text = sentence(ranks[0].dispatch(STREAM, input, &good.output));
        let wanted = format!("is in the memory of {owner}; give tensors of the rank's own device");
        assert!(
            text.contains("tensor topk_ids of a launch of rank 0"),
            "{text}"
        );
        assert!(text.ends_with(&wanted), "{text}");
        assert_eq!(ranks[0].round(), Round::Idle);
    };
    for (at, owner) in [
        (tensors[1].input.topk_ids.at, "rank 1"),
        (foreign[0].input.topk_ids.at, "another group"),
    ] {
        let topk_ids = Tensor {
            at,
            dims: [1, TOP_K],
            ..ids
        };
        let x = Tensor {
            dims: [1, HIDDEN],
            ..good.input.x
        };
        let input = DispatchInput {
            topk_ids,
            ..DispatchInput::new(x, ids)
        };
        refused(&mut ranks, &input, owner);
    }
    let output = foreign[0].output.tokens.unwrap().at;
    let told = ranks[0]
        .device()
        .upload(output, &[0; 2])
        .unwrap_err()
        .to_string();
    assert!(
        told.contains("in the memory of another group, by the host"),
        "{told}"
    );
    // Nothing was enqueued: the round goes on with the rank's own.
    tensors[0] = good;
    for (rank, t) in ranks.iter_mut().zip(&tensors) {
        rank.dispatch(STREAM, &t.input, &t.output).unwrap();
    }
    for (rank, t) in ranks.iter().zip(&tensors) {
        assert_eq!(rank.synchronize(STREAM).unwrap().fault(), None);
        t.answer(rank);
    }
    combine_all(&mut ranks, &tensors);
    close(ranks);
    close(others);
}
