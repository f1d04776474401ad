//! A small round of which every number was computed by hand.

use std::time::Duration;

use ferry::*;
use half::bf16;

pub const HIDDEN: usize = 8;
pub const TOP_K: usize = 2;
pub const STREAM: Stream = Stream::DEFAULT;

/// Two ranks, experts 0 and 1 on rank 0, 2 and 3 on rank 1.
pub fn config() -> Config {
    Config {
        deadline: Duration::from_secs(5),
        ..Config::new(4, TOP_K, HIDDEN, 3)
    }
}

/// A token: its value, its experts, its weights.
pub type Token = (f32, [i32; TOP_K], [f32; TOP_K]);

/// The tokens of each rank.
pub const TOKENS: [&[Token]; 2] = [
    &[(1.0, [1, 2], [0.5, 2.0]), (2.0, [1, -1], [1.0, 9.0])],
    &[(4.0, [3, 1], [1.0, 0.25])],
];

/// The rows that each rank receives: values, row offsets, expert ids, (token, slot).
pub struct Received {
    pub values: &'static [f32],
    pub row_offsets: &'static [u32],
    pub expert_ids: &'static [i32],
    pub src_info: &'static [i32],
    /// The values after the experts: expert `e` multiplies by `e + 1`.
    pub answers: &'static [f32],
}

pub const RECEIVED: [Received; 2] = [
    Received {
        values: &[1.0, 2.0, 4.0],
        row_offsets: &[0, 0, 3],
        expert_ids: &[0, 1],
        src_info: &[0, 0, 1, 0, 0, 1],
        answers: &[2.0, 4.0, 8.0],
    },
    Received {
        values: &[1.0, 4.0],
        row_offsets: &[0, 1, 2],
        expert_ids: &[0, 1],
        src_info: &[0, 1, 0, 0],
        answers: &[3.0, 16.0],
    },
];

/// 0.5 * 2 + 2 * 3 and 1 * 4; 1 * 16 + 0.25 * 8.
pub const SUMMED: [&[f32]; 2] = [&[7.0, 4.0], &[18.0]];
/// A row per slot.
pub const APART: [&[f32]; 2] = [&[2.0, 3.0, 4.0, 0.0], &[16.0, 8.0]];

/// The BF16 bytes of one row per value: `v, 2v, v, 2v, ..`.
pub fn rows(values: &[f32]) -> Vec<u8> {
    let row = |&value: &f32| (0..HIDDEN).map(move |i| value * (1 + i % 2) as f32);
    values
        .iter()
        .flat_map(row)
        .flat_map(|v| bf16::from_f32(v).to_le_bytes())
        .collect()
}

pub fn words<T: Copy, const B: usize>(values: &[T], bytes: fn(T) -> [u8; B]) -> Vec<u8> {
    values.iter().flat_map(|&value| bytes(value)).collect()
}

pub fn upload(rank: &Communicator, bytes: &[u8]) -> DevicePtr {
    let at = rank.device().alloc(bytes.len().max(16) as u64).unwrap();
    rank.device().upload(at, bytes).unwrap();
    at
}

pub fn download(rank: &Communicator, at: DevicePtr, bytes: usize) -> Vec<u8> {
    let mut data = vec![0; bytes];
    rank.device().download(at, &mut data).unwrap();
    data
}

/// A rank's tensors.
#[derive(Clone, Copy)]
pub struct Tensors {
    pub input: DispatchInput,
    pub weights: Tensor<2>,
    pub output: DispatchOutput,
    pub summed: Tensor<2>,
    pub apart: Tensor<3>,
}

impl Tensors {
    pub fn new(rank: &Communicator, tokens: &[Token]) -> Self {
        let (device, count) = (rank.device(), tokens.len());
        let values: Vec<f32> = tokens.iter().map(|token| token.0).collect();
        let ids: Vec<i32> = tokens.iter().flat_map(|token| token.1).collect();
        let weights: Vec<f32> = tokens.iter().flat_map(|token| token.2).collect();
        let ids = upload(rank, &words(&ids, i32::to_le_bytes));
        let weights = upload(rank, &words(&weights, f32::to_le_bytes));
        let weights = Tensor::contiguous(weights, DataType::F32, [count, TOP_K]);
        let space = |bytes: usize| rank.device().alloc(bytes.max(16) as u64).unwrap();
        Self {
            input: DispatchInput {
                topk_weights: Some(weights),
                ..DispatchInput::new(
                    Tensor::contiguous(
                        upload(rank, &rows(&values)),
                        DataType::Bf16,
                        [count, HIDDEN],
                    ),
                    Tensor::contiguous(ids, DataType::I32, [count, TOP_K]),
                )
            },
            weights,
            output: *DispatchBuffers::new(device, rank.plan()).unwrap().output(),
            summed: Tensor::contiguous(space(count * HIDDEN * 2), DataType::Bf16, [count, HIDDEN]),
            apart: Tensor::contiguous(
                space(count * TOP_K * HIDDEN * 2),
                DataType::Bf16,
                [count, TOP_K, HIDDEN],
            ),
        }
    }

