//! Three layers of a mixture of experts on four simulated ranks: tokens travel in blockwise FP8, experts
//! work on the host, and each layer is compared with a dense reference in f64.
//!
//! ```sh
//! cargo run --release --package ferry-ep --example moe_simulated
//! ```
//! The functions from [`main`] to [`wait`] are all that a program needs of Ferry. The rest is a model.

use ferry::{
    CombineBuffers, Communicator, Config, DispatchBuffers, Error, Group, Plan, Stream, TokenFormat,
    decode_rows,
};
use half::bf16;

const RANKS: usize = 4;
const EXPERTS: usize = 16;
const TOP_K: usize = 4;
const HIDDEN: usize = 256;
const INNER: usize = 64;
const TOKENS: usize = 24;
const LAYERS: usize = 3;

/// Largest error of a token's result: `|found - reference|` over `|reference|`. FP8 moves an element by at
/// most a 16th, and usually by less.
const BOUND: f64 = 1.0 / 16.0;

/// A rank's tokens and buffers.
struct RankState {
    x: Vec<bf16>,
    rows: DispatchBuffers,
    sums: CombineBuffers,
}

/// Makes the ranks, runs the layers and closes everything.
pub fn main() -> Result<(), Error> {
    let group = Group::simulated(RANKS as u32, 7)?;
    let config = Config {
        format: TokenFormat::BlockwiseFp8,
        ..Config::new(EXPERTS, TOP_K, HIDDEN, TOKENS)
    };
    let plan = Plan::new(&group, config)?;
    let mut ranks = Communicator::new(&group, &plan)?;
    let mut states = Vec::new();
    for (number, rank) in ranks.iter().enumerate() {
        // A different number of tokens on each rank.
        let x = random_tokens(number, TOKENS - number);
        let rows = DispatchBuffers::new(rank.device(), &plan)?;
        let sums = CombineBuffers::new(rank.device(), &plan)?;
        states.push(RankState { x, rows, sums });
    }
    for number in 0..LAYERS {
        let layer = Layer::random(number);
        let routes: Vec<_> = states.iter().map(|state| layer.route(&state.x)).collect();
        run(&layer, &routes, &mut ranks, &mut states)?;
        for ((rank, state), route) in ranks.iter().zip(&mut states).zip(&routes) {
            wait(rank)?;
            let y = state.sums.download(state.x.len() / HIDDEN)?;
            compare(&layer, &state.x, &y, route);
            add(&mut state.x, &y);
        }
    }
    Communicator::close_all(ranks)?;
    for RankState { rows, sums, .. } in states {
        // SAFETY: all ranks are closed, so no kernel uses their buffers.
        unsafe { rows.free().and(sums.free())? };
    }
    group.close()
}

/// Enqueues a layer on all ranks, each before any is waited for.
fn run(
    layer: &Layer,
    routes: &[Route],
    ranks: &mut [Communicator],
    states: &mut [RankState],
) -> Result<(), Error> {
    for ((rank, state), Route { ids, weights }) in ranks.iter_mut().zip(&mut *states).zip(routes) {
        let input = state.rows.upload(&state.x, ids, Some(weights))?;
        rank.dispatch(Stream::DEFAULT, &input, state.rows.output())?;
    }
    for (rank, state) in ranks.iter_mut().zip(states) {
        wait(rank)?;
        let received = state.rows.download()?;
        let values = decode_rows(rank.plan(), &received, None)?;
        let mut answers = vec![bf16::ZERO; values.len()];
        let first = rank.plan().first_expert(rank.rank());
        for group in 0..rank.plan().groups() {
            for row in received.rows_of(group) {
                let row = row * HIDDEN..(row + 1) * HIDDEN;
                answers[row.clone()].copy_from_slice(&layer.expert(first + group, &values[row]));
            }
        }
        let answers = state.sums.upload(state.rows.output(), &answers)?;
        let output = state.sums.output(state.x.len() / HIDDEN)?;
        rank.combine(Stream::DEFAULT, &answers, &output)?;
    }
    Ok(())
}

/// Waits for the work enqueued on a rank. After a fault of the input (an expert that does not exist) the
/// round goes on, and so must this rank, or the others wait for it in vain. All other errors end it.
fn wait(rank: &Communicator) -> Result<(), Error> {
    if let Some(fault) = rank.synchronize(Stream::DEFAULT)?.fault() {
        eprintln!("{fault}");
    }
    Ok(())
}

/// The experts of a rank's tokens: `[tokens, TOP_K]`.
struct Route {
    ids: Vec<i32>,
    weights: Vec<f32>,
}

/// A layer's weights, row by row.
struct Layer {
    /// `[EXPERTS, HIDDEN]`.
    router: Vec<f32>,
    /// `[EXPERTS, INNER, HIDDEN]`.
    up: Vec<f32>,
    /// `[EXPERTS, HIDDEN, INNER]`.
    down: Vec<f32>,
}

