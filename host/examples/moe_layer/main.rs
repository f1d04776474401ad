//! A mixture-of-experts layer on all GPUs of this machine, in cudarc's memory: router, dispatch, experts,
//! combine. Some tokens' results are compared with f64.
//!
//! ```sh
//! cargo run --release -p ferry-ep --example moe_layer --features cudarc
//! ```
//! One thread enqueues for all ranks, a GPU each; a thread or a process a rank works as well. cuBLAS and
//! NVRTC are loaded at run time. `ferry-tests bench --only layer` times such a layer beside NCCL.

use std::ops::Range;
use std::sync::Arc;

use anyhow::{Result, bail, ensure};
use cudarc::cublas::{CudaBlas, Gemm, GemmConfig, sys::cublasOperation_t};
use cudarc::driver::{
    CudaContext, CudaFunction, CudaSlice, CudaStream, LaunchConfig, PushKernelArg,
};
use cudarc::nvrtc::compile_ptx;
use ferry::{
    Activation, CombineInput, CombineOutput, Communicator, Config, DispatchInput, DispatchOutput,
    FusedSilu, Group, GroupOptions, Lease, Plan, TokenFormat,
};
use half::bf16;

/// Experts of a rank.
const LOCAL: usize = 8;
const TOP_K: usize = 4;
/// Tokens of a rank.
const TOKENS: usize = 512;
const HIDDEN: usize = 2048;
/// Values between an expert's two products.
const INNER: usize = 1024;
/// Largest `|y - f64| / |f64|` of a token, in BF16.
const BOUND: f64 = 1.0 / 128.0;

fn main() -> Result<()> {
    let devices: Vec<_> = (0..ferry::cuda::device_count()?).collect();
    let group = Group::local(&devices, &GroupOptions::default())?;
    let config = Config::new(LOCAL * devices.len(), TOP_K, HIDDEN, TOKENS);
    let plan = Plan::new(&group, config)?;
    let ranks = Communicator::new(&group, &plan)?.into_iter();
    let mut layers = ranks.map(Layer::new).collect::<Result<Vec<_>>>()?;
    // Every step is enqueued on all ranks before the next one. cuBLAS loads its kernels with the first
    // products, which may wait for kernels at work: so none that waits for its peers may be among them.
    layers.iter_mut().try_for_each(Layer::route)?;
    layers.iter_mut().try_for_each(Layer::dispatch)?;
    layers.iter_mut().try_for_each(Layer::multiply)?;
    layers.iter_mut().try_for_each(Layer::combine)?;
    for layer in &layers {
        for token in [0, TOKENS / 2] {
            let error = layer.error(token)?;
            println!("rank {}, token {token}: error {error:.1e}", layer.rank);
            ensure!(error <= BOUND, "more than {BOUND:.1e}");
        }
    }
    let mut ranks = layers.into_iter().map(|layer| layer.communicator);
    ranks.try_for_each(|rank| Ok(rank.close()?))
}

/// Matrices of numbers ([`number`]): `[ranks * TOKENS, HIDDEN]`, `[experts, HIDDEN]`, `[experts,
/// 2 * INNER, HIDDEN]` with gates before ups, `[experts, HIDDEN, INNER]`.
#[derive(Clone, Copy)]
enum Kind {
    X,
    Router,
    GateUp,
    Down,
}

/// A random number between -√3 and √3, over √`columns`.
fn number(kind: Kind, columns: usize, index: usize) -> bf16 {
    let mut bits = (index as u64 | (kind as u64) << 60).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    let unit = (bits >> 40) as f32 / (1 << 23) as f32 - 1.0;
    bf16::from_f32(unit * (3.0 / columns as f32).sqrt())
}

/// A rank's side of the layer, on one stream.
struct Layer {
    rank: usize,
    communicator: Communicator,
    stream: Arc<CudaStream>,
    blas: CudaBlas,
    route: CudaFunction,
    x: CudaSlice<bf16>,
    router: CudaSlice<bf16>,
    gate_up_weights: CudaSlice<bf16>,
    down_weights: CudaSlice<bf16>,
    logits: CudaSlice<bf16>,
    topk_ids: CudaSlice<i32>,
    topk_weights: CudaSlice<f32>,
    /// Rows of dispatch: as many as any routing brings.
    capacity: usize,
    rows: CudaSlice<bf16>,
    row_offsets: CudaSlice<u32>,
    expert_ids: CudaSlice<i32>,
    src_info: CudaSlice<i32>,
    gate_up: CudaSlice<bf16>,
    activated: CudaSlice<bf16>,
    expert_rows: CudaSlice<bf16>,
    y: CudaSlice<bf16>,
}

