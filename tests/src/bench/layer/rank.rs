//! One rank's side of a layer, on one stream.

use std::sync::Arc;

use anyhow::{Context, Result, bail};
use ferry::DataType::{self, Bf16, E4m3, F32, I32};
use ferry::cuda::{CudaDevice, CudaGraph};
use ferry::{
    Activation, CombineInput, CombineOutput, Communicator, Device, DevicePtr, DispatchBuffers,
    DispatchInput, FusedSilu, ScaleTensor, Stream, Tensor,
};

use super::gemm::{Gemm, Product};
use super::kernels::{Kernels, THREADS};
use super::numbers::{Matrix, Sample, scale_columns};
use super::settings::{BLOCK, Settings, Stage};
use crate::bench::nccl::Comm;

/// A rank. Its tensors are as they are named in [`Matrix`] and in Ferry's arguments.
pub struct Rank {
    settings: Settings,
    number: usize,
    device: Arc<CudaDevice>,
    stream: Stream,
    communicator: Communicator,
    pub comm: Option<Comm>,
    kernels: Kernels,
    gemm: Gemm,
    /// Memory to free.
    held: Vec<DevicePtr>,
    x: Tensor<2>,
    router: Tensor<2>,
    logits: Tensor<2>,
    /// This rank's tokens as they are carried.
    own: Tokens,
    /// All ranks' tokens, and the sums of this rank's experts, if NCCL carries tokens.
    all: Option<(Tokens, Tensor<2>)>,
    rows: DispatchBuffers,
    /// Weights of both products, scales of their blocks, and of rows without gaps.
    weights: [Tensor<2>; 2],
    weight_scales: Option<[Tensor<2>; 2]>,
    packed: Tensor<2>,
    gate_up: Tensor<2>,
    activated: Tensor<2>,
    activated_scales: Option<ScaleTensor>,
    expert_rows: Tensor<2>,
    y: Tensor<2>,
    /// Both products of the rows that were captured.
    graphs: Option<[CudaGraph; 2]>,
}

/// Tokens as dispatch gets them.
#[derive(Clone, Copy)]
struct Tokens {
    /// BF16, or codes with scales beside them.
    x: Tensor<2>,
    x_scales: Option<Tensor<2>>,
    topk_ids: Tensor<2>,
    topk_weights: Tensor<2>,
}

impl Tokens {
    fn tensors(&self) -> impl Iterator<Item = Tensor<2>> {
        let tensors = [
            Some(self.x),
            self.x_scales,
            Some(self.topk_ids),
            Some(self.topk_weights),
        ];
        tensors.into_iter().flatten()
    }
}

/// Memory of a device, allocated piece by piece.
struct Memory<'a> {
    device: &'a CudaDevice,
    held: Vec<DevicePtr>,
}

/// Weights of both products, and the scales of their blocks.
type Weights = ([Tensor<2>; 2], Option<[Tensor<2>; 2]>);

impl Memory<'_> {
    fn tensor(&mut self, data_type: DataType, dims: [usize; 2]) -> Result<Tensor<2>> {
        let tensor = Tensor::contiguous(DevicePtr::NULL, data_type, dims);
        let at = self.device.alloc(tensor.bytes())?;
        self.held.push(at);
        Ok(Tensor { at, ..tensor })
    }

    /// This rank's tokens as they are carried, where `x` is BF16; and if NCCL carries them, all ranks' and
    /// the sums of this rank's experts.
    fn carried(
        &mut self,
        settings: &Settings,
        x: Tensor<2>,
    ) -> Result<(Tokens, Option<(Tokens, Tensor<2>)>)> {
        let Settings {
            ranks,
            tokens,
            hidden,
            top_k,
            ..
        } = *settings;
        let mut of = |tokens, x| {
            let (x, x_scales) = match x {
                Some(x) => (x, None),
                None if settings.encodes() => {
                    let codes =
                        self.tensor(DataType::of_tokens(settings.format), [tokens, hidden])?;
                    (codes, Some(self.tensor(F32, [tokens, hidden / BLOCK])?))
                }
                None => (self.tensor(Bf16, [tokens, hidden])?, None),
            };
            anyhow::Ok(Tokens {
                x,
                x_scales,
                topk_ids: self.tensor(I32, [tokens, top_k])?,
                topk_weights: self.tensor(F32, [tokens, top_k])?,
            })
        };
        let own = of(tokens, (!settings.encodes()).then_some(x))?;
        if !settings.nccl {
            return Ok((own, None));
        }
        let all = of(ranks * tokens, None)?;
        let sums = self.tensor(Bf16, [ranks * tokens, hidden])?;
        Ok((own, Some((all, sums))))
    }

    /// The weights of a rank's experts.
    fn weights(
        &mut self,
        kernels: &Kernels,
        settings: &Settings,
        number: usize,
    ) -> Result<Weights> {
        let local = settings.experts / settings.ranks;
        let (hidden, inner, seed) = (settings.hidden, settings.intermediate, settings.seed);
        let mut filled = |data_type, matrix, [rows, columns]: [usize; 2]| {
            let tensor = self.tensor(data_type, [rows, columns])?;
            kernels.fill(tensor, matrix, number * rows, seed)
        };
        let element = DataType::of_tokens(settings.format);
        let gate_up = filled(element, Matrix::GateUp, [local * 2 * inner, hidden])?;
        let down = filled(element, Matrix::Down, [local * hidden, inner])?;
        if element == Bf16 {
            return Ok(([gate_up, down], None));
        }
        let blocks = |of: Tensor<2>| [of.dims[0] / BLOCK, scale_columns(of.dims[1])];
        let of_gate_up = filled(F32, Matrix::GateUpScales, blocks(gate_up))?;
        let of_down = filled(F32, Matrix::DownScales, blocks(down))?;
        Ok(([gate_up, down], Some([of_gate_up, of_down])))
    }
}

