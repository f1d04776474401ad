//! Dispatch and combine with experts that return their input, in exact mode with weights of
//! 1 / top-k: every token must come back unchanged. On GPUs of this machine with the feature
//! `cuda`, otherwise in the simulator.
//!
//! ```sh
//! cargo run --release --package ferry-ep --example identity --features cuda -- 4 128 1024
//! ```
//! Arguments: ranks, tokens per rank, hidden size.

use std::time::{Duration, Instant};

use ferry::{
    CombineBuffers, CombineInput, CombineMode, Communicator, Config, DispatchBuffers,
    DispatchInput, Error, Group, Plan, Stream, Tensor,
};

const TOP_K: usize = 8;
const EXPERTS: usize = 64;
const ROUNDS: usize = 20;

/// One rank's tensors.
struct Tensors {
    stream: Stream,
    input: DispatchInput,
    weights: Tensor<2>,
    rows: DispatchBuffers,
    sums: CombineBuffers,
    x: Vec<u16>,
}

#[cfg(feature = "cuda")]
fn group(ranks: usize) -> Result<Group, Error> {
    Group::local(
        &(0..ranks).collect::<Vec<_>>(),
        &ferry::GroupOptions::default(),
    )
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
        combine: CombineMode::Exact,
        deadline: Duration::from_secs(2),
        debug_checks: true,
        specialise: true,
        ..Config::new(EXPERTS, TOP_K, hidden, tokens)
    };
    let plan = Plan::new(&group, config)?;
    let mut ranks = Communicator::new(&group, &plan)?;
    let tensors = ranks
        .iter()
        .map(|rank| prepare(rank, tokens))
        .collect::<Result<Vec<_>, _>>()?;
    for round in 0..ROUNDS {
        let start = Instant::now();
        for (rank, t) in ranks.iter_mut().zip(&tensors) {
            rank.dispatch(t.stream, &t.input, t.rows.output())?;
            let rows = CombineInput {
                topk_weights: Some(t.weights),
                ..CombineInput::new(t.rows.output().tokens()?)
            };
            rank.combine(t.stream, &rows, &t.sums.output(tokens)?)?;
        }
        for (rank, t) in ranks.iter().zip(&tensors) {
            if let Some(fault) = rank.synchronize(t.stream)?.fault() {
                eprintln!("{fault}");
            }
        }
        if round + 1 == ROUNDS {
            println!("round {round}: {:?}", start.elapsed());
        }
    }
    for (rank, t) in ranks.iter().zip(&tensors) {
        let device = rank.device();
        let sums: Vec<u16> = device.download_tensor(&t.sums.output(tokens)?.rows())?;
        let wrong = sums.iter().zip(&t.x).filter(|(a, b)| a != b).count();
        println!("{}: {tokens} tokens, {wrong} wrong elements", device.name());
        assert_eq!(wrong, 0);
    }
    Communicator::close_all(ranks)?;
    for Tensors { rows, sums, .. } in tensors {
        // SAFETY: the ranks are closed, so no kernel uses them.
        unsafe { rows.free().and(sums.free())? };
    }
    group.close()
}

/// Random tokens, each routed to `TOP_K` different experts.
fn prepare(rank: &Communicator, tokens: usize) -> Result<Tensors, Error> {
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
    let x: Vec<u16> = (0..tokens * hidden).map(|_| value(random())).collect();
    let ids: Vec<i32> = (0..tokens)
        .flat_map(|_| {
            let (first, step) = (random() % EXPERTS, 1 + 2 * (random() % (EXPERTS / 2)));
            (0..TOP_K).map(move |k| ((first + k * step) % EXPERTS) as i32)
        })
        .collect();
    let weights = vec![1.0 / TOP_K as f32; tokens * TOP_K];

    let (device, plan) = (rank.device(), rank.plan());
    let weights = device.upload_tensor([tokens, TOP_K], &weights)?;
    let sums = CombineBuffers::new(device, plan)?;
    sums.fill(0xa5)?;
    Ok(Tensors {
        stream: device.stream()?,
        input: DispatchInput {
            topk_weights: Some(weights),
            ..DispatchInput::new(
                device.upload_tensor([tokens, hidden], &x)?,
                device.upload_tensor([tokens, TOP_K], &ids)?,
            )
        },
        weights,
        rows: DispatchBuffers::new(device, plan)?,
        sums,
        x,
    })
}
