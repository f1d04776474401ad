//! One rank's side of a layer, on one stream.

use std::sync::Arc;

use anyhow::{Context, Result, bail};
use bytemuck::bytes_of;
use cudarc::nvrtc::{CompileOptions, compile_ptx_with_opts};
use ferry::DataType::{self, Bf16, E4m3, F32, I32};
use ferry::cuda::{CudaDevice, CudaGraph, CudaKernel, Grid};
use ferry::{
    Activation, CombineInput, CombineOutput, Communicator, Device, DevicePtr, DispatchBuffers,
    DispatchInput, FusedSilu, ScaleTensor, Stream, Tensor,
};

use super::gemm::{Gemm, Product};
use super::numbers::{Matrix, Sample, scale_columns};
use super::settings::{BLOCK, Settings, Stage};
use crate::bench::nccl::Comm;

/// Kernels of the layer's own. The first one is the example's.
const SOURCE: &str = concat!(
    include_str!("../../../../host/examples/moe_layer/route.cu"),
    include_str!("kernels.cu")
);
/// Threads of a block of them.
const THREADS: u32 = 256;

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
    topk_ids: Tensor<2>,
    topk_weights: Tensor<2>,
    /// `x`, ids and weights of all ranks, and the sums of this rank's experts, if NCCL carries tokens.
    all: Option<[Tensor<2>; 4]>,
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

/// The layer's own kernels, whose parameters are words of 8 bytes.
struct Kernels {
    fill: CudaKernel,
    route: CudaKernel,
    pack: CudaKernel,
    stream: Stream,
}

impl Kernels {
    fn new(device: &CudaDevice, stream: Stream) -> Result<Self> {
        let arch = Some("compute_80");
        let options = CompileOptions {
            arch,
            ..CompileOptions::default()
        };
        let ptx = compile_ptx_with_opts(SOURCE, options).context("the layer's own kernels")?;
        let module = device.load_ptx(&[&ptx.to_src()])?;
        Ok(Self {
            fill: module.kernel("fill")?,
            route: module.kernel("route")?,
            pack: module.kernel("pack")?,
            stream,
        })
    }

    /// # Safety
    /// As [`CudaKernel::launch`].
    unsafe fn launch(&self, kernel: &CudaKernel, blocks: usize, words: &[u64]) -> Result<()> {
        let arguments: Vec<&[u8]> = words.iter().map(bytes_of).collect();
        let grid = Grid::new(blocks as u32, THREADS);
        // SAFETY: this function's contract.
        Ok(unsafe { kernel.launch(self.stream, grid, &arguments) }?)
    }

    /// Fills a tensor with the numbers of a matrix from row `first` on.
    fn fill(
        &self,
        tensor: Tensor<2>,
        matrix: Matrix,
        first: usize,
        seed: u64,
    ) -> Result<Tensor<2>> {
        let first = matrix.index(seed, first * tensor.dims[1]);
        let bytes = u64::from(tensor.data_type.bits() / 8);
        let words = [tensor.at.address(), first, tensor.elements() as u64, bytes];
        // SAFETY: the kernel writes the tensor's elements, which nothing else uses yet.
        unsafe { self.launch(&self.fill, 1024, &words) }?;
        Ok(tensor)
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
            top_k,
            seed,
            ..
        } = settings;
        let number = communicator.rank().0 as usize;
        let kernels = Kernels::new(&device, stream)?;
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
        let (mut activated_scales, mut all) = (None, None);
        if element == E4m3 {
            let scales = alloc(F32, [intermediate / BLOCK, capacity])?;
            activated_scales = Some(ScaleTensor::Transposed(scales));
        }
        if settings.nccl {
            let tokens = settings.ranks * tokens;
            let kinds = [(Bf16, hidden), (I32, top_k), (F32, top_k), (Bf16, hidden)];
            let each = kinds.map(|(kind, columns)| alloc(kind, [tokens, columns]));
            let [x, ids, weights, sums] = each;
            all = Some([x?, ids?, weights?, sums?]);
        }
        let x = alloc(Bf16, [tokens, hidden])?;
        let router = alloc(Bf16, [experts, hidden])?;
        Ok(Self {
            x: kernels.fill(x, Matrix::X, number * tokens, seed)?,
            router: kernels.fill(router, Matrix::Router, 0, seed)?,
            logits: alloc(Bf16, [tokens, experts])?,
            topk_ids: alloc(I32, [tokens, top_k])?,
            topk_weights: alloc(F32, [tokens, top_k])?,
            packed: alloc(F32, [capacity, hidden.max(intermediate) / BLOCK])?,
            gate_up: alloc(Bf16, [capacity, 2 * intermediate])?,
            activated: alloc(element, [capacity, intermediate])?,
            expert_rows: alloc(Bf16, [capacity, hidden])?,
            y: alloc(Bf16, [tokens, hidden])?,
            gemm: Gemm::new(&device)?,
            graphs: None,
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
        let chosen = [self.topk_ids, self.topk_weights].map(|tensor| tensor.at.address());
        let words = [logits, tokens, experts, top_k, chosen[0], chosen[1]];
        let blocks = self.settings.tokens.div_ceil(THREADS as usize / 32);
        // SAFETY: the tensors have these sizes, a warp has a token, and only this stream uses them.
        unsafe { self.kernels.launch(&self.kernels.route, blocks, &words) }
    }

    fn gather(&self) -> Result<()> {
        let (comm, all) = self.comm.zip(self.all).context("NCCL carries tokens")?;
        comm.grouped(|| {
            for (own, all) in [self.x, self.topk_ids, self.topk_weights]
                .into_iter()
                .zip(all)
            {
                // SAFETY: `all` has the bytes of `own` for every rank; only this stream uses both.
                unsafe { comm.all_gather(own.at, all.at, self.stream) }?;
            }
            Ok(())
        })
    }

    fn dispatch(&mut self) -> Result<()> {
        let own = [self.x, self.topk_ids, self.topk_weights];
        let [x, ids, weights] = self
            .all
            .map_or(own, |[x, ids, weights, _]| [x, ids, weights]);
        let topk_weights = Some(weights);
        let input = DispatchInput {
            topk_weights,
            ..DispatchInput::new(x, ids)
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
        let sums = self.all.map_or(self.y, |[.., sums]| sums);
        let (input, output) = (
            CombineInput::new(self.expert_rows),
            CombineOutput::Summed(sums),
        );
        Ok(self.communicator.combine(self.stream, &input, &output)?)
    }

    fn scatter(&self) -> Result<()> {
        let (comm, [.., sums]) = self.comm.zip(self.all).context("NCCL carries tokens")?;
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
        let ids = device.download_tensor(&self.topk_ids)?;
        let weights = device.download_tensor(&self.topk_weights)?;
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