impl Layer {
    fn new(communicator: Communicator) -> Result<Self> {
        let (rank, plan) = (communicator.rank().0 as usize, *communicator.plan());
        let (capacity, experts) = (plan.max_rows(), plan.config().experts);
        let context = CudaContext::new(rank)?;
        let stream = context.new_stream()?;
        let numbers = |kind, columns: usize, spread: usize, rows: Range<usize>| {
            let all = rows.start * columns..rows.end * columns;
            let all: Vec<_> = all.map(|index| number(kind, spread, index)).collect();
            stream.clone_htod(&all)
        };
        let own = |rows: usize| rank * rows..(rank + 1) * rows;
        let module = context.load_module(compile_ptx(include_str!("route.cu"))?)?;
        Ok(Self {
            x: numbers(Kind::X, HIDDEN, 1, own(TOKENS))?,
            router: numbers(Kind::Router, HIDDEN, HIDDEN, 0..experts)?,
            gate_up_weights: numbers(Kind::GateUp, HIDDEN, HIDDEN, own(LOCAL * 2 * INNER))?,
            down_weights: numbers(Kind::Down, INNER, INNER, own(LOCAL * HIDDEN))?,
            logits: stream.alloc_zeros(TOKENS * experts)?,
            topk_ids: stream.alloc_zeros(TOKENS * TOP_K)?,
            topk_weights: stream.alloc_zeros(TOKENS * TOP_K)?,
            rows: stream.alloc_zeros(capacity * HIDDEN)?,
            row_offsets: stream.alloc_zeros(LOCAL + 1)?,
            expert_ids: stream.alloc_zeros(LOCAL)?,
            src_info: stream.alloc_zeros(capacity * 2)?,
            gate_up: stream.alloc_zeros(capacity * 2 * INNER)?,
            activated: stream.alloc_zeros(capacity * INNER)?,
            expert_rows: stream.alloc_zeros(capacity * HIDDEN)?,
            y: stream.alloc_zeros(TOKENS * HIDDEN)?,
            route: module.load_function("route")?,
            blas: CudaBlas::new(stream.clone())?,
            rank,
            communicator,
            stream,
            capacity,
        })
    }

    /// Chooses each token's experts and their weights.
    fn route(&mut self) -> Result<()> {
        let experts = self.communicator.plan().config().experts;
        let (router, x, out) = (&self.router, &self.x, &mut self.logits);
        products(
            &self.blas,
            [experts, HIDDEN],
            router,
            x,
            out,
            &[0, TOKENS as u32],
        )?;
        let [tokens, experts, top_k] = [TOKENS, experts, TOP_K].map(|size| size as i64);
        let mut launch = self.stream.launch_builder(&self.route);
        launch.arg(&self.logits).arg(&tokens).arg(&experts);
        launch.arg(&top_k).arg(&mut self.topk_ids);
        launch.arg(&mut self.topk_weights);
        // SAFETY: the slices have the sizes that the kernel is told; a warp has a token.
        unsafe { launch.launch(LaunchConfig::for_num_elems(32 * tokens as u32)) }?;
        Ok(())
    }

    /// Brings tokens to their experts' ranks, in the order of experts.
    fn dispatch(&mut self) -> Result<()> {
        // SAFETY: its tensors are used until it is dropped, and no graph is captured.
        let mut lease = unsafe { Lease::new(self.communicator.device(), &self.stream)? };
        let input = DispatchInput {
            topk_weights: Some(lease.tensor(&self.topk_weights, [TOKENS, TOP_K])?),
            ..DispatchInput::new(
                lease.tensor(&self.x, [TOKENS, HIDDEN])?,
                lease.tensor(&self.topk_ids, [TOKENS, TOP_K])?,
            )
        };
        let output = DispatchOutput::by_expert(
            lease.tensor(&mut self.rows, [self.capacity, HIDDEN])?,
            lease.tensor(&mut self.row_offsets, [LOCAL + 1])?,
            lease.tensor(&mut self.expert_ids, [LOCAL])?,
            lease.tensor(&mut self.src_info, [self.capacity, 2])?,
        );
        Ok((self.communicator).dispatch(lease.stream(), &input, &output)?)
    }

    /// Lets the experts work: gates and ups, SiLU, and the product that leads back. cuBLAS takes the number
    /// of each expert's rows from the host.
    fn multiply(&mut self) -> Result<()> {
        let offsets = self.stream.clone_dtoh(&self.row_offsets)?;
        let (weights, x, out) = (&self.gate_up_weights, &self.rows, &mut self.gate_up);
        products(&self.blas, [2 * INNER, HIDDEN], weights, x, out, &offsets)?;
        // SAFETY: as in `dispatch`.
        let mut lease = unsafe { Lease::new(self.communicator.device(), &self.stream)? };
        let silu = FusedSilu {
            input: lease.tensor(&self.gate_up, [self.capacity, 2 * INNER])?,
            interleaved: false,
            row_offsets: lease.tensor(&self.row_offsets, [LOCAL + 1])?,
            activation: Activation::Silu,
            format: TokenFormat::Bf16,
            input_scales: None,
            output: lease.tensor(&mut self.activated, [self.capacity, INNER])?,
            scales: None,
        };
        let device = self.communicator.device();
        device.fused_silu(lease.stream(), &silu, None)?;
        drop(lease);
        let (weights, x, out) = (&self.down_weights, &self.activated, &mut self.expert_rows);
        products(&self.blas, [HIDDEN, INNER], weights, x, out, &offsets)
    }

