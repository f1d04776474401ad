//! Calls with rows that stay as they came that are refused before anything is launched.

use crate::support::*;
use ferry::*;
use half::bf16;

const fn keeping(receive: ReceiveLayout) -> Config {
    Config {
        receive: Receive::of(receive),
        ..Config::new(2, TOP_K, HIDDEN, 3)
    }
}

fn one(config: Config) -> (Communicator, DispatchBuffers, DispatchInput) {
    let group = Group::simulated(1, 1).unwrap();
    let plan = Plan::new(&group, config).unwrap();
    let rank = Communicator::new(&group, &plan).unwrap().remove(0);
    let mut buffers = DispatchBuffers::new(rank.device(), &plan).unwrap();
    let input = buffers.upload(&[bf16::ONE; HIDDEN], &[0, 1], None).unwrap();
    (rank, buffers, input)
}

fn sentence<T>(result: Result<T, Error>) -> String {
    result.err().expect("was not refused").to_string()
}

fn dispatch(
    config: Config,
    change: impl Fn(&mut DispatchInput, &mut DispatchOutput, &dyn Device),
) -> String {
    let (mut rank, buffers, mut input) = one(config);
    let mut output = *buffers.output();
    change(&mut input, &mut output, &**rank.device());
    let text = sentence(rank.dispatch(STREAM, &input, &output));
    rank.dispatch_async(STREAM, &input).map_or_else(
        // The first half refuses inputs alone.
        |error| assert_eq!(error.to_string(), text),
        |()| assert_eq!(sentence(rank.dispatch_wait(STREAM, &output)), text),
    );
    text
}

#[test]
fn ids_of_64_bits_need_their_kernels_and_outputs() {
    let wide = |input: &mut DispatchInput, _: &mut DispatchOutput, device: &dyn Device| {
        input.topk_ids = device.upload_tensor([1, TOP_K], &[0_i64, 1]).unwrap();
    };
    assert_eq!(
        dispatch(keeping(ReceiveLayout::ByExpert), wide),
        "tensor topk_ids: wanted elements of i32, as the plan's options is false: pass i32, or set options \
         to true, given i64"
    );
    assert_eq!(
        dispatch(keeping(ReceiveLayout::Compact), wide),
        "tensor ids: wanted elements of i64, as in topk_ids, given i32"
    );
    let odd = |input: &mut DispatchInput, output: &mut DispatchOutput, device: &dyn Device| {
        wide(input, output, device);
        input.topk_ids.at = input.topk_ids.at.plus(4);
    };
    let text = dispatch(keeping(ReceiveLayout::Compact), odd);
    let wanted = "tensor topk_ids: wanted an address that is a multiple of 8, given 0x";
    assert!(text.starts_with(wanted), "{text}");
    let other = |input: &mut DispatchInput, _: &mut DispatchOutput, device: &dyn Device| {
        input.topk_ids = device.upload_tensor([1, TOP_K], &[0.0_f32, 1.0]).unwrap();
    };
    assert_eq!(
        dispatch(keeping(ReceiveLayout::Compact), other),
        "tensor topk_ids: wanted elements of i32 or i64, given f32"
    );
    assert_eq!(
        dispatch(keeping(ReceiveLayout::ByExpert), other),
        "tensor topk_ids: wanted elements of i32, or of i64 if the plan's options is true, given f32"
    );
}

#[test]
fn outputs_of_another_layout_are_refused_by_name() {
    let compact = keeping(ReceiveLayout::Compact);
    let text = dispatch(compact, |_, output, device| {
        output.row_offsets = Some(device.upload_tensor([3], &[0_u32; 3]).unwrap());
    });
    assert_eq!(
        text,
        "tensor row_offsets: wanted none (format bf16, receive compact), given a tensor"
    );
    let text = dispatch(compact, |_, output, _| output.weights = None);
    assert_eq!(
        text,
        "tensor weights: wanted a tensor (format bf16, receive compact), given none"
    );
    let text = dispatch(compact, |_, output, _| {
        output.expert_counts = output.row_offsets
    });
    assert!(
        text.starts_with("tensor expert_counts: wanted a tensor"),
        "{text}"
    );
    let text = dispatch(keeping(ReceiveLayout::View), |_, output, device| {
        output.tokens = Some(device.upload_tensor([3, HIDDEN], &[bf16::ONE; 24]).unwrap());
    });
    assert_eq!(
        text,
        "tensor tokens: wanted none (format bf16, receive view), given a tensor"
    );
    let text = dispatch(keeping(ReceiveLayout::ByExpert), |_, output, device| {
        output.source_counts = Some(device.upload_tensor([1], &[0_i32]).unwrap());
    });
    assert_eq!(
        text,
        "tensor source_counts: wanted none (format bf16, receive by-expert), given a tensor"
    );
    for receive in [ReceiveLayout::View, ReceiveLayout::Strided] {
        let text = dispatch(keeping(receive), |_, output, _| {
            let first = |tensor: &mut Tensor<2>| tensor.dims[0] = 2;
            let optional = [&mut output.tokens, &mut output.ids, &mut output.weights];
            optional.into_iter().flatten().for_each(first);
            first(&mut output.src_info);
        });
        assert_eq!(
            text,
            format!(
                "the capacity of a dispatch's outputs does not work: rows is 2, but receive is {receive}, \
                 with 3 rows: ranks * max_tokens_per_rank"
            )
        );
    }
    let fp8 = Config {
        format: TokenFormat::BlockwiseFp8,
        hidden: 128,
        ..compact
    };
    let group = Group::simulated(1, 1).unwrap();
    let plan = Plan::new(&group, fp8).unwrap();
    let mut rank = Communicator::new(&group, &plan).unwrap().remove(0);
    let mut buffers = DispatchBuffers::new(rank.device(), &plan).unwrap();
    let input = buffers.upload(&[bf16::ONE; 128], &[0, 1], None).unwrap();
    let mut output = *buffers.output();
    let Some(ScaleTensor::RowMajor(scales)) = output.scales else {
        panic!("{:?}", output.scales);
    };
    output.scales = Some(ScaleTensor::Transposed(scales));
    assert_eq!(
        sentence(rank.dispatch(STREAM, &input, &output)),
        "the format is BlockwiseFp8, and the dispatch's outputs have transposed scales, not row-major scales"
    );
}