    pub fn combine_input(&self, weights: Option<Tensor<2>>) -> CombineInput {
        CombineInput {
            topk_weights: weights,
            ..CombineInput::new(self.output.tokens.unwrap())
        }
    }

    pub fn combine_output(&self, apart: bool) -> CombineOutput {
        if apart {
            CombineOutput::Apart(self.apart)
        } else {
            CombineOutput::Summed(self.summed)
        }
    }

    /// Compares the outputs of a dispatch, and lets the experts answer in place.
    pub fn answer(&self, rank: &Communicator) {
        let wanted = &RECEIVED[rank.rank().0 as usize];
        let count = wanted.values.len();
        let DispatchOutput {
            tokens,
            row_offsets,
            expert_ids,
            src_info,
            ..
        } = self.output;
        let (tokens, row_offsets) = (tokens.unwrap(), row_offsets.unwrap());
        let expert_ids = expert_ids.unwrap();
        assert_eq!(
            download(rank, tokens.at, count * HIDDEN * 2),
            rows(wanted.values)
        );
        let offsets = words(wanted.row_offsets, u32::to_le_bytes);
        assert_eq!(download(rank, row_offsets.at, offsets.len()), offsets);
        let ids = words(wanted.expert_ids, i32::to_le_bytes);
        assert_eq!(download(rank, expert_ids.at, ids.len()), ids);
        let info = words(wanted.src_info, i32::to_le_bytes);
        assert_eq!(download(rank, src_info.at, info.len()), info);
        rank.device()
            .upload(tokens.at, &rows(wanted.answers))
            .unwrap();
    }

    /// Compares the outputs of a combine.
    pub fn compare(&self, rank: &Communicator, apart: bool) {
        let (wanted, at) = if apart {
            (APART, self.apart.at)
        } else {
            (SUMMED, self.summed.at)
        };
        let wanted = rows(wanted[rank.rank().0 as usize]);
        assert_eq!(download(rank, at, wanted.len()), wanted);
    }
}

/// A communicator of two simulated ranks, with the tensors of [`TOKENS`].
pub fn two_ranks(seed: u64, config: Config) -> (Vec<Communicator>, Vec<Tensors>) {
    let group = Group::simulated(2, seed).unwrap();
    let plan = Plan::new(&group, config).unwrap();
    let ranks = Communicator::new(&group, &plan).unwrap();
    let tensors = ranks
        .iter()
        .zip(TOKENS)
        .map(|(r, tokens)| Tensors::new(r, tokens))
        .collect();
    (ranks, tensors)
}

/// One rank with a token for each of its two experts, without peers.
pub fn alone(config: Config) -> (Communicator, Tensors) {
    alone_with(config, &[(1.0, [0, 1], [1.0, 1.0])])
}

/// One rank with two experts and these tokens, without peers.
pub fn alone_with(config: Config, tokens: &[Token]) -> (Communicator, Tensors) {
    let group = Group::simulated(1, 1).unwrap();
    let experts = 2;
    let plan = Plan::new(&group, Config { experts, ..config }).unwrap();
    let rank = Communicator::new(&group, &plan).unwrap().remove(0);
    let tensors = Tensors::new(&rank, tokens);
    (rank, tensors)
}

/// Ends the open round of all ranks, and checks that it has no fault.
pub fn combine_all(ranks: &mut [Communicator], tensors: &[Tensors]) {
    for (rank, t) in ranks.iter_mut().zip(tensors) {
        let (input, output) = (t.combine_input(None), t.combine_output(false));
        rank.combine(STREAM, &input, &output).unwrap();
    }
    for rank in ranks {
        assert_eq!(rank.synchronize(STREAM).unwrap().fault(), None);
    }
}

/// Ends the open round of a rank that has no peers, and closes it.
pub fn finish(mut rank: Communicator, t: &Tensors) {
    rank.combine(STREAM, &t.combine_input(None), &t.combine_output(false))
        .unwrap();
    assert_eq!(rank.synchronize(STREAM).unwrap().fault(), None);
    rank.close().unwrap();
}

pub fn close(ranks: Vec<Communicator>) {
    ranks.into_iter().for_each(|rank| rank.close().unwrap());
}
