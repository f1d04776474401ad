//! One rank's side of the layer, on one stream: router, dispatch, experts, combine.

use std::sync::Arc;

use anyhow::{Context, Result, bail};
use cudarc::driver::result::memcpy_dtoh_async;
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr as _};
use ferry::cuda::CudaDevice;
use ferry::{
    Activation, CombineInput, CombineOutput, Communicator, DataType, Device, DispatchBuffers,
    DispatchInput, FusedSilu, Lease, ScaleTensor, Stream, Tensor, TokenFormat,
};
use half::bf16;

use super::clock::Clock;
use super::experts::Experts;
use super::gemm::{Bf16Gemm, Product, Rows};
use super::nccl::Nccl;
use super::reference::Sample;
use super::router::choose;
use super::weights::{BLOCK, Kind, Matrices};
use super::{Job, Shape};

/// What a rank found.
pub struct Outcome {
    /// For each step that was timed, the milliseconds of each stage.
    pub times: Vec<Vec<f32>>,
    pub samples: Vec<Sample>,
}

/// A rank.
pub struct Layer<'a> {
    job: &'a Job<'a>,
    rank: usize,
    device: Arc<CudaDevice>,
    ferry: Communicator,
    nccl: Option<&'a mut Nccl>,
    stream: Arc<CudaStream>,
    router: Bf16Gemm,
    experts: Experts,
    memory: Memory,
    rows: DispatchBuffers,
    /// The router's choice: `[tokens, top_k]`.
    chosen: (Vec<i32>, Vec<f32>),
    logits: Vec<f32>,
    offsets: Vec<u32>,
}

/// What lies on the GPU.
struct Memory {
    x: CudaSlice<bf16>,
    router: CudaSlice<bf16>,
    logits: CudaSlice<f32>,
    topk_ids: CudaSlice<i32>,
    topk_weights: CudaSlice<f32>,
    /// The same of all ranks, where NCCL carries tokens.
    all: Option<AllTokens>,
    /// `[capacity, 2 * intermediate]`.
    gate_up: CudaSlice<bf16>,
    /// `[capacity, intermediate]` in the format, and its scales.
    activated: CudaSlice<u8>,
    activated_scales: CudaSlice<f32>,
    /// `[capacity, hidden]`.
    expert_rows: CudaSlice<bf16>,
    y: CudaSlice<bf16>,
}

struct AllTokens {
    x: CudaSlice<bf16>,
    topk_ids: CudaSlice<i32>,
    topk_weights: CudaSlice<f32>,
    /// What this rank's experts add to each token.
    sums: CudaSlice<bf16>,
}

impl Memory {
    fn new(stream: &Arc<CudaStream>, job: &Job<'_>, rank: usize, capacity: usize) -> Result<Self> {
        let Shape {
            tokens,
            hidden,
            intermediate,
            experts,
            top_k,
            ranks,
            ..
        } = job.shape;
        let matrices = |kind, number: usize, rows| Matrices {
            kind,
            numbers: number..number + 1,
            dims: [rows, hidden],
        };
        let all = || -> Result<AllTokens> {
            let tokens = ranks * tokens;
            Ok(AllTokens {
                x: stream.alloc_zeros(tokens * hidden)?,
                topk_ids: stream.alloc_zeros(tokens * top_k)?,
                topk_weights: stream.alloc_zeros(tokens * top_k)?,
                sums: stream.alloc_zeros(tokens * hidden)?,
            })
        };
        Ok(Self {
            x: job.tiles.bf16(stream, &matrices(Kind::X, rank, tokens))?,
            router: job
                .tiles
                .bf16(stream, &matrices(Kind::Router, 0, experts))?,
            logits: stream.alloc_zeros(tokens * experts)?,
            topk_ids: stream.alloc_zeros(tokens * top_k)?,
            topk_weights: stream.alloc_zeros(tokens * top_k)?,
            all: if job.way.is_nccl() {
                Some(all()?)
            } else {
                None
            },
            gate_up: stream.alloc_zeros(capacity * 2 * intermediate)?,
            activated: stream.alloc_zeros(capacity * intermediate * job.format.bytes())?,
            activated_scales: stream.alloc_zeros(capacity * intermediate.div_ceil(BLOCK))?,
            expert_rows: stream.alloc_zeros(capacity * hidden)?,
            y: stream.alloc_zeros(tokens * hidden)?,
        })
    }
}

impl<'a> Layer<'a> {
    pub fn new(
        job: &'a Job<'a>,
        device: Arc<CudaDevice>,
        ferry: Communicator,
        nccl: Option<&'a mut Nccl>,
    ) -> Result<Self> {
        let (rank, plan) = (ferry.rank().0 as usize, *ferry.plan());
        let context = CudaContext::new(device.ordinal())?;
        // SAFETY: one stream allocates, uses and frees all memory of cudarc on this device.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream()?;
        let rows = DispatchBuffers::new(ferry.device(), &plan)?;
        // Rows that pad an expert's are multiplied, too: with numbers.
        rows.fill(0)?;
        let (groups, capacity) = (plan.groups(), rows.output().tokens.dims[0]);
        Ok(Self {
            job,
            rank,
            router: Bf16Gemm::new(&stream, 1)?,
            experts: Experts::new(&stream, job, rank, capacity)?,
            memory: Memory::new(&stream, job, rank, capacity)?,
            logits: vec![0.0; job.shape.tokens * job.shape.experts],
            offsets: vec![0; groups + 1],
            chosen: Default::default(),
            device,
            ferry,
            nccl,
            stream,
            rows,
        })
    }

