//! Rounds of rows that stay as they came, in every layout, of which every number was computed by hand.

use crate::support::*;
use ferry::*;
use half::bf16;

const LAYOUTS: [ReceiveLayout; 3] = [
    ReceiveLayout::View,
    ReceiveLayout::Strided,
    ReceiveLayout::Compact,
];

/// A row that a rank receives: its source rank and token, local experts, weights.
type Row = ([i32; 2], [i64; TOP_K], [f32; TOP_K]);

/// Rows of each rank, of [`TOKENS`].
const ROWS: [&[Row]; 2] = [
    &[
        ([0, 0], [1, -1], [0.5, 0.0]),
        ([0, 1], [1, -1], [1.0, 0.0]),
        ([1, 0], [-1, 1], [0.0, 0.25]),
    ],
    &[([0, 0], [-1, 0], [0.0, 2.0]), ([1, 0], [1, -1], [1.0, 0.0])],
];
const SOURCE_COUNTS: [[i32; 2]; 2] = [[2, 1], [1, 1]];
const EXPERT_COUNTS: [[i32; 2]; 2] = [[0, 3], [1, 1]];
/// Sums of each rank's tokens, if experts return their input: 0.5 * 1 + 2 * 1 and 1 * 2; 1 * 4 + 0.25 * 4.
const SUMS: [&[f32]; 2] = [&[2.5, 2.0], &[5.0]];
/// Weights of the slots that are routed.
const WEIGHTS: [&[f32]; 2] = [&[0.5, 2.0, 1.0, 0.0], &[1.0, 0.25]];

const fn keeping(receive: ReceiveLayout) -> Config {
    Config {
        receive: Receive::of(receive),
        ..Config::new(4, TOP_K, HIDDEN, 3)
    }
}

fn returning_weights(receive: ReceiveLayout) -> Config {
    let fields = ReceiveFields {
        combine_weights: true,
        ..ReceiveFields::new(receive)
    };
    Config {
        receive: fields.try_into().unwrap(),
        ..keeping(receive)
    }
}

/// The rows that a rank has in a layout, with those without a token.
fn wanted(rank: usize, receive: ReceiveLayout) -> Vec<Row> {
    if receive == ReceiveLayout::Compact {
        return ROWS[rank].to_vec();
    }
    let mut all = vec![([-1; 2], [-1; TOP_K], [0.0; TOP_K]); 6];
    for row in ROWS[rank] {
        let [source, token] = row.0;
        all[3 * source as usize + token as usize] = *row;
    }
    all
}

/// Values of the elements of a token.
fn value([source, token]: [i32; 2]) -> f32 {
    TOKENS[source as usize][token as usize].0
}

struct Memory {
    rows: DispatchBuffers,
    sums: CombineBuffers,
    input: DispatchInput,
}

impl Memory {
    fn new(rank: &Communicator, wide_ids: bool) -> Self {
        let (device, plan) = (rank.device(), rank.plan());
        let capacity = Capacity {
            wide_ids,
            ..Capacity::max(plan)
        };
        let mut buffers = DispatchBuffers::with_capacity(device, plan, capacity).unwrap();
        buffers.fill(0xa5).unwrap();
        let tokens = TOKENS[rank.rank().0 as usize];
        let values: Vec<f32> = tokens.iter().map(|token| token.0).collect();
        let (x, ids) = (rows(&values), tokens.iter().flat_map(|token| token.1));
        let x: &[u16] = bytemuck::cast_slice(&x);
        let weights: Vec<f32> = tokens.iter().flat_map(|token| token.2).collect();
        let input = if wide_ids {
            let ids: Vec<i64> = ids.map(i64::from).collect();
            buffers.upload(x, &ids, Some(&weights))
        } else {
            buffers.upload(x, &ids.collect::<Vec<i32>>(), Some(&weights))
        };
        Self {
            rows: buffers,
            sums: CombineBuffers::new(device, plan).unwrap(),
            input: input.unwrap(),
        }
    }