impl Layer {
    fn random(number: usize) -> Self {
        let mut random = Random::new(100 + number);
        let mut matrix = |elements: usize, columns: usize| -> Vec<f32> {
            let scale = 3.0 / (columns as f32).sqrt();
            (0..elements).map(|_| random.next() * scale).collect()
        };
        Self {
            router: matrix(EXPERTS * HIDDEN, HIDDEN),
            up: matrix(EXPERTS * INNER * HIDDEN, HIDDEN),
            down: matrix(EXPERTS * HIDDEN * INNER, INNER),
        }
    }

    /// The experts with the largest logits, weighted by a softmax over these.
    fn route(&self, x: &[bf16]) -> Route {
        let (mut ids, mut weights) = (Vec::new(), Vec::new());
        for token in x.chunks(HIDDEN) {
            let token: Vec<f32> = token.iter().map(|x| x.to_f32()).collect();
            let logits: Vec<f32> = (self.router.chunks(HIDDEN))
                .map(|of_expert| dot(of_expert, &token))
                .collect();
            let mut order: Vec<usize> = (0..EXPERTS).collect();
            order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
            let chosen = &order[..TOP_K];
            let exp = |expert: usize| (logits[expert] - logits[chosen[0]]).exp();
            let sum: f32 = chosen.iter().map(|&expert| exp(expert)).sum();
            ids.extend(chosen.iter().map(|&expert| expert as i32));
            weights.extend(chosen.iter().map(|&expert| exp(expert) / sum));
        }
        Route { ids, weights }
    }

    /// `down * silu(up * x)`, in f32.
    fn expert(&self, expert: usize, x: &[f32]) -> Vec<bf16> {
        let of_expert = expert * INNER * HIDDEN..(expert + 1) * INNER * HIDDEN;
        let inner: Vec<f32> = (self.up[of_expert.clone()].chunks(HIDDEN))
            .map(|row| dot(row, x))
            .map(|value| value / (1.0 + (-value).exp()))
            .collect();
        (self.down[of_expert].chunks(INNER))
            .map(|row| bf16::from_f32(dot(row, &inner)))
            .collect()
    }

    /// A token's weighted sum over the experts `id + shift`, in f64, from the unrounded token.
    fn reference(&self, token: &[bf16], ids: &[i32], weights: &[f32], shift: usize) -> Vec<f64> {
        let mut sum = vec![0.0; HIDDEN];
        for (&id, &weight) in ids.iter().zip(weights) {
            let expert = (id as usize + shift) % EXPERTS;
            let mut inner = [0.0; INNER];
            for (j, inner) in inner.iter_mut().enumerate() {
                let row = &self.up[(expert * INNER + j) * HIDDEN..][..HIDDEN];
                let products = row.iter().zip(token);
                let h: f64 = products.map(|(&a, x)| f64::from(a) * x.to_f64()).sum();
                *inner = h / (1.0 + (-h).exp());
            }
            for (i, sum) in sum.iter_mut().enumerate() {
                let row = &self.down[(expert * HIDDEN + i) * INNER..][..INNER];
                let products = row.iter().zip(inner);
                *sum += f64::from(weight) * products.map(|(&a, h)| f64::from(a) * h).sum::<f64>();
            }
        }
        sum
    }
}

/// Compares each token's result with the reference, and checks that other experts would be noticed.
fn compare(layer: &Layer, x: &[bf16], y: &[bf16], route: &Route) {
    assert_eq!(x.len(), y.len());
    let mut worst = 0.0_f64;
    for (token, x) in x.chunks(HIDDEN).enumerate() {
        let ids = &route.ids[token * TOP_K..][..TOP_K];
        let weights = &route.weights[token * TOP_K..][..TOP_K];
        let found = &y[token * HIDDEN..][..HIDDEN];
        let error = |shift| distance(found, &layer.reference(x, ids, weights, shift));
        assert!(error(0) < BOUND, "token {token}: error {}", error(0));
        assert!(
            error(1) > BOUND,
            "token {token}: other experts give the same"
        );
        worst = worst.max(error(0));
    }
    println!("{} tokens, largest error {worst:.4}", x.len() / HIDDEN);
}

fn distance(found: &[bf16], wanted: &[f64]) -> f64 {
    let square: f64 = wanted.iter().map(|x| x * x).sum();
    let pairs = found.iter().zip(wanted);
    let error: f64 = pairs.map(|(y, x)| (y.to_f64() - x).powi(2)).sum();
    (error / square).sqrt()
}

fn add(x: &mut [bf16], y: &[bf16]) {
    for (x, y) in x.iter_mut().zip(y) {
        *x = bf16::from_f32(x.to_f32() + y.to_f32());
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn random_tokens(seed: usize, tokens: usize) -> Vec<bf16> {
    let mut random = Random::new(seed);
    (0..tokens * HIDDEN)
        .map(|_| bf16::from_f32(random.next()))
        .collect()
}

/// Knuth's MMIX generator.
struct Random(u64);

impl Random {
    fn new(seed: usize) -> Self {
        Self(0x9e37_79b9_7f4a_7c15 ^ seed as u64)
    }

    /// Next number, from -1 to 1.
    fn next(&mut self) -> f32 {
        self.0 = (self.0)
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}