#[test]
fn new_outputs_overlap_nothing() {
    let compact = keeping(ReceiveLayout::Compact);
    let text = dispatch(compact, |_, output, _| {
        output.weights = output.weights.map(|weights| Tensor {
            at: output.ids.unwrap().at,
            ..weights
        })
    });
    assert_eq!(
        text,
        "tensor ids overlaps tensor weights; give each memory of its own"
    );
    // The wait no longer reads inputs, so that it takes this.
    let (mut rank, buffers, input) = one(compact);
    let output = DispatchOutput {
        source_counts: buffers.output().source_counts.map(|rows| Tensor {
            at: input.topk_ids.at,
            ..rows
        }),
        ..*buffers.output()
    };
    assert_eq!(
        sentence(rank.dispatch(STREAM, &input, &output)),
        "tensor source_counts overlaps tensor topk_ids; give each memory of its own"
    );
}

/// The error of a combine on a round of its own; nothing is enqueued.
fn combine(
    config: Config,
    change: impl Fn(&mut CombineInput, &mut CombineOutput, &dyn Device),
) -> String {
    let (mut rank, buffers, dispatched) = one(config);
    let device = rank.device().clone();
    rank.dispatch(STREAM, &dispatched, buffers.output())
        .unwrap();
    let rows = buffers.output().src_info.dims[0];
    let sums = CombineBuffers::new(&device, rank.plan()).unwrap();
    let answers = vec![bf16::ONE; rows * HIDDEN];
    let weights = rank.plan().config().receive.fields().combine_weights;
    let mut input = CombineInput {
        received_weights: buffers.output().weights.filter(|_| weights),
        ..CombineInput::new(device.upload_tensor([rows, HIDDEN], &answers).unwrap())
    };
    let mut output = sums.output(1).unwrap();
    change(&mut input, &mut output, &*device);
    let text = sentence(rank.combine(STREAM, &input, &output));
    assert_eq!(sentence(rank.combine_async(STREAM, &input, &output)), text);
    text
}

#[test]
fn inputs_of_another_layout_are_refused_by_name() {
    let compact = keeping(ReceiveLayout::Compact);
    let by_expert = Config {
        options: true,
        ..keeping(ReceiveLayout::ByExpert)
    };
    let initial = |input: &mut CombineInput, _: &mut CombineOutput, device: &dyn Device| {
        let tensor = device.upload_tensor([1, HIDDEN], &[bf16::ONE; HIDDEN]);
        input.initial[1] = Some(tensor.unwrap());
    };
    assert_eq!(
        combine(by_expert, initial),
        "tensor initial[1]: wanted none, as the plan's receive is by-expert, given a tensor"
    );
    let row_weights = |input: &mut CombineInput, _: &mut CombineOutput, device: &dyn Device| {
        input.row_weights = Some(device.upload_tensor([3], &[1.0_f32; 3]).unwrap());
    };
    assert_eq!(
        combine(compact, row_weights),
        "tensor row_weights: wanted none, as the plan's receive is compact, given a tensor"
    );
    let own = |input: &mut CombineInput, _: &mut CombineOutput, _: &dyn Device| {
        // SAFETY: no kernel is launched with it.
        input.epilogue = CombineEpilogue::Own(unsafe { OwnEpilogue::new(&7_u64) }.unwrap());
    };
    assert_eq!(
        combine(compact, own),
        "combine: the call has an epilogue of yours, but the plan's receive is compact, whose kernels have \
         Ferry's steps"
    );
    let weights = |input: &mut CombineInput, _: &mut CombineOutput, device: &dyn Device| {
        input.topk_weights = Some(device.upload_tensor([1, TOP_K], &[1.0_f32; TOP_K]).unwrap());
    };
    assert!(combine(compact, weights).starts_with("combine was given topk_weights"));
    let apart = |_: &mut CombineInput, output: &mut CombineOutput, device: &dyn Device| {
        let rows = device.upload_tensor([1, TOP_K, HIDDEN], &[bf16::ONE; TOP_K * HIDDEN]);
        *output = CombineOutput::Apart(rows.unwrap());
    };
    assert!(combine(compact, apart).starts_with("combine in reduced mode writes sums"));
}