    /// Runs all steps, and closes the communicator. Collective.
    pub fn run(mut self) -> Result<Outcome> {
        let mut times = Vec::new();
        let mut clock = Clock::new(&self.device, self.job.stages().len())?;
        for step in 0..self.job.warm_up + self.job.iterations {
            self.job.meeting.wait()?;
            self.step(&mut clock)?;
            self.stream.synchronize()?;
            if step >= self.job.warm_up {
                times.push(clock.milliseconds()?);
            }
        }
        if let Some(fault) = self.ferry.check()? {
            bail!("{fault}");
        }
        let samples = self.samples()?;
        // Closing waits for all.
        self.job.meeting.wait()?;
        self.ferry.close()?;
        Ok(Outcome { times, samples })
    }

    fn step(&mut self, clock: &mut Clock) -> Result<()> {
        // SAFETY: the stream lives as long as this rank, which captures no graph.
        let stream = unsafe { Stream::new(self.stream.cu_stream().addr() as u64) };
        clock.start(stream)?;
        self.route(clock, stream)?;
        if self.nccl.is_some() {
            self.gather()?;
            clock.mark(stream)?;
        }
        self.round(clock, stream)?;
        if self.nccl.is_some() {
            self.scatter()?;
            clock.mark(stream)?;
        }
        Ok(())
    }

    /// The router's product, and its choice, which is made on the host. Two stages.
    fn route(&mut self, clock: &mut Clock, stream: Stream) -> Result<()> {
        let Shape {
            tokens,
            hidden,
            experts,
            top_k,
            ..
        } = self.job.shape;
        let memory = &mut self.memory;
        let [weights, x] =
            [&memory.router, &memory.x].map(|slice| slice.device_ptr(&self.stream).0);
        let logits = memory.logits.device_ptr(&self.stream).0;
        let product = Product {
            n: experts,
            k: hidden,
            weights,
            weight_scales: 0,
        };
        // SAFETY: the slices have these sizes, and one stream.
        unsafe { self.router.logits(&product, tokens, x, logits)? };
        clock.mark(stream)?;
        self.stream.memcpy_dtoh(&memory.logits, &mut self.logits)?;
        self.stream.synchronize()?;
        self.chosen = choose(&self.logits, experts, top_k);
        self.stream
            .memcpy_htod(&self.chosen.0, &mut memory.topk_ids)?;
        self.stream
            .memcpy_htod(&self.chosen.1, &mut memory.topk_weights)?;
        // So that no rank's dispatch waits for another one's choice.
        self.stream.synchronize()?;
        self.job.meeting.wait()?;
        clock.mark(stream)
    }

    /// Dispatch, the experts, combine: six stages.
    fn round(&mut self, clock: &mut Clock, stream: Stream) -> Result<()> {
        let Shape {
            tokens,
            hidden,
            intermediate,
            top_k,
            ranks,
            ..
        } = self.job.shape;
        let (memory, format) = (&mut self.memory, self.job.format.token_format());
        let capacity = self.rows.output().tokens.dims[0];
        // SAFETY: its tensors are used until it is dropped; no graph is captured.
        let mut lease = unsafe { Lease::new(self.ferry.device(), &self.stream)? };
        let (tokens, x, ids, weights, y) = match &mut memory.all {
            None => (
                tokens,
                &memory.x,
                &memory.topk_ids,
                &memory.topk_weights,
                &mut memory.y,
            ),
            Some(all) => (
                ranks * tokens,
                &all.x,
                &all.topk_ids,
                &all.topk_weights,
                &mut all.sums,
            ),
        };
        let input = DispatchInput {
            topk_weights: Some(lease.tensor(weights, [tokens, top_k])?),
            ..DispatchInput::new(
                lease.tensor(x, [tokens, hidden])?,
                lease.tensor(ids, [tokens, top_k])?,
            )
        };
        let output = *self.rows.output();
        self.ferry.dispatch(stream, &input, &output)?;
        clock.mark(stream)?;

        download(&mut self.offsets, &output.row_offsets, &self.stream)?;
        clock.mark(stream)?;

        let mut rows = Rows {
            at: output.tokens.at.address(),
            scales: scales_at(output.scales),
            capacity,
            offsets: &self.offsets,
        };
        let gate_up = lease.tensor(&mut memory.gate_up, [capacity, 2 * intermediate])?;
        // SAFETY: rows, weights and output are of these sizes, of this stream.
        unsafe { self.experts.gate_up(&rows, gate_up.at.address())? };
        clock.mark(stream)?;

        let bytes = memory.activated.len();
        let at = lease.tensor(&mut memory.activated, [bytes])?.at;
        let columns = [capacity, intermediate];
        let activated = Tensor::contiguous(at, DataType::of_tokens(format), columns);
        let scales = activated_scales(&mut lease, &mut memory.activated_scales, &activated)?;
        let silu = activation(gate_up, output.row_offsets, format, activated, scales);
        let device: &dyn Device = &*self.device;
        device.fused_silu(stream, &silu, None)?;
        clock.mark(stream)?;

        (rows.at, rows.scales) = (activated.at.address(), scales_at(scales));
        let expert_rows = lease.tensor(&mut memory.expert_rows, [capacity, hidden])?;
        // SAFETY: as above.
        unsafe { self.experts.down(&rows, expert_rows.at.address())? };
        clock.mark(stream)?;

        let sums = CombineOutput::Summed(lease.tensor(y, [tokens, hidden])?);
        self.ferry
            .combine(stream, &CombineInput::new(expert_rows), &sums)?;
        clock.mark(stream)
    }