impl Rank {
    /// Fills weights and tokens.
    pub fn new(
        settings: Settings,
        device: Arc<CudaDevice>,
        stream: Stream,
        communicator: Communicator,
        comm: Option<Comm>,
    ) -> Result<Self> {
        let Settings {
            tokens,
            hidden,
            intermediate,
            experts,
            seed,
            ..
        } = settings;
        let number = communicator.rank().0 as usize;
        let kernels = Kernels::new(&device, stream, settings.format)?;
        let rows = DispatchBuffers::new(communicator.device(), communicator.plan())?;
        // Rows that pad an expert's are multiplied, too: with numbers.
        rows.fill(0)?;
        let mut memory = Memory {
            device: &device,
            held: Vec::new(),
        };
        let (element, capacity) = (
            DataType::of_tokens(settings.format),
            rows.output().src_info.dims[0],
        );
        let (weights, weight_scales) = memory.weights(&kernels, &settings, number)?;
        let mut alloc = |data_type, dims| memory.tensor(data_type, dims);
        let mut activated_scales = None;
        if element == E4m3 {
            let scales = alloc(F32, [intermediate / BLOCK, capacity])?;
            activated_scales = Some(ScaleTensor::Transposed(scales));
        }
        let x = alloc(Bf16, [tokens, hidden])?;
        let router = alloc(Bf16, [experts, hidden])?;
        let x = kernels.fill(x, Matrix::X, number * tokens, seed)?;
        let (own, all) = memory.carried(&settings, x)?;
        let mut alloc = |data_type, dims| memory.tensor(data_type, dims);
        Ok(Self {
            router: kernels.fill(router, Matrix::Router, 0, seed)?,
            logits: alloc(Bf16, [tokens, experts])?,
            packed: alloc(F32, [capacity, hidden.max(intermediate) / BLOCK])?,
            gate_up: alloc(Bf16, [capacity, 2 * intermediate])?,
            activated: alloc(element, [capacity, intermediate])?,
            expert_rows: alloc(Bf16, [capacity, hidden])?,
            y: alloc(Bf16, [tokens, hidden])?,
            gemm: Gemm::new(&device)?,
            graphs: None,
            x,
            own,
            all,
            weights,
            weight_scales,
            activated_scales,
            held: memory.held,
            rows,
            settings,
            number,
            device,
            stream,
            communicator,
            comm,
            kernels,
        })
    }

    /// Enqueues a round.
    pub fn enqueue_all(&mut self) -> Result<()> {
        let mut stages = self.settings.stages().into_iter();
        stages.try_for_each(|(stage, _)| self.enqueue(stage))
    }