    /// Compares the outputs of a dispatch, and returns the experts' rows: each token times its weights here.
    fn answer(&mut self, rank: &Communicator) -> CombineInput {
        let (number, plan) = (rank.rank().0 as usize, rank.plan());
        let receive = plan.config().receive.layout();
        let received = rank.download(self.rows.output()).unwrap();
        let wanted = wanted(number, receive);
        let count = received.src_info.len();
        assert_eq!(count, wanted.len(), "{receive}");
        let ids: Vec<_> = wanted.iter().flat_map(|row| row.1).collect();
        let weights: Vec<_> = wanted.iter().flat_map(|row| row.2).collect();
        let info: Vec<_> = wanted.iter().map(|row| row.0).collect();
        assert_eq!(
            (received.ids.as_slice(), received.weights.as_slice()),
            (&ids[..], &weights[..])
        );
        assert_eq!(received.src_info, info, "{receive}");
        assert_eq!(received.source_counts, SOURCE_COUNTS[number]);
        assert_eq!(received.expert_counts, EXPERT_COUNTS[number]);
        assert!(received.row_offsets.is_empty());
        let decoded = decode_rows(plan, &received, None).unwrap();
        let mut answers = Vec::new();
        for (row, &(info, _, weights)) in decoded.chunks(HIDDEN).zip(&wanted) {
            if info[0] < 0 {
                // Combine reads no row without a token.
                answers.extend([bf16::NAN; HIDDEN]);
                continue;
            }
            assert_eq!(
                row[..2],
                [value(info), 2.0 * value(info)],
                "{receive}, {info:?}"
            );
            let weight: f32 = weights.iter().sum();
            answers.extend(row.iter().map(|x| bf16::from_f32(x * weight)));
        }
        self.sums.upload(self.rows.output(), &answers).unwrap()
    }
}

/// Sums of a rank's tokens, of `v, 2v, ..` each, plus `more`.
fn sums(rank: usize, more: f32) -> Vec<bf16> {
    let row =
        |&sum: &f32| (0..HIDDEN).map(move |i| bf16::from_f32(sum * (1 + i % 2) as f32 + more));
    SUMS[rank].iter().flat_map(row).collect()
}

fn ranks(config: Config, seed: u64) -> Vec<Communicator> {
    let group = Group::simulated(2, seed).unwrap();
    let plan = Plan::new(&group, config).unwrap();
    Communicator::new(&group, &plan).unwrap()
}

fn synchronize(ranks: &[Communicator]) {
    for rank in ranks {
        assert_eq!(rank.synchronize(STREAM).unwrap().fault(), None);
    }
}

#[test]
fn every_layout_brings_rows_and_sums_with_ids_of_either_type() {
    for receive in LAYOUTS {
        for (seed, is_split) in [(1, false), (2, true), (3, false)] {
            let mut ranks = ranks(keeping(receive), seed);
            // One rank with i64 and one with i32, too.
            let wide = |rank: &Communicator| seed == 1 || rank.rank().0 == 0;
            let mut all: Vec<_> = ranks
                .iter()
                .map(|rank| Memory::new(rank, wide(rank)))
                .collect();
            for round in 0..3 {
                for (rank, t) in ranks.iter_mut().zip(&all) {
                    if is_split {
                        rank.dispatch_async(STREAM, &t.input).unwrap();
                    } else {
                        rank.dispatch(STREAM, &t.input, t.rows.output()).unwrap();
                    }
                }
                if is_split {
                    for (rank, t) in ranks.iter_mut().zip(&all) {
                        rank.dispatch_wait(STREAM, t.rows.output()).unwrap();
                    }
                }
                synchronize(&ranks);
                for (rank, t) in ranks.iter_mut().zip(&mut all) {
                    let answers = t.answer(rank);
                    let sums = t.sums.output(SUMS[rank.rank().0 as usize].len()).unwrap();
                    rank.combine(STREAM, &answers, &sums).unwrap();
                }
                synchronize(&ranks);
                for (number, t) in all.iter().enumerate() {
                    let given = t.sums.download::<bf16>(SUMS[number].len()).unwrap();
                    assert_eq!(given, sums(number, 0.0), "{receive}, round {round}");
                }
            }
            Communicator::close_all(ranks).unwrap();
        }
    }
}

