//! Kernels of the layer's own, compiled at run time.

use anyhow::{Context, Result};
use bytemuck::bytes_of;
use cudarc::nvrtc::{CompileOptions, compile_ptx_with_opts};
use ferry::cuda::{CudaDevice, CudaKernel, Grid};
use ferry::{Stream, Tensor, TokenFormat};

use super::numbers::Matrix;
use super::settings::BLOCK;

/// Kernels of the layer's own. The first one is the example's.
const SOURCE: &str = concat!(
    include_str!("../../../../host/examples/moe_layer/route.cu"),
    include_str!("kernels.cu")
);
/// Threads of a block of them.
pub const THREADS: u32 = 256;
/// Threads of [`Kernels::encode`] for a block of values.
const THREADS_OF_A_BLOCK: usize = 16;

/// The layer's own kernels, whose parameters are words of 8 bytes.
pub struct Kernels {
    fill: CudaKernel,
    pub route: CudaKernel,
    pub pack: CudaKernel,
    /// Only where rows are FP8.
    encode: Option<CudaKernel>,
    stream: Stream,
}

impl Kernels {
    pub fn new(device: &CudaDevice, stream: Stream, format: TokenFormat) -> Result<Self> {
        let has_fp8 = format == TokenFormat::BlockwiseFp8;
        // `encode` needs 8.9; cuBLASLt multiplies FP8 with scales of blocks from 9.0 on.
        let arch = Some(if has_fp8 { "compute_90" } else { "compute_80" });
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
            encode: has_fp8.then(|| module.kernel("encode")).transpose()?,
            stream,
        })
    }

    /// # Safety
    /// As [`CudaKernel::launch`].
    pub unsafe fn launch(&self, kernel: &CudaKernel, blocks: usize, words: &[u64]) -> Result<()> {
        let arguments: Vec<&[u8]> = words.iter().map(bytes_of).collect();
        let grid = Grid::new(blocks as u32, THREADS);
        // SAFETY: this function's contract.
        Ok(unsafe { kernel.launch(self.stream, grid, &arguments) }?)
    }

    /// Fills a tensor with the numbers of a matrix from row `first` on.
    pub fn fill(
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

    /// Enqueues encoding of BF16 rows to e4m3 codes and the f32 scales of their blocks, as dispatch encodes
    /// them.
    ///
    /// # Safety
    /// The tensors are contiguous and of one number of rows; nothing else uses them until the stream has
    /// passed the kernel.
    pub unsafe fn encode(&self, x: Tensor<2>, codes: Tensor<2>, scales: Tensor<2>) -> Result<()> {
        let kernel = self.encode.as_ref().context("rows are not FP8")?;
        let blocks = x.elements() / BLOCK;
        let [from, to, beside] = [x, codes, scales].map(|tensor| tensor.at.address());
        let grid = (blocks * THREADS_OF_A_BLOCK).div_ceil(THREADS as usize);
        // SAFETY: the kernel reads and writes so many blocks, by this function's contract.
        unsafe { self.launch(kernel, grid, &[from, to, beside, blocks as u64]) }
    }
}
