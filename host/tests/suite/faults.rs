//! Faults in kernels, after which a communicator goes on or ends.

use crate::support::*;
use ferry::layout::Region;
use ferry::simulator::{Lost, Options};
use ferry::*;

#[test]
fn an_invalid_expert_is_reported_once_and_the_communicator_goes_on() {
    let (mut ranks, mut tensors) = two_ranks(5, config());
    let good = tensors[1].input;
    let ids = upload(&ranks[1], &words(&[3, 4], i32::to_le_bytes));
    tensors[1].input.topk_ids = Tensor::contiguous(ids, DataType::I32, [1, TOP_K]);
    let round = |ranks: &mut [Communicator], tensors: &[Tensors]| {
        for (rank, t) in ranks.iter_mut().zip(tensors) {
            rank.dispatch(STREAM, &t.input, &t.output).unwrap();
            let output = t.combine_output(false);
            rank.combine(STREAM, &t.combine_input(None), &output)
                .unwrap();
        }
    };
    round(&mut ranks, &tensors);
    assert_eq!(ranks[0].synchronize(STREAM).unwrap().fault(), None);
    let fault = ranks[1].synchronize(STREAM).unwrap().fault().unwrap();
    assert_eq!(
        (fault.kind, fault.rank, fault.index),
        (FaultKind::InvalidExpert, Rank(1), 0)
    );
    assert_eq!(fault.slot(), Some(1));
    assert_eq!((fault.wanted, fault.saw as i32), (4, 4));
    assert_eq!(ranks[1].check().unwrap().fault(), None);

    tensors[1].input = good;
    round(&mut ranks, &tensors);
    for rank in &ranks {
        assert_eq!(rank.synchronize(STREAM).unwrap().fault(), None);
    }
    close(ranks);
}

#[test]
fn outputs_that_are_too_small_take_the_first_rows_and_the_communicator_goes_on() {
    let (mut ranks, mut tensors) = two_ranks(6, config());
    // Rank 0 receives three rows; the third is of rank 1's token.
    let whole = tensors[0].output;
    let output = &mut tensors[0].output;
    let tokens = output.tokens.unwrap().at;
    output.tokens = Some(Tensor::contiguous(tokens, DataType::Bf16, [2, HIDDEN]));
    output.src_info = Tensor::contiguous(output.src_info.at, DataType::I32, [2, 2]);
    for is_short in [true, false] {
        if !is_short {
            tensors[0].output = whole;
        }
        for (rank, t) in ranks.iter_mut().zip(&tensors) {
            rank.dispatch(STREAM, &t.input, &t.output).unwrap();
        }
        let told = ranks[0].synchronize(STREAM).unwrap().fault();
        assert_eq!(ranks[1].synchronize(STREAM).unwrap().fault(), None);
        let numbers = |fault: InputFault| (fault.kind, fault.rank, fault.saw, fault.wanted);
        let wanted = is_short.then_some((FaultKind::OutputTooSmall, Rank(0), 3, 2));
        assert_eq!(told.map(numbers), wanted);
        if let Some(fault) = told {
            let text = "rank 0 receives 3 rows in dispatch, round 1, but its outputs hold 2; ";
            assert!(fault.to_string().starts_with(text), "{fault}");
            let offsets = words(&[0, 0, 2], u32::to_le_bytes);
            assert_eq!(
                download(&ranks[0], whole.row_offsets.unwrap().at, 12),
                offsets
            );
        } else {
            tensors[0].answer(&ranks[0]);
        }
        tensors[1].answer(&ranks[1]);
        combine_all(&mut ranks, &tensors);
        match is_short {
            // 1 * 16, and nothing of rank 0.
            true => assert_eq!(
                download(&ranks[1], tensors[1].summed.at, HIDDEN * 2),
                rows(&[16.0])
            ),
            false => ranks
                .iter()
                .zip(&tensors)
                .for_each(|(rank, t)| t.compare(rank, false)),
        }
    }
    close(ranks);
}