#[test]
fn sums_begin_with_the_callers_tensors_and_weights_come_back() {
    for receive in LAYOUTS {
        let config = returning_weights(receive);
        let mut ranks = ranks(config, 4);
        let mut all: Vec<_> = ranks.iter().map(|rank| Memory::new(rank, false)).collect();
        let streams = [STREAM; 2];
        let dispatch = |t: &Memory| Call::Dispatch(t.input, *t.rows.output());
        let calls: Vec<_> = all.iter().map(dispatch).collect();
        Communicator::together(&mut ranks, &streams, &calls).unwrap();
        synchronize(&ranks);
        let mut calls = Vec::new();
        for (rank, t) in ranks.iter().zip(&mut all) {
            let tokens = SUMS[rank.rank().0 as usize].len();
            let initial = |value: f32| {
                let values = vec![bf16::from_f32(value); tokens * HIDDEN];
                let device = rank.device();
                Some(device.upload_tensor([tokens, HIDDEN], &values).unwrap())
            };
            let answers = CombineInput {
                initial: [initial(16.0), initial(-0.5)],
                received_weights: t.rows.output().weights,
                ..t.answer(rank)
            };
            calls.push(Call::CombineAsync(answers, t.sums.output(tokens).unwrap()));
        }
        Communicator::together(&mut ranks, &streams, &calls).unwrap();
        Communicator::together(&mut ranks, &streams, &[Call::CombineWait; 2]).unwrap();
        synchronize(&ranks);
        for (number, t) in all.iter().enumerate() {
            let given = t.sums.download::<bf16>(SUMS[number].len()).unwrap();
            assert_eq!(given, sums(number, 15.5), "{receive}");
            let weights = t.sums.download_weights(SUMS[number].len()).unwrap();
            assert_eq!(weights, WEIGHTS[number], "{receive}");
        }
        Communicator::close_all(ranks).unwrap();
    }
}

#[test]
fn weights_of_no_rows_return_as_zeros() {
    let config = returning_weights(ReceiveLayout::Compact);
    let mut ranks = ranks(config, 9);
    let mut all: Vec<_> = ranks.iter().map(|rank| Memory::new(rank, false)).collect();
    let (device, plan) = (ranks[1].device().clone(), *ranks[1].plan());
    let none = Capacity::of_rows(&plan, 0);
    all[1].rows = DispatchBuffers::with_capacity(&device, &plan, none).unwrap();
    for (rank, t) in ranks.iter_mut().zip(&all) {
        rank.dispatch(STREAM, &t.input, t.rows.output()).unwrap();
    }
    assert_eq!(ranks[0].synchronize(STREAM).unwrap().fault(), None);
    let fault = ranks[1].synchronize(STREAM).unwrap().fault().unwrap();
    assert_eq!(
        (fault.kind, fault.wanted, fault.saw),
        (FaultKind::OutputTooSmall, 0, 2)
    );
    let nothing = |data_type, columns| Tensor::contiguous(DevicePtr::NULL, data_type, [0, columns]);
    let answers = [
        CombineInput {
            received_weights: all[0].rows.output().weights,
            ..all[0].answer(&ranks[0])
        },
        CombineInput {
            received_weights: Some(nothing(DataType::F32, TOP_K)),
            ..CombineInput::new(nothing(DataType::Bf16, HIDDEN))
        },
    ];
    for ((rank, t), answers) in ranks.iter_mut().zip(&all).zip(&answers) {
        let results = t.sums.output(SUMS[rank.rank().0 as usize].len()).unwrap();
        rank.combine(STREAM, answers, &results).unwrap();
    }
    synchronize(&ranks);
    // Only rank 0's experts have answered: 0.5 * 1, 1 * 2, and 0.25 * 4.
    let answered: [(&[f32], &[f32]); 2] =
        [(&[0.5, 2.0], &[0.5, 0.0, 1.0, 0.0]), (&[1.0], &[0.0, 0.25])];
    for (t, (values, weights)) in all.iter().zip(answered) {
        let given = t.sums.download::<bf16>(values.len()).unwrap();
        assert_eq!(bytemuck::cast_slice::<_, u8>(&given), rows(values));
        assert_eq!(t.sums.download_weights(values.len()).unwrap(), weights);
    }
    Communicator::close_all(ranks).unwrap();
}