    /// Brings the experts' rows back to their tokens, weighted and summed.
    fn combine(&mut self) -> Result<()> {
        // SAFETY: as in `dispatch`.
        let mut lease = unsafe { Lease::new(self.communicator.device(), &self.stream)? };
        let rows = CombineInput::new(lease.tensor(&self.expert_rows, [self.capacity, HIDDEN])?);
        let sums = CombineOutput::Summed(lease.tensor(&mut self.y, [TOKENS, HIDDEN])?);
        Ok((self.communicator).combine(lease.stream(), &rows, &sums)?)
    }

    /// Waits, and returns the error of a token.
    fn error(&self, token: usize) -> Result<f64> {
        self.stream.synchronize()?;
        if let Some(fault) = self.communicator.check()?.fault() {
            bail!("{fault}");
        }
        let chosen = token * TOP_K..(token + 1) * TOP_K;
        let ids = self
            .stream
            .clone_dtoh(&self.topk_ids.slice(chosen.clone()))?;
        let weights = self.stream.clone_dtoh(&self.topk_weights.slice(chosen))?;
        let y = self.stream.clone_dtoh(&self.y.slice(token * HIDDEN..))?;
        let wanted = reference(self.rank * TOKENS + token, &ids, &weights);
        let square: f64 = wanted.iter().map(|wanted| wanted * wanted).sum();
        let apart = y.iter().zip(&wanted).map(|(y, f64)| y.to_f64() - f64);
        Ok((apart.map(|apart| apart * apart).sum::<f64>() / square).sqrt())
    }
}

/// A token's result in f64, with these experts and weights.
fn reference(token: usize, experts: &[i32], weights: &[f32]) -> Vec<f64> {
    let times = |kind, row: usize, x: &[f64]| -> f64 {
        let weight = |column| number(kind, x.len(), row * x.len() + column).to_f64();
        x.iter().enumerate().map(|(i, x)| weight(i) * x).sum()
    };
    let x = |i| number(Kind::X, 1, token * HIDDEN + i).to_f64();
    let x: Vec<f64> = (0..HIDDEN).map(x).collect();
    let mut y = vec![0.0; HIDDEN];
    for (&expert, &weight) in experts.iter().zip(weights) {
        let first = expert as usize * 2 * INNER;
        let activated = |row: usize| {
            let gate = times(Kind::GateUp, row, &x);
            gate / (1.0 + (-gate).exp()) * times(Kind::GateUp, row + INNER, &x)
        };
        let activated: Vec<_> = (first..first + INNER).map(activated).collect();
        for (i, y) in y.iter_mut().enumerate() {
            let row = expert as usize * HIDDEN + i;
            *y += f64::from(weight) * times(Kind::Down, row, &activated);
        }
    }
    y
}

/// Enqueues `out[rows, n] = x[rows, k] · weights[n, k]ᵀ` for each expert, whose rows `offsets` bound. To
/// cuBLAS, row-major matrices are transposed.
fn products(
    blas: &CudaBlas,
    [n, k]: [usize; 2],
    weights: &CudaSlice<bf16>,
    x: &CudaSlice<bf16>,
    out: &mut CudaSlice<bf16>,
    offsets: &[u32],
) -> Result<()> {
    for (expert, ends) in offsets.windows(2).enumerate() {
        let [first, end] = [ends[0] as usize, ends[1] as usize];
        if first == end {
            continue;
        }
        let config = GemmConfig {
            transa: cublasOperation_t::CUBLAS_OP_T,
            transb: cublasOperation_t::CUBLAS_OP_N,
            m: n as i32,
            n: (end - first) as i32,
            k: k as i32,
            alpha: bf16::ONE,
            lda: k as i32,
            ldb: k as i32,
            beta: bf16::ZERO,
            ldc: n as i32,
        };
        let weights = weights.slice(expert * n * k..(expert + 1) * n * k);
        let (x, mut out) = (
            x.slice(first * k..end * k),
            out.slice_mut(first * n..end * n),
        );
        // SAFETY: the views have as many elements as the product reads and writes.
        unsafe { blas.gemm(config, &weights, &x, &mut out) }?;
    }
    Ok(())
}