    /// Enqueues a stage.
    pub fn enqueue(&mut self, stage: Stage) -> Result<()> {
        match stage {
            Stage::Router => self.score(),
            Stage::TopK => self.choose(),
            Stage::Encode => self.encode(),
            Stage::AllGather => self.gather(),
            Stage::Dispatch => self.dispatch(),
            Stage::GateUp | Stage::Down => {
                let [gate_up, down] = self.graphs.as_mut().context("products are not captured")?;
                let graph = if stage == Stage::GateUp {
                    gate_up
                } else {
                    down
                };
                Ok(graph.launch(self.stream)?)
            }
            Stage::Silu => self.activate(),
            Stage::Combine => self.combine(),
            Stage::ReduceScatter => self.scatter(),
        }
    }

    fn score(&mut self) -> Result<()> {
        let product = Product {
            rows: self.settings.tokens,
            n: self.settings.experts,
            k: self.settings.hidden,
            weights: self.router.at.address(),
            x: self.x.at.address(),
            scales: None,
            out: self.logits.at.address(),
        };
        // SAFETY: the tensors have these sizes, and only this stream uses them.
        unsafe { self.gemm.multiply(self.stream, &product) }
    }

    fn choose(&self) -> Result<()> {
        let Settings {
            tokens,
            experts,
            top_k,
            ..
        } = self.settings;
        let [tokens, experts, top_k] = [tokens, experts, top_k].map(|size| size as u64);
        let logits = self.logits.at.address();
        let chosen = [self.own.topk_ids, self.own.topk_weights].map(|tensor| tensor.at.address());
        let words = [logits, tokens, experts, top_k, chosen[0], chosen[1]];
        let blocks = self.settings.tokens.div_ceil(THREADS as usize / 32);
        // SAFETY: the tensors have these sizes, a warp has a token, and only this stream uses them.
        unsafe { self.kernels.launch(&self.kernels.route, blocks, &words) }
    }

    fn encode(&self) -> Result<()> {
        let Tokens { x, x_scales, .. } = self.own;
        let scales = x_scales.context("rows are carried as they are")?;
        // SAFETY: the tensors were allocated for this rank's tokens, and only this stream uses them.
        unsafe { self.kernels.encode(self.x, x, scales) }
    }

    fn gather(&self) -> Result<()> {
        let (comm, (all, _)) = self.comm.zip(self.all).context("NCCL carries tokens")?;
        comm.grouped(|| {
            for (own, all) in self.own.tensors().zip(all.tensors()) {
                // SAFETY: `all` has the bytes of `own` for every rank; only this stream uses both.
                unsafe { comm.all_gather(own.at, all.at, self.stream) }?;
            }
            Ok(())
        })
    }

    fn dispatch(&mut self) -> Result<()> {
        let tokens = self.all.map_or(self.own, |(all, _)| all);
        let input = DispatchInput {
            topk_weights: Some(tokens.topk_weights),
            x_scales: tokens.x_scales,
            ..DispatchInput::new(tokens.x, tokens.topk_ids)
        };
        Ok(self
            .communicator
            .dispatch(self.stream, &input, self.rows.output())?)
    }

    /// Runs both products on the rows that were dispatched and captures them: the host has to know how many
    /// rows each expert has. Synchronises.
    pub fn capture(&mut self) -> Result<()> {
        let device: Arc<dyn Device> = self.device.clone();
        let offsets: Vec<u32> = device.download_tensor(&self.row_offsets())?;
        for product in 0..2 {
            self.multiply(product, &offsets)?;
        }
        device.synchronize(self.stream)?;
        let (device, stream) = (self.device.clone(), self.stream);
        let mut graph = |product| device.capture(stream, || self.multiply(product, &offsets));
        self.graphs = Some([graph(0)?, graph(1)?]);
        Ok(())
    }

    fn row_offsets(&self) -> Tensor<1> {
        self.rows.output().row_offsets.expect("rows by expert")
    }

