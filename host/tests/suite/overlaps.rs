//! Outputs of a dispatch that overlap other tensors.

use crate::support::*;
use ferry::*;

const TOKEN: Token = (1.0, [0, 1], [1.0, 1.0]);

#[track_caller]
fn assert_overlap<T>(result: Result<T, Error>, wanted: [&str; 2]) {
    match result {
        Err(Error::TensorsOverlap { first, second }) => assert_eq!([first, second], wanted),
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("{wanted:?} may overlap"),
    }
}

/// Inputs of 3 rows that are `stride` elements apart, in memory that outputs occupy from byte `at` on.
#[test]
fn outputs_within_rows_that_overlap_each_other_are_refused() {
    let (mut rank, t) = alone_with(config(), &[TOKEN; 3]);
    let memory = rank.device().alloc(1 << 10).unwrap();
    let row_bytes = 2 * HIDDEN as u64;
    for (stride, end) in [(0, row_bytes), (HIDDEN, 3 * row_bytes)] {
        let x = Tensor::contiguous(memory, DataType::Bf16, [3, HIDDEN]).with_row_stride(stride);
        let input = DispatchInput { x, ..t.input };
        let mut dispatch = |at| {
            let expert_ids = Tensor::contiguous(memory.plus(at), DataType::I32, [2]);
            let output = DispatchOutput {
                expert_ids: Some(expert_ids),
                ..t.output
            };
            rank.dispatch(STREAM, &input, &output).map(drop)
        };
        for at in (0..end).step_by(4) {
            assert_overlap(dispatch(at), ["expert_ids", "x"]);
        }
        dispatch(end).unwrap();
        let (rows, sums) = (t.combine_input(None), t.combine_output(false));
        rank.combine(STREAM, &rows, &sums).unwrap();
    }
    assert_eq!(rank.synchronize(STREAM).unwrap().fault(), None);
    rank.close().unwrap();
}

/// Rows with gaps between them: an output may be in a gap, but not reach into a row.
#[test]
fn outputs_between_rows_are_taken_unless_they_reach_into_one() {
    let (mut rank, t) = alone_with(config(), &[TOKEN; 3]);
    let memory = rank.device().alloc(1 << 10).unwrap();
    let (row_bytes, stride) = (2 * HIDDEN as u64, 4 * HIDDEN as u64);
    let x = Tensor::contiguous(memory, DataType::Bf16, [3, HIDDEN]).with_row_stride(2 * HIDDEN);
    let input = DispatchInput { x, ..t.input };
    for at in (0..3 * stride).step_by(4) {
        let expert_ids = Tensor::contiguous(memory.plus(at), DataType::I32, [2]);
        let output = DispatchOutput {
            expert_ids: Some(expert_ids),
            ..t.output
        };
        let made = rank.dispatch(STREAM, &input, &output);
        let starts = (0..3).map(|row| row * stride);
        if starts
            .clone()
            .any(|start| at < start + row_bytes && start < at + expert_ids.bytes())
        {
            assert_overlap(made, ["expert_ids", "x"]);
            continue;
        }
        made.unwrap();
        let (rows, sums) = (t.combine_input(None), t.combine_output(false));
        rank.combine(STREAM, &rows, &sums).unwrap();
    }
    assert_eq!(rank.synchronize(STREAM).unwrap().fault(), None);
    rank.close().unwrap();
}

#[test]
fn the_wait_for_a_shared_expert_refuses_outputs_in_what_it_reads() {
    let config = Config {
        shared_expert: true,
        ..config()
    };
    let (mut rank, t) = alone_with(config, &[TOKEN]);
    let x = Tensor::contiguous(
        t.output.tokens.unwrap().at.plus(16),
        DataType::Bf16,
        [1, HIDDEN],
    );
    rank.dispatch_async(STREAM, &DispatchInput { x, ..t.input })
        .unwrap();
    assert_overlap(rank.dispatch_wait(STREAM, &t.output), ["tokens", "x"]);
    let apart = *DispatchBuffers::new(rank.device(), rank.plan())
        .unwrap()
        .output();
    rank.dispatch_wait(STREAM, &apart).unwrap();
    assert_eq!(rank.synchronize(STREAM).unwrap().fault(), None);
    finish(rank, &t);
}

#[test]
fn outputs_that_overlap_each_other_are_refused() {
    let (mut rank, t) = alone_with(config(), &[TOKEN]);
    let at = t.output.src_info.at.plus(8);
    let output = DispatchOutput {
        expert_ids: Some(Tensor {
            at,
            ..t.output.expert_ids.unwrap()
        }),
        ..t.output
    };
    let wanted = ["expert_ids", "src_info"];
    assert_overlap(rank.dispatch(STREAM, &t.input, &output), wanted);
    rank.dispatch_async(STREAM, &t.input).unwrap();
    assert_overlap(rank.dispatch_wait(STREAM, &output), wanted);
    let addresses: Vec<_> = output
        .tensors()
        .into_iter()
        .flatten()
        .map(|of| of.at())
        .collect();
    let capacity = Capacity::max(rank.plan());
    let made = DispatchOutput::from_addresses(rank.plan(), capacity, &addresses);
    assert_overlap(made, wanted);
    rank.dispatch_wait(STREAM, &t.output).unwrap();
    finish(rank, &t);
}

#[test]
fn memory_for_ids_overlaps_no_other_tensor_of_the_round() {
    let (mut rank, t) = alone_with(config(), &[TOKEN; 3]);
    let memory = rank.device().alloc(1 << 10).unwrap();
    let keeping = |at| DispatchInput {
        kept_ids: Some(Tensor::contiguous(at, DataType::I32, [3, TOP_K])),
        ..t.input
    };
    let topk_weights = t.input.topk_weights.unwrap().at;
    for (at, name) in [
        (t.input.x.at.plus(4), "x"),
        (t.input.topk_ids.at, "topk_ids"),
        (topk_weights, "topk_weights"),
    ] {
        let made = rank.dispatch_async(STREAM, &keeping(at));
        let named = match name {
            "x" => [name, "kept_ids"],
            _ => ["kept_ids", name],
        };
        assert_overlap(made, named);
    }
    let src_info = keeping(t.output.src_info.at);
    assert_overlap(
        rank.dispatch(STREAM, &src_info, &t.output),
        ["src_info", "kept_ids"],
    );
    rank.dispatch_async(STREAM, &src_info).unwrap();
    assert_overlap(
        rank.dispatch_wait(STREAM, &t.output),
        ["kept_ids", "src_info"],
    );
    let elsewhere = DispatchOutput {
        src_info: Tensor {
            at: memory,
            ..t.output.src_info
        },
        ..t.output
    };
    rank.dispatch_wait(STREAM, &elsewhere).unwrap();
    rank.combine(STREAM, &t.combine_input(None), &t.combine_output(false))
        .unwrap();
    let sums = t.combine_output(false);
    rank.dispatch(STREAM, &keeping(sums.rows().at), &t.output)
        .unwrap();
    assert_overlap(
        rank.combine(STREAM, &t.combine_input(None), &sums),
        ["combined", "kept_ids"],
    );
    rank.give_up(STREAM).unwrap();
    assert_eq!(rank.synchronize(STREAM).unwrap().fault(), None);
    rank.close().unwrap();
}