/// An engine may ignore bad ids: lost rows are reported nevertheless.
#[test]
fn rows_that_are_lost_are_told_though_an_id_is_no_good() {
    for seed in 0..20 {
        let (mut ranks, mut tensors) = two_ranks(seed, config());
        let ids = ranks[1].device().upload_tensor([1, TOP_K], &[3_i32, 9]);
        tensors[1].input.topk_ids = ids.unwrap();
        tensors[1].output.tokens.as_mut().unwrap().dims[0] = 1;
        tensors[1].output.src_info.dims[0] = 1;
        for (rank, t) in ranks.iter_mut().zip(&tensors) {
            rank.dispatch(STREAM, &t.input, &t.output).unwrap();
        }
        assert_eq!(ranks[0].synchronize(STREAM).unwrap().fault(), None);
        let told = ranks[1].synchronize(STREAM).unwrap().fault();
        let kind = told.map(|fault| fault.kind);
        assert_eq!(kind, Some(FaultKind::OutputTooSmall), "seed {seed}");
        assert_eq!(ranks[1].synchronize(STREAM).unwrap().fault(), None);
        combine_all(&mut ranks, &tensors);
        close(ranks);
    }
}

/// Rank 1 receives a row for each of two experts, hence two blocks of scales. Nothing is written after
/// the one block in its outputs.
#[test]
fn tiled_scales_that_are_too_small_take_the_first_blocks() {
    let hidden = 128;
    let format = TokenFormat::Mxfp8(ScaleLayout::Tiled);
    let config = Config {
        hidden,
        format,
        ..config()
    };
    let (block, behind) = (512, [0xa5; 512]);
    for seed in 0..400 {
        let mut scales_at = Vec::new();
        let (mut ranks, mut tensors) = two_ranks(seed, config);
        for (rank, t) in ranks.iter_mut().zip(&mut tensors) {
            let capacity = t.output.tokens.unwrap().dims[0];
            let space = |bytes: usize| rank.device().alloc(bytes as u64).unwrap();
            let x = upload(rank, &vec![0; t.input.x.dims[0] * hidden * 2]);
            t.input.x = Tensor::contiguous(x, DataType::Bf16, [t.input.x.dims[0], hidden]);
            t.output.tokens = Some(Tensor::contiguous(
                space(capacity * hidden),
                DataType::E4m3,
                [capacity, hidden],
            ));
            let scales = upload(rank, &[behind; 2].concat());
            scales_at.push(scales);
            t.output.scales = Some(ScaleTensor::Tiled {
                scales: Tensor::contiguous(scales, DataType::E8m0, [1, 1, 32, 4, 4]),
                offsets: Tensor::contiguous(space(16), DataType::U32, [2]),
            });
            rank.dispatch(STREAM, &t.input, &t.output).unwrap();
        }
        assert_eq!(ranks[0].synchronize(STREAM).unwrap().fault(), None);
        let fault = ranks[1].synchronize(STREAM).unwrap().fault().unwrap();
        assert_eq!(
            (fault.kind, fault.region, fault.saw, fault.wanted),
            (FaultKind::OutputTooSmall, Region::ScaleBlocks, 2, 1)
        );
        let offsets = words(&[0, 1, 1], u32::to_le_bytes);
        let at = tensors[1].output.row_offsets.unwrap().at;
        assert_eq!(download(&ranks[1], at, 12), offsets);
        for (rank, at) in ranks.iter().zip(scales_at) {
            let both = download(rank, at, 2 * block);
            let is_kept = both[block..] == behind;
            assert!(is_kept, "{:?} of seed {seed}", rank.rank());
        }
        // The round stays open.
        drop(ranks);
    }
}

#[test]
fn a_lost_rank_is_named_by_the_others_which_then_refuse_and_close() {
    for seed in 0..10 {
        let lost = Some(Lost {
            rank: 2,
            after_steps: 20,
        });
        let group = Group::simulated_with(Options {
            lost,
            ..Options::new(3, seed)
        })
        .unwrap();
        let plan = Plan::new(
            &group,
            Config {
                experts: 6,
                ..config()
            },
        )
        .unwrap();
        let mut ranks = Communicator::new(&group, &plan).unwrap();
        let token = (1.0, [1, 4], [1.0, 1.0]);
        let tensors: Vec<_> = ranks
            .iter()
            .map(|rank| Tensors::new(rank, &[token]))
            .collect();
        for (rank, t) in ranks.iter_mut().zip(&tensors) {
            rank.dispatch(STREAM, &t.input, &t.output).unwrap();
        }
        for (rank, t) in ranks.iter_mut().zip(&tensors).take(2) {
            let Err(Error::Fault(fault)) = rank.synchronize(STREAM) else {
                panic!("seed {seed}: rank {} did not notice", rank.rank().0)
            };
            assert_eq!(
                (fault.kind, fault.peer),
                (FaultKind::PeerTimeout, Rank(2)),
                "seed {seed}"
            );
            assert!(fault.to_string().contains("rank 2 did not send"), "{fault}");
            let refused = rank.dispatch(STREAM, &t.input, &t.output);
            assert!(matches!(refused, Err(Error::Poisoned(again)) if again == fault));
        }
        close(ranks);
    }
}

