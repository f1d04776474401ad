//! Options of a combine that are refused before anything is launched.

use crate::support::*;
use ferry::*;

fn sentence<T>(result: Result<T, Error>) -> String {
    result.err().expect("was not refused").to_string()
}

/// The error of a combine on a round of its own; nothing is enqueued.
fn refused(
    config: Config,
    change: impl FnOnce(&mut CombineInput, &mut CombineOutput, DevicePtr),
) -> String {
    let (mut rank, t) = alone(config);
    let memory = rank.device().alloc(256).unwrap();
    rank.dispatch(STREAM, &t.input, &t.output).unwrap();
    let (mut input, mut output) = (t.combine_input(None), t.combine_output(false));
    if config.combine == CombineMode::Exact {
        input.topk_weights = Some(Tensor::contiguous(memory, DataType::F32, [1, 2]));
    }
    change(&mut input, &mut output, memory);
    sentence(rank.combine(STREAM, &input, &output))
}

fn with_options() -> Config {
    Config {
        options: true,
        ..config()
    }
}

/// The error of a combine with these steps, which may be in the memory of its results or in other.
fn refused_steps(change: fn(&mut CombineSteps, Tensor<2>, DevicePtr)) -> String {
    refused(with_options(), |input, output, at| {
        let mut steps = CombineSteps::default();
        change(&mut steps, output.rows(), at);
        input.epilogue = CombineEpilogue::Steps(steps);
    })
}

#[test]
fn steps_of_an_epilogue_are_checked_by_name() {
    let text = refused_steps(|steps, _, at| {
        steps.row_scales = Some(Tensor::contiguous(at, DataType::F32, [2]));
    });
    assert_eq!(text, "tensor row_scales: wanted shape [1], given [2]");
    let text = refused_steps(|steps, _, at| {
        steps.row_scales = Some(Tensor::contiguous(at, DataType::F32, [usize::MAX]));
    });
    let most = usize::MAX;
    let wanted = format!("tensor row_scales: wanted shape [1], given [{most}]");
    assert_eq!(text, wanted);
    let text = refused_steps(|steps, _, at| {
        steps.biases[1] = Some(Tensor::contiguous(at.plus(8), DataType::Bf16, [8]));
    });
    let wanted = "tensor biases[1]: wanted an address that is a multiple of 16, given 0x";
    assert!(text.starts_with(wanted), "{text}");
    let text = refused_steps(|steps, combined, _| steps.residual = Some(combined));
    assert!(
        text.contains("combined") && text.contains("residual"),
        "{text}"
    );
    let text = refused_steps(|steps, combined, _| {
        steps.biases[0] = Some(Tensor::contiguous(combined.at, DataType::Bf16, [8]));
    });
    assert!(
        text.contains("combined") && text.contains("biases[0]"),
        "{text}"
    );
}

#[test]
fn every_option_of_a_combine_is_checked_by_name() {
    let with = with_options();
    let exact = Config {
        combine: CombineMode::Exact,
        ..with
    };
    let text = refused(with, |_, output, at| {
        let short = at.plus(256 - 16);
        *output = CombineOutput::Summed(Tensor::contiguous(short, DataType::F32, [1, 8]));
    });
    let wanted = "tensor combined: wanted 32 bytes at its address (shape [1, 8]), given 16";
    assert_eq!(text, wanted);
    let text = refused(with, |input, _, at| {
        input.row_weights = Some(Tensor::contiguous(at, DataType::F32, [1]));
    });
    assert!(
        text.starts_with("tensor row_weights: wanted shape ["),
        "{text}"
    );
    let text = refused(exact, |input, _, at| {
        input.row_weights = Some(Tensor::contiguous(at, DataType::F32, [1]));
    });
    assert!(
        text.contains("row_weights are given, but in exact mode"),
        "{text}"
    );
    let text = refused(with, |input, _, _| {
        // SAFETY: the epilogue reads no memory.
        input.epilogue = CombineEpilogue::Own(unsafe { OwnEpilogue::new(&7_u32) }.unwrap());
    });
    assert!(
        text.contains("has 4 bytes, but the kernels with options take Ferry's steps"),
        "{text}"
    );
    let text = refused(config(), |_, output, at| {
        *output = CombineOutput::Summed(Tensor::contiguous(at, DataType::F16, [1, 8]));
    });
    assert!(text.contains("`options` is false"), "{text}");
    // SAFETY: the value is passed to no combine.
    let large = unsafe { OwnEpilogue::new(&[0_u64; 33]) };
    let text = sentence(large);
    assert!(
        text.contains("an epilogue of 264 bytes, aligned to 8"),
        "{text}"
    );
}

#[test]
fn rows_that_are_kept_apart_are_bf16() {
    let (mut rank, t) = alone(Config {
        combine: CombineMode::Exact,
        options: true,
        ..config()
    });
    rank.dispatch(STREAM, &t.input, &t.output).unwrap();
    let output = CombineOutput::Apart(Tensor {
        data_type: DataType::F16,
        ..t.apart
    });
    let text = sentence(rank.combine(STREAM, &t.combine_input(None), &output));
    assert_eq!(text, "tensor combined: wanted elements of bf16, given f16");
}

/// The shared expert's rows are added to sums; without a sum they would be lost.
#[test]
fn rows_that_are_kept_apart_take_no_shared_expert() {
    let (mut rank, t) = alone(Config {
        combine: CombineMode::Exact,
        shared_expert: true,
        ..config()
    });
    let plan = rank.plan().to_owned();
    let buffers = DispatchBuffers::new(rank.device(), &plan).unwrap();
    rank.dispatch(STREAM, &t.input, buffers.output()).unwrap();
    let input = CombineInput::new(buffers.output().tokens.unwrap());
    let text = sentence(rank.combine(STREAM, &input, &t.combine_output(true)));
    assert!(
        text.contains("a shared expert is given, but the rows of a token are kept apart"),
        "{text}"
    );
}