    /// All ranks' tokens, through NCCL.
    fn gather(&mut self) -> Result<()> {
        let (stream, memory) = (&self.stream, &self.memory);
        let (nccl, all) = (self.nccl.as_ref(), memory.all.as_ref());
        let (nccl, all) = nccl.zip(all).context("NCCL carries tokens")?;
        let pairs = [
            pair(stream, &memory.x, &all.x),
            pair(stream, &memory.topk_ids, &all.topk_ids),
            pair(stream, &memory.topk_weights, &all.topk_weights),
        ];
        // SAFETY: of the second slices each has the first's bytes for every rank.
        unsafe { nccl.all_gather(&pairs, stream.cu_stream().cast()) }
    }

    /// The sum of what all ranks' experts add to this rank's tokens, through NCCL.
    fn scatter(&mut self) -> Result<()> {
        let (stream, memory) = (&self.stream, &self.memory);
        let (nccl, all) = (self.nccl.as_ref(), memory.all.as_ref());
        let (nccl, all) = nccl.zip(all).context("NCCL carries tokens")?;
        let (sums, y, _) = pair(stream, &all.sums, &memory.y);
        // SAFETY: `sums` has the elements of `y` for every rank.
        unsafe { nccl.reduce_scatter(sums, y, memory.y.len(), stream.cu_stream().cast()) }
    }

    /// Some tokens' results, spread over all.
    fn samples(&self) -> Result<Vec<Sample>> {
        let Shape {
            tokens,
            hidden,
            top_k,
            ..
        } = self.job.shape;
        let count = self.job.samples.min(tokens);
        let sample = |index: usize| {
            let token = index * tokens / count;
            let y = self
                .stream
                .clone_dtoh(&self.memory.y.slice(token * hidden..(token + 1) * hidden))?;
            let entries = token * top_k..(token + 1) * top_k;
            Ok(Sample {
                rank: self.rank,
                token,
                experts: self.chosen.0[entries.clone()].to_vec(),
                weights: self.chosen.1[entries].to_vec(),
                y: y.iter().map(|y| y.to_f64()).collect(),
            })
        };
        (0..count).map(sample).collect()
    }
}

/// Copies the offsets to the host, and waits.
fn download(offsets: &mut [u32], from: &Tensor<1>, stream: &CudaStream) -> Result<()> {
    // SAFETY: there are as many offsets, and `offsets` is borrowed until the stream was synchronised.
    unsafe { memcpy_dtoh_async(offsets, from.at.address(), stream.cu_stream()) }?;
    Ok(stream.synchronize()?)
}

/// SiLU of the gates times the ups.
fn activation(
    gate_up: Tensor<2>,
    row_offsets: Tensor<1>,
    format: TokenFormat,
    output: Tensor<2>,
    scales: Option<ScaleTensor>,
) -> FusedSilu {
    FusedSilu {
        input: gate_up,
        interleaved: false,
        row_offsets,
        activation: Activation::Silu,
        format,
        input_scales: None,
        output,
        scales,
    }
}

/// Addresses of both, and the bytes of the first.
fn pair<T>(
    stream: &Arc<CudaStream>,
    first: &CudaSlice<T>,
    second: &CudaSlice<T>,
) -> (u64, u64, usize) {
    (
        first.device_ptr(stream).0,
        second.device_ptr(stream).0,
        first.num_bytes(),
    )
}

fn scales_at(scales: Option<ScaleTensor>) -> u64 {
    match scales {
        Some(ScaleTensor::Transposed(scales)) => scales.at.address(),
        _ => 0,
    }
}

/// Where the activation's scales go, in the format that has some.
fn activated_scales<'a>(
    lease: &mut Lease<'a, Arc<CudaStream>>,
    memory: &'a mut CudaSlice<f32>,
    activated: &Tensor<2>,
) -> Result<Option<ScaleTensor>> {
    let [capacity, columns] = activated.dims;
    if activated.data_type == DataType::Bf16 {
        return Ok(None);
    }
    let scales = lease.tensor(memory, [columns / BLOCK, capacity])?;
    Ok(Some(ScaleTensor::Transposed(scales)))
}