#[test]
fn a_view_is_there_from_dispatch_to_combine() {
    let mut ranks = ranks(
        Config {
            debug_checks: true,
            ..keeping(ReceiveLayout::View)
        },
        5,
    );
    let mut all: Vec<_> = ranks.iter().map(|rank| Memory::new(rank, false)).collect();
    let closed = |rank: &Communicator, next: &str| {
        // SAFETY: nothing is returned.
        let text = unsafe { rank.view() }.unwrap_err().to_string();
        assert!(
            text.starts_with("view is out of order: ") && text.ends_with(next),
            "{text}"
        );
    };
    for (rank, t) in ranks.iter_mut().zip(&all) {
        closed(rank, "dispatch or dispatch_async comes next");
        rank.dispatch_async(STREAM, &t.input).unwrap();
        closed(rank, "dispatch_wait comes next");
    }
    for (rank, t) in ranks.iter_mut().zip(&all) {
        rank.dispatch_wait(STREAM, t.rows.output()).unwrap();
    }
    let mut views = Vec::new();
    synchronize(&ranks);
    for (rank, t) in ranks.iter_mut().zip(&mut all) {
        // SAFETY: the simulator checks every access.
        let view = unsafe { rank.view() }.unwrap();
        assert_eq!(view.row_stride, rank.plan().view_row_stride());
        assert_eq!(view.tokens.dims, [6, HIDDEN]);
        assert_eq!(view.tokens.strides, [view.row_stride as usize / 2, 1]);
        assert_eq!((view.scales, view.row_scales), (None, None));
        let answers = t.answer(rank);
        let sums = t.sums.output(SUMS[rank.rank().0 as usize].len()).unwrap();
        rank.combine_async(STREAM, &answers, &sums).unwrap();
        closed(rank, "combine_wait comes next");
        views.push(view);
    }
    for rank in &mut ranks {
        rank.combine_wait(STREAM).unwrap();
        closed(rank, "dispatch or dispatch_async comes next");
    }
    synchronize(&ranks);
    // With debug checks, nothing is left of the rows.
    for (number, (rank, view)) in ranks.iter().zip(&views).enumerate() {
        for &([source, token], ..) in ROWS[number] {
            let row = u64::from(3 * source as u32 + token as u32);
            let left = download(rank, view.tokens.at.plus(row * view.row_stride), 2 * HIDDEN);
            assert_eq!(left, [0xff; 2 * HIDDEN]);
        }
    }
    Communicator::close_all(ranks).unwrap();
    let group = Group::simulated(1, 1).unwrap();
    let plan = Plan::new(&group, keeping(ReceiveLayout::Compact)).unwrap();
    let rank = Communicator::new(&group, &plan).unwrap().remove(0);
    // SAFETY: nothing is returned.
    let refused = unsafe { rank.view() }.unwrap_err();
    assert_eq!(
        refused.to_string(),
        "view needs a plan whose receive is view, and this one's is compact"
    );
}

#[test]
fn compact_rows_that_do_not_fit_count_as_not_here() {
    let mut ranks = ranks(keeping(ReceiveLayout::Compact), 6);
    let mut all: Vec<_> = ranks.iter().map(|rank| Memory::new(rank, false)).collect();
    let (device, plan) = (ranks[0].device().clone(), *ranks[0].plan());
    let short = Capacity::of_rows(&plan, 2);
    all[0].rows = DispatchBuffers::with_capacity(&device, &plan, short).unwrap();
    for (rank, t) in ranks.iter_mut().zip(&all) {
        rank.dispatch(STREAM, &t.input, t.rows.output()).unwrap();
    }
    let fault = ranks[0].synchronize(STREAM).unwrap().fault().unwrap();
    assert_eq!(
        (fault.kind, fault.wanted, fault.saw),
        (FaultKind::OutputTooSmall, 2, 3)
    );
    assert_eq!(ranks[1].synchronize(STREAM).unwrap().fault(), None);
    let received = ranks[0].download(all[0].rows.output()).unwrap();
    assert_eq!(received.source_counts, [2, 0]);
    assert_eq!(received.expert_counts, [0, 2]);
    assert_eq!(received.ids, [1, -1, 1, -1]);
    let rows = rows(&[0.5, 2.0]);
    let output = *all[0].rows.output();
    let answers = (all[0].sums).upload(&output, bytemuck::cast_slice::<_, u16>(&rows));
    let answers = [answers.unwrap(), all[1].answer(&ranks[1])];
    for ((rank, t), answers) in ranks.iter_mut().zip(&all).zip(&answers) {
        let sums = t.sums.output(SUMS[rank.rank().0 as usize].len()).unwrap();
        rank.combine(STREAM, answers, &sums).unwrap();
    }
    synchronize(&ranks);
    // The row of rank 1's token on rank 0 is missing.
    let lost = all[1].sums.download::<bf16>(1).unwrap();
    assert_eq!(lost[..2], [bf16::from_f32(4.0), bf16::from_f32(8.0)]);
    assert_eq!(all[0].sums.download::<bf16>(2).unwrap(), sums(0, 0.0));
    Communicator::close_all(ranks).unwrap();
}

