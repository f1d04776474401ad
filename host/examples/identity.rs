//! Dispatch and combine with experts that return what they get, in exact mode with weights of
//! 1 / top-k: every token must come back as it was. On all GPUs of this machine with the feature
//! `cuda`, else in the simulator.
//!
//! ```sh
//! cargo run --release --package ferry --example identity --features cuda -- 4 128 1024
//! ```
//! Arguments: ranks, tokens a rank, hidden size.

use std::time::{Duration, Instant};

use ferry::{
    CombineInput, CombineMode, CombineOutput, CombineTensor, Config, DevicePtr, DispatchInput,
    DispatchOutput, Error, ExpertParallel, Group, Plan, Stream, Tensor, TokenFormat,
};

const TOP_K: usize = 8;
const EXPERTS: usize = 64;
const ROUNDS: usize = 20;

/// One rank's tensors.
struct Tensors {
    stream: Stream,
    input: DispatchInput,
    output: DispatchOutput,
    weights: Tensor<2>,
    combined: Tensor<2>,
    x: Vec<u8>,
}

#[cfg(feature = "cuda")]
fn group(ranks: usize) -> Result<Group, Error> {
    Group::local(&(0..ranks).collect::<Vec<_>>())
}

#[cfg(not(feature = "cuda"))]
fn group(ranks: usize) -> Result<Group, Error> {
    Group::simulated(ranks as u32, 1)
}

fn main() -> Result<(), Error> {
    let mut numbers = std::env::args()
        .skip(1)
        .map(|word| word.parse().expect("a number"));
    let mut next = |default| numbers.next().unwrap_or(default);
    let (ranks, tokens, hidden) = (next(2), next(16), next(64));
    let group = group(ranks)?;
    let config = Config {
        experts: EXPERTS,
        top_k: TOP_K,
        hidden,
        max_tokens_per_rank: tokens,
        p2p_world_size: None,
        format: TokenFormat::Bf16,
        combine: CombineMode::Exact,
        deadline: Duration::from_secs(2),
        debug_checks: true,
        max_sms: None,
        specialise: true,
    };
    let plan = Plan::new(&group, config)?;
    let mut ranks = ExpertParallel::new(&group, &plan)?;
    let tensors = ranks
        .iter()
        .map(|rank| prepare(rank, tokens))
        .collect::<Result<Vec<_>, _>>()?;
    for round in 0..ROUNDS {
        let start = Instant::now();
        for (rank, t) in ranks.iter_mut().zip(&tensors) {
            let dispatched = rank.dispatch(t.stream, &t.input, &t.output)?;
            let rows = CombineInput {
                expert_rows: t.output.tokens,
                topk_weights: Some(t.weights),
            };
            let sums = CombineOutput {
                combined: CombineTensor::Summed(t.combined),
            };
            dispatched.combine(t.stream, &rows, &sums)?;
        }
        for (rank, t) in ranks.iter().zip(&tensors) {
            rank.synchronize(t.stream)?;
        }
        if round + 1 == ROUNDS {
            println!("round {round}: {:?}", start.elapsed());
        }
    }
    for (rank, t) in ranks.iter().zip(&tensors) {
        let mut combined = vec![0; t.x.len()];
        rank.device().download(t.combined.at, &mut combined)?;
        let wrong = combined.iter().zip(&t.x).filter(|(a, b)| a != b).count();
        println!(
            "{}: {tokens} tokens, {wrong} wrong bytes",
            rank.device().name()
        );
        assert_eq!(wrong, 0);
    }
    ranks.into_iter().try_for_each(ExpertParallel::close)
}

/// Random tokens, each routed to `TOP_K` different experts.
fn prepare(rank: &ExpertParallel, tokens: usize) -> Result<Tensors, Error> {
    let hidden = rank.plan().config().hidden;
    let mut state = 0x9e37_79b9_u64 + u64::from(rank.rank().0);
    let mut random = move || {
        // Knuth's MMIX generator.
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize
    };
    // Finite BF16 of moderate size, with either sign.
    let value = |bits: usize| ((bits & 0x80ff) | 0x3f00) as u16;
    let x: Vec<u8> = (0..tokens * hidden)
        .flat_map(|_| value(random()).to_le_bytes())
        .collect();
    let ids: Vec<u8> = (0..tokens)
        .flat_map(|_| {
            let (first, step) = (random() % EXPERTS, 1 + 2 * (random() % (EXPERTS / 2)));
            (0..TOP_K).map(move |k| ((first + k * step) % EXPERTS) as i32)
        })
        .flat_map(i32::to_le_bytes)
        .collect();
    let weights: Vec<u8> = [1.0 / TOP_K as f32; TOP_K]
        .repeat(tokens)
        .into_iter()
        .flat_map(f32::to_le_bytes)
        .collect();

    let device = rank.device();
    let upload = |bytes: &[u8]| -> Result<DevicePtr, Error> {
        let at = device.alloc(bytes.len() as u64)?;
        device.upload(at, bytes)?;
        Ok(at)
    };
    let rows = rank.plan().max_rows();
    let local_experts = rank.plan().local_experts();
    let weights = Tensor::contiguous(upload(&weights)?, [tokens, TOP_K]);
    Ok(Tensors {
        stream: device.stream()?,
        input: DispatchInput {
            x: Tensor::contiguous(upload(&x)?, [tokens, hidden]),
            topk_ids: Tensor::contiguous(upload(&ids)?, [tokens, TOP_K]),
            topk_weights: Some(weights),
            input_scale: None,
        },
        output: DispatchOutput {
            tokens: Tensor::contiguous(device.alloc((rows * hidden * 2) as u64)?, [rows, hidden]),
            scales: None,
            row_scales: None,
            row_offsets: Tensor::contiguous(
                device.alloc(4 * (local_experts as u64 + 1))?,
                [local_experts + 1],
            ),
            expert_ids: Tensor::contiguous(
                device.alloc(4 * local_experts as u64)?,
                [local_experts],
            ),
            src_info: Tensor::contiguous(device.alloc(8 * rows as u64)?, [rows, 2]),
        },
        weights,
        combined: Tensor::contiguous(
            upload(&x.iter().map(|_| 0xa5).collect::<Vec<_>>())?,
            [tokens, hidden],
        ),
        x,
    })
}