    /// Enqueues one of the two products, a call for each expert.
    fn multiply(&mut self, product: usize, offsets: &[u32]) -> Result<()> {
        let (output, row_offsets) = (self.rows.output(), self.row_offsets());
        let tokens = output.tokens.expect("rows by expert");
        let (x, scales, out) = if product == 0 {
            (tokens, output.scales, self.gate_up)
        } else {
            (self.activated, self.activated_scales, self.expert_rows)
        };
        let ([capacity, k], n) = (x.dims, out.dims[1]);
        let (groups, packed) = (k / BLOCK, self.packed.at.address());
        if let Some(ScaleTensor::Transposed(scales)) = scales {
            let offsets = row_offsets.at.address();
            let words = [
                scales.at.address(),
                offsets,
                packed,
                capacity as u64,
                groups as u64,
            ];
            let blocks = groups * (row_offsets.dims[0] - 1);
            // SAFETY: the kernel reads the scales of all rows and writes as many; only this stream uses both.
            unsafe { self.kernels.launch(&self.kernels.pack, blocks, &words) }?;
        }
        let weights = self.weights[product];
        let bytes = weights.data_type.bits() as usize / 8;
        let after = |at: Tensor<2>, bytes: usize| at.at.address() + bytes as u64;
        for (expert, ends) in offsets.windows(2).enumerate() {
            let [first, end] = [ends[0] as usize, ends[1] as usize];
            let scales = self.weight_scales.map(|scales| {
                let of_block = expert * (n / BLOCK) * scale_columns(k);
                [
                    after(scales[product], 4 * of_block),
                    packed + (4 * first * groups) as u64,
                ]
            });
            let one = Product {
                rows: end - first,
                n,
                k,
                weights: after(weights, expert * n * k * bytes),
                x: after(x, first * k * bytes),
                scales,
                out: after(out, first * n * 2),
            };
            // SAFETY: the expert's matrix, rows and scales lie within their tensors, since dispatch checks
            // `offsets` against the capacity; only this stream uses them.
            unsafe { self.gemm.multiply(self.stream, &one) }?;
        }
        Ok(())
    }

    fn activate(&self) -> Result<()> {
        let silu = FusedSilu {
            input: self.gate_up,
            interleaved: false,
            row_offsets: self.row_offsets(),
            activation: Activation::Silu,
            format: self.settings.format,
            input_scales: None,
            output: self.activated,
            scales: self.activated_scales,
        };
        let device: &dyn Device = &*self.device;
        Ok(device.fused_silu(self.stream, &silu, None)?)
    }

    fn combine(&mut self) -> Result<()> {
        let sums = self.all.map_or(self.y, |(_, sums)| sums);
        let (input, output) = (
            CombineInput::new(self.expert_rows),
            CombineOutput::Summed(sums),
        );
        Ok(self.communicator.combine(self.stream, &input, &output)?)
    }

    fn scatter(&self) -> Result<()> {
        let (comm, (_, sums)) = self.comm.zip(self.all).context("NCCL carries tokens")?;
        // SAFETY: the sums are as many as the outputs of all ranks; only this stream uses both.
        unsafe { comm.reduce_scatter(sums.at, self.y.at, self.stream) }
    }

    /// Fills the experts' rows and the results with NaN.
    pub fn forget(&self) -> Result<()> {
        for tensor in [self.expert_rows, self.y] {
            self.device.fill(tensor.at, 0xff, tensor.bytes())?;
        }
        Ok(())
    }

    /// Waits for the stream, and fails if a kernel has met a fault.
    pub fn wait(&self) -> Result<()> {
        if let Some(fault) = self.communicator.synchronize(self.stream)?.fault() {
            bail!("rank {}: {fault}", self.number);
        }
        Ok(())
    }

    /// Results of `count` tokens, spread over all.
    pub fn samples(&self, count: usize) -> Result<Vec<Sample>> {
        let Settings {
            tokens,
            hidden,
            experts,
            top_k,
            ..
        } = self.settings;
        let device: &dyn Device = &*self.device;
        let logits = device.download_tensor(&self.logits)?;
        let ids = device.download_tensor(&self.own.topk_ids)?;
        let weights = device.download_tensor(&self.own.topk_weights)?;
        let y = device.download_tensor(&self.y)?;
        let count = count.min(tokens);
        let sample = |index: usize| {
            let token = index * tokens / count;
            Sample {
                token: self.number * tokens + token,
                logits: logits[token * experts..][..experts].to_vec(),
                experts: ids[token * top_k..][..top_k].to_vec(),
                weights: weights[token * top_k..][..top_k].to_vec(),
                y: y[token * hidden..][..hidden].to_vec(),
            }
        };
        Ok((0..count).map(sample).collect())
    }

    /// Closes the communicator and frees everything, after [`wait`](Self::wait). Collective.
    pub fn close(self) -> Result<()> {
        drop(self.graphs);
        self.communicator.close()?;
        // SAFETY: `wait` saw the stream idle, and the communicator is closed: nothing uses the memory.
        unsafe {
            self.gemm.free()?;
            self.rows.free()?;
            self.held
                .into_iter()
                .try_for_each(|at| Ok(self.device.free(at)?))
        }
    }
}