#[test]
fn ids_of_64_bits_go_by_expert_too_and_their_fault_has_all_bits() {
    let config = Config {
        options: true,
        ..config()
    };
    for (receive, wrong) in [
        (ReceiveLayout::ByExpert, (1_i64 << 32) + 1),
        (ReceiveLayout::Compact, -2),
    ] {
        let group = Group::simulated(1, 7).unwrap();
        let plan = Plan::new(
            &group,
            Config {
                receive: Receive::of(receive),
                ..config
            },
        )
        .unwrap();
        let mut rank = Communicator::new(&group, &plan).unwrap().remove(0);
        let capacity = Capacity {
            wide_ids: true,
            ..Capacity::max(&plan)
        };
        let mut buffers = DispatchBuffers::with_capacity(rank.device(), &plan, capacity).unwrap();
        let ids = [wrong, 2];
        let input = buffers.upload(&[0x3f80_u16; HIDDEN], &ids, None).unwrap();
        rank.dispatch(STREAM, &input, buffers.output()).unwrap();
        let fault = rank.synchronize(STREAM).unwrap().fault().unwrap();
        assert_eq!(fault.kind, FaultKind::InvalidExpert);
        assert_eq!((fault.saw as i64, fault.slot()), (wrong, Some(0)));
        let received = rank.download(buffers.output()).unwrap();
        assert_eq!(received.src_info.len(), 1);
        drop(rank);
    }
}

/// The rows of a rank that brings three tokens to its only expert, decoded.
fn decoded(config: Config, x: &[bf16]) -> Vec<f32> {
    let group = Group::simulated(1, 8).unwrap();
    let plan = Plan::new(&group, config).unwrap();
    let mut rank = Communicator::new(&group, &plan).unwrap().remove(0);
    let mut buffers = DispatchBuffers::new(rank.device(), &plan).unwrap();
    buffers.fill(0xa5).unwrap();
    let input = buffers.upload(x, &[0; 3], None).unwrap();
    rank.dispatch(STREAM, &input, buffers.output()).unwrap();
    assert_eq!(rank.synchronize(STREAM).unwrap().fault(), None);
    let received = rank.download(buffers.output()).unwrap();
    assert!(!received.tokens.is_empty());
    let decoded = decode_rows(&plan, &received, None).unwrap();
    drop(rank);
    decoded[..x.len()].to_vec()
}

#[test]
fn rows_of_every_format_decode_as_those_by_expert() {
    let x: Vec<_> = (0..3 * 256)
        .map(|i| bf16::from_f32((i as f32 - 300.0) * 0.37))
        .collect();
    let formats = [
        TokenFormat::Bf16,
        TokenFormat::BlockwiseFp8,
        TokenFormat::Mxfp8(ScaleLayout::RowMajor),
        TokenFormat::Mxfp4(ScaleLayout::RowMajor),
        TokenFormat::Nvfp4(ScaleLayout::RowMajor),
        TokenFormat::Nvfp4RowScaled(ScaleLayout::RowMajor),
    ];
    for format in formats {
        // Three tokens of at most three: no row is without a token.
        let config = Config {
            format,
            ..Config::new(1, 1, 256, 3)
        };
        let wanted = decoded(config, &x);
        assert!(wanted.iter().any(|&x| x != 0.0));
        for receive in LAYOUTS {
            for transposed_scales in [false, true] {
                if transposed_scales && format != TokenFormat::BlockwiseFp8 {
                    continue;
                }
                let fields = ReceiveFields {
                    transposed_scales,
                    ..ReceiveFields::new(receive)
                };
                let config = Config {
                    receive: fields.try_into().unwrap(),
                    ..config
                };
                assert_eq!(decoded(config, &x), wanted, "{format}, {receive}");
            }
        }
    }
}