#[test]
fn weights_come_back_on_both_sides_or_on_none() {
    let without = keeping(ReceiveLayout::Strided);
    let with = Config {
        receive: Receive::Strided(StridedRows {
            combine_weights: true,
            ..StridedRows::default()
        }),
        ..without
    };
    let given = |input: &mut CombineInput, _: &mut CombineOutput, device: &dyn Device| {
        input.received_weights = Some(device.upload_tensor([3, TOP_K], &[1.0_f32; 6]).unwrap());
    };
    assert_eq!(
        combine(without, given),
        "tensor received_weights: wanted none, as the plan's combine_weights is false, given a tensor"
    );
    let weighted = |_: &mut CombineInput, output: &mut CombineOutput, device: &dyn Device| {
        *output = CombineOutput::Weighted {
            combined: output.rows(),
            weights: device.upload_tensor([1, TOP_K], &[1.0_f32; TOP_K]).unwrap(),
        };
    };
    assert_eq!(
        combine(without, weighted),
        "tensor weights: wanted none, as the plan's combine_weights is false, given a tensor"
    );
    assert_eq!(
        combine(with, |input, _, _| input.received_weights = None),
        "tensor received_weights: wanted a tensor, as the plan's combine_weights is true, given none"
    );
    let summed = |_: &mut CombineInput, output: &mut CombineOutput, _: &dyn Device| {
        *output = CombineOutput::Summed(output.rows());
    };
    assert_eq!(
        combine(with, summed),
        "tensor weights: wanted a tensor, as the plan's combine_weights is true, given none"
    );
    let short = |input: &mut CombineInput, _: &mut CombineOutput, device: &dyn Device| {
        input.received_weights = Some(device.upload_tensor([1, TOP_K], &[1.0_f32; TOP_K]).unwrap());
    };
    assert_eq!(
        combine(with, short),
        "tensor received_weights: wanted shape [3, 2], given [1, 2]"
    );
}

#[test]
fn what_combine_reads_and_writes_is_apart() {
    let with = Config {
        receive: Receive::View(KeptRows {
            combine_weights: true,
            ..KeptRows::default()
        }),
        ..keeping(ReceiveLayout::View)
    };
    let overlap = |first: &str, second: &str| {
        format!("tensor {first} overlaps tensor {second}; give each memory of its own")
    };
    let initial = |input: &mut CombineInput, output: &mut CombineOutput, _: &dyn Device| {
        input.initial[0] = Some(output.rows());
    };
    assert_eq!(combine(with, initial), overlap("combined", "initial[0]"));
    let odd = |input: &mut CombineInput, output: &mut CombineOutput, _: &dyn Device| {
        let rows = output.rows();
        let at = rows.at.plus(8);
        input.initial[0] = Some(Tensor { at, ..rows });
    };
    let text = combine(with, odd);
    let wanted = "tensor initial[0]: wanted an address that is a multiple of 16, given 0x";
    assert!(text.starts_with(wanted), "{text}");
    let read = |input: &mut CombineInput, output: &mut CombineOutput, _: &dyn Device| {
        let received = input.received_weights.unwrap();
        *output = CombineOutput::Weighted {
            combined: output.rows(),
            weights: Tensor {
                dims: [1, TOP_K],
                ..received
            },
        };
    };
    assert_eq!(combine(with, read), overlap("weights", "received_weights"));
    let same = |_: &mut CombineInput, output: &mut CombineOutput, _: &dyn Device| {
        let combined = output.rows();
        *output = CombineOutput::Weighted {
            combined,
            weights: Tensor::contiguous(combined.at, DataType::F32, [1, TOP_K]),
        };
    };
    assert_eq!(combine(with, same), overlap("weights", "combined"));
}

/// Kernels number rows in 32 bits. Outputs that [`DispatchBuffers`] allocates never have as many.
#[test]
fn outputs_of_more_rows_than_can_be_numbered_are_refused() {
    for rows in [1 << 31, 1 << 32, (1 << 32) + 8] {
        let text = dispatch(keeping(ReceiveLayout::Compact), |_, output, _| {
            let mut next = 1 << 44;
            let mut place = |tensor: &mut Tensor<2>| {
                tensor.dims[0] = rows;
                // SAFETY: nothing is launched.
                tensor.at = unsafe { DevicePtr::new(next, tensor.bytes()) };
                next += 1 << 44;
            };
            place(output.tokens.as_mut().unwrap());
            place(&mut output.src_info);
            place(output.ids.as_mut().unwrap());
            place(output.weights.as_mut().unwrap());
        });
        let wanted = format!("rows is {rows}, but it must be at most 2147483647");
        assert!(text.ends_with(&wanted), "{text}");
    }
}