#[test]
fn an_input_fault_does_not_hide_that_the_communicator_gave_up() {
    let lost = Some(Lost {
        rank: 1,
        after_steps: 0,
    });
    let options = Options {
        lost,
        ..Options::new(2, 8)
    };
    let group = Group::simulated_with(options).unwrap();
    let plan = Plan::new(&group, config()).unwrap();
    let mut ranks = Communicator::new(&group, &plan).unwrap();
    let t = Tensors::new(&ranks[0], &[(1.0, [99, 3], [1.0, 1.0])]);
    ranks[0].dispatch(STREAM, &t.input, &t.output).unwrap();
    ranks[0].device().synchronize(STREAM).unwrap();
    let fault = fault_of(ranks[0].check());
    assert_eq!((fault.kind, fault.peer), (FaultKind::PeerTimeout, Rank(1)));
    let again = ranks[0].synchronize(STREAM);
    assert!(matches!(again, Err(Error::Poisoned(poison)) if poison == fault));
    close(ranks);
}

/// The fault that ended a communicator.
fn fault_of(result: Result<InputReport, Error>) -> Fault {
    match result {
        Err(Error::Fault(fault)) => fault,
        other => panic!("{other:?} is no fault"),
    }
}

/// The fault of a dispatch of a token to these of four experts, with debug checks.
fn checked<T: TensorElement>(config: Config, ids: [T; TOP_K]) -> Option<Fault> {
    let group = Group::simulated(1, 3).unwrap();
    let config = Config {
        debug_checks: true,
        ..config
    };
    let plan = Plan::new(&group, config).unwrap();
    let mut rank = Communicator::new(&group, &plan).unwrap().remove(0);
    let device = rank.device().clone();
    let x = device.upload_tensor([1, HIDDEN], &[0_u16; HIDDEN]);
    let ids = device.upload_tensor([1, TOP_K], &ids).unwrap();
    let capacity = Capacity {
        wide_ids: T::DATA_TYPE == DataType::I64 && config.receive.keeps_rows(),
        ..Capacity::max(&plan)
    };
    let rows = DispatchBuffers::with_capacity(&device, &plan, capacity).unwrap();
    let input = DispatchInput::new(x.unwrap(), ids);
    rank.dispatch(STREAM, &input, rows.output()).unwrap();
    let told = rank.synchronize(STREAM).unwrap().fault();
    told.map(|InputFault(fault)| fault)
}

#[test]
fn ids_of_no_experts_are_reported_as_such_though_debug_checks_look_for_duplicates() {
    let with_options = Config {
        options: true,
        ..config()
    };
    let alone = Config {
        skip_a2a: true,
        ..config()
    };
    let kept = Config {
        receive: Receive::of(ReceiveLayout::Strided),
        ..config()
    };
    let invalid = |fault: Option<Fault>, id: i64| {
        let fault = fault.unwrap();
        assert_eq!(fault.kind, FaultKind::InvalidExpert, "{fault}");
        assert_eq!((fault.saw as i64, fault.wanted), (id, 4), "{fault}");
    };
    for config in [config(), with_options, alone, kept] {
        invalid(checked(config, [7_i32, 7]), 7);
        invalid(checked(config, [-2_i32, -2]), -2);
        assert_eq!(checked(config, [-1_i32, -1]), None);
        let twice = checked(config, [3_i32, 3]).unwrap();
        assert_eq!((twice.kind, twice.saw), (FaultKind::DuplicateExpert, 3));
    }
    for config in [with_options, alone, kept] {
        invalid(
            checked(config, [4_294_967_299_i64, 8_589_934_592]),
            4_294_967_299,
        );
        invalid(checked(config, [4_294_967_294_i64; 2]), 4_294_967_294);
        invalid(checked(config, [-2_i64; 2]), -2);
        let twice = checked(config, [3_i64, 3]).unwrap();
        assert_eq!((twice.kind, twice.saw), (FaultKind::DuplicateExpert, 3));
    }
}
