//! What Ferry asks of a device. Two implementations: CUDA (feature `cuda`) and the simulator.

#[cfg(any(feature = "cuda", test))]
pub(crate) mod captures;
#[cfg(any(feature = "cuda", test))]
pub(crate) mod fault_page;
#[cfg(any(feature = "cuda", test))]
pub(crate) mod kernels;
pub(crate) mod loaded_kernels;
pub(crate) mod pointers;
pub(crate) mod sharing;

use std::any::Any;
use std::sync::Arc;

pub use ferry_layout::{CombineWith, DispatchWith, EpilogueWords, FaultPage, SiluArgs};
use ferry_layout::{Kernel, Shape};

pub use self::loaded_kernels::LoadedKernels;
pub use self::pointers::DevicePointers;
pub use self::sharing::gpu_ranks::GpuRanks;
use crate::error::{Error, TensorError};
use crate::tensor::Tensor;
use crate::tensor::data_type::{DataType, TensorElement, has_its_bits};
pub use crate::tensor::handles::{DevicePtr, Stream};

/// Arguments of a kernel launch.
#[derive(Clone, Copy, Debug)]
pub enum Args {
    /// Of the dispatch kernels; those without options take the first part.
    Dispatch(DispatchWith),
    /// Of the combine kernels, likewise.
    Combine(CombineWith<EpilogueWords>),
    /// Of the fused SiLU kernel.
    Silu(SiluArgs),
}

impl Args {
    /// The most tokens that a rank may have; none where a kernel has nothing to do with ranks.
    pub const fn most_tokens(&self) -> u32 {
        match self {
            Self::Dispatch(with) => with.args.common.shape.max_tokens_per_rank,
            Self::Combine(with) => with.args.common.shape.max_tokens_per_rank,
            Self::Silu(_) => 0,
        }
    }

    /// Whether a launch with them needs [the kernels with options](Device::kernels_with_options).
    pub fn has_options(&self) -> bool {
        match self {
            Self::Dispatch(with) => with.has_options(),
            Self::Combine(with) => with.has_options(),
            Self::Silu(_) => false,
        }
    }
}

/// A kernel launch.
#[derive(Clone, Debug)]
pub struct Launch {
    /// Which kernel.
    pub kernel: Kernel,
    /// Of which kernels.
    pub kernels: LoadedKernels,
    /// Its arguments, by value.
    pub args: Args,
    /// Whether any peer is on another node.
    pub shmem: bool,
    /// Most streaming multiprocessors to use; `None` for all. [`Kernel::blocks`] says how many blocks that
    /// makes, the same number in every launch of a communicator.
    pub max_sms: Option<u32>,
    /// Where it is enqueued.
    pub stream: Stream,
}

/// Whether a launch became a part of a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InGraph {
    /// Of none.
    No,
    /// Of one that a device of this process makes, or perhaps: it keeps what it was given to hold.
    Held,
    /// Of one that others make, or perhaps. Nobody here knows when that is launched.
    Foreign,
}

/// A device of the group, with plain memory and streams. None of its calls is collective.
///
/// # Safety
/// Kernels work with what a device gives, and nothing checks it there. An implementation promises that
/// - [`alloc`](Self::alloc) gives memory of this device, of as many bytes as it was asked for, that
///   nothing else uses until [`free`](Self::free);
/// - [`upload`](Self::upload), [`download`](Self::download) and [`fill`](Self::fill) are over when
///   they return, and touch no bytes but those that they were given;
/// - [`as_any`](Self::as_any) returns the device itself, or nothing;
/// - a stream of [`stream`](Self::stream) lives for as long as the process;
/// - [`synchronize`](Self::synchronize) gives `Ok` only after what was enqueued on the stream has ended;
/// - [`kernels`](Self::kernels) gives kernels of this device, and no others than for that shape or for all;
///   so does [`kernels_with_options`](Self::kernels_with_options), of those that take options;
/// - its kernels stay loaded for as long as something that was enqueued, or a graph of it, may run them, also
///   when the device is dropped;
/// - no graph launches what was given to [`launch_held`](Self::launch_held) and has let go of what that
///   was to hold, unless that gave [`InGraph::Foreign`];
/// - [`fault_page`](Self::fault_page) gives a page that this device may write.
pub unsafe trait Device: Send + Sync {
    /// For people: "NVIDIA H200 (cuda:0)".
    fn name(&self) -> String;
    /// Allocates `bytes` of device memory, not cleared. Synchronizes: where ranks share a GPU, perhaps with
    /// kernels of other ranks, see [`free`](Self::free).
    fn alloc(&self, bytes: u64) -> Result<DevicePtr, Error>;
    /// Frees what [`alloc`](Self::alloc) gave. Synchronizes: where ranks share a GPU, also with kernels of
    /// other ranks, which may wait for a launch that this thread has yet to make, until their deadline. So
    /// free between rounds.
    ///
    /// # Safety
    /// This device's `alloc` gave `at`, and nothing uses it any more: no kernel that is enqueued,
    /// no graph that will be launched, no copy of `at`.
    unsafe fn free(&self, at: DevicePtr) -> Result<(), Error>;
    /// Copies to the device; more bytes than `to` has are refused, here and below
    /// ([`Error::MemoryTooShort`]). Synchronizes.
    fn upload(&self, to: DevicePtr, bytes: &[u8]) -> Result<(), Error>;
    /// Copies from the device. Synchronizes, but not with other streams than its own: call
    /// [`synchronize`](Self::synchronize) on theirs first.
    fn download(&self, from: DevicePtr, bytes: &mut [u8]) -> Result<(), Error>;
    /// Sets `bytes` bytes to `value`. Synchronizes.
    fn fill(&self, at: DevicePtr, value: u8, bytes: u64) -> Result<(), Error>;
    /// The device itself, for those who know its type: streams and memory of other libraries are checked
    /// against a `CudaDevice`.
    fn as_any(&self) -> Option<&dyn Any> {
        None
    }
    /// Creates a stream, which lives for as long as the process.
    fn stream(&self) -> Result<Stream, Error>;
    /// Waits for everything enqueued on `stream`.
    fn synchronize(&self, stream: Stream) -> Result<(), Error>;
    /// Kernels for `shape` alone, compiled unless they are there; the general ones where the device makes
    /// no others. Synchronizes.
    fn kernels(&self, shape: &Shape) -> Result<LoadedKernels, Error> {
        let _ = shape;
        Ok(LoadedKernels::GENERAL)
    }
    /// Kernels that take options, compiled unless they are there: for `shape` alone, or for all. Where a
    /// device has one set of kernels for everything, that. Synchronizes.
    fn kernels_with_options(&self, shape: Option<&Shape>) -> Result<LoadedKernels, Error> {
        let _ = shape;
        Ok(LoadedKernels::GENERAL)
    }
    /// Bytes of the epilogue that combines with options take, rounded up to 8; `None`: Ferry's own steps.
    fn epilogue_bytes(&self) -> Option<usize> {
        None
    }
    /// Multiprocessors that kernels on `stream` are kept to, where these are not all of the device:
    /// those of a green context. May be called while the stream is captured. Does not synchronize.
    fn stream_multiprocessors(&self, stream: Stream) -> Option<u32> {
        let _ = stream;
        None
    }
    /// The number of the capture to a graph that `stream` is in, if it is in one, which no other capture of
    /// the process has. Asked of devices that ranks share, before each launch. Does not synchronize.
    fn capture(&self, stream: Stream) -> Option<u64> {
        let _ = stream;
        None
    }
    /// Enqueues a kernel. Does not synchronize, allocate or compile.
    ///
    /// # Safety
    /// The addresses in `launch.args` are memory of the sizes that the other arguments imply, as with
    /// [`DevicePtr::new`], that of the fault page is what [`fault_page`](Self::fault_page) gave,
    /// and `launch.kernels` are what [`kernels`](Self::kernels) of this device gave for the shape
    /// in them, or the general ones; where [`Args::has_options`], what
    /// [`kernels_with_options`](Self::kernels_with_options) gave.
    unsafe fn launch(&self, launch: &Launch) -> Result<(), Error>;
    /// [`launch`](Self::launch) of a communicator. Where the launch becomes a part of a graph, because
    /// the stream is captured by a device of this process, the graph keeps `held` for as long as there is
    /// the graph. After an error none does.
    ///
    /// # Safety
    /// As [`launch`](Self::launch).
    unsafe fn launch_held(
        &self,
        launch: &Launch,
        held: &Arc<dyn Any + Send + Sync>,
    ) -> Result<InGraph, Error> {
        let _ = held;
        // SAFETY: the caller's promise.
        unsafe { self.launch(launch) }?;
        Ok(InGraph::No)
    }
    /// Allocates a fault page that host and device share, empty.
    fn fault_page(&self) -> Result<Box<dyn SharedPage>, Error>;
}

/// Typed copies. Not collective.
impl dyn Device + '_ {
    /// Allocates a tensor without gaps, as [`alloc`](Device::alloc) does, and copies `values` into it.
    /// Synchronizes.
    ///
    /// # Errors
    /// [`Error::Tensor`] if `values` are not as many as `dims` say; what the device reports.
    pub fn upload_tensor<T: TensorElement, const N: usize>(
        &self,
        dims: [usize; N],
        values: &[T],
    ) -> Result<Tensor<N>, Error> {
        const { has_its_bits::<T>() };
        let tensor = Tensor::contiguous(DevicePtr::NULL, T::DATA_TYPE, dims);
        if tensor.elements() != values.len() {
            return Err(Error::Tensor(TensorError {
                tensor: "values",
                wanted: format!("{} elements (shape {dims:?})", tensor.elements()),
                given: values.len().to_string(),
            }));
        }
        let bytes = bytemuck::cast_slice(values);
        let at = self.alloc(bytes.len() as u64)?;
        if let Err(refused) = self.upload(at, bytes) {
            // SAFETY: `alloc` gave the memory a moment ago, and its address went nowhere but to the upload,
            // which is over.
            if let Err(error) = unsafe { self.free(at) } {
                tracing::warn!(%error, "cannot free a tensor that was not uploaded");
            }
            return Err(refused);
        }
        Ok(Tensor { at, ..tensor })
    }

    /// Copies the elements of a tensor without gaps from the device: into `T` that its
    /// [`data_type`](Tensor::data_type) [takes](DataType::takes), or into `u8`, which gives the bytes of any
    /// tensor. Synchronizes as [`download`](Device::download) does.
    ///
    /// # Errors
    /// [`Error::Tensor`] if it has gaps or its elements are no `T`; [`Error::MemoryTooShort`] if the memory
    /// from its address on is shorter; what the device reports.
    pub fn download_tensor<T: TensorElement, const N: usize>(
        &self,
        tensor: &Tensor<N>,
    ) -> Result<Vec<T>, Error> {
        self.download_named("tensor", tensor)
    }

    /// The same, of a tensor of this name.
    pub(crate) fn download_named<T: TensorElement, const N: usize>(
        &self,
        name: &'static str,
        tensor: &Tensor<N>,
    ) -> Result<Vec<T>, Error> {
        const { has_its_bits::<T>() };
        let refused = |wanted: &str, given: String| {
            Err(Error::Tensor(TensorError {
                tensor: name,
                wanted: wanted.to_owned(),
                given,
            }))
        };
        let (wanted, dims) = (tensor.data_type, tensor.dims);
        if !tensor.is_contiguous() {
            let given = format!("strides {:?} (shape {dims:?})", tensor.strides);
            return refused("no gaps", given);
        }
        if T::DATA_TYPE != DataType::U8 && !wanted.takes(T::DATA_TYPE) {
            let bits = match wanted {
                DataType::Bf16 | DataType::F16 => " or u16",
                DataType::I32 => " or u32",
                _ => "",
            };
            let given = format!("one as {}", T::DATA_TYPE);
            return refused(&format!("a download as {wanted}{bits}"), given);
        }
        tensor.at.require("download", tensor.bytes())?;
        let mut values = vec![T::zeroed(); tensor.bytes() as usize / size_of::<T>()];
        self.download(tensor.at, bytemuck::cast_slice_mut(&mut values))?;
        Ok(values)
    }
}

/// A [`FaultPage`] that the device writes and the host reads without asking the device.
///
/// # Safety
/// At [`address`](Self::address), which stays the same, is a [`FaultPage`] that the kernels of the
/// device that gave the value may read and write until the value is dropped, and that the host
/// accesses only in ways that allow for that.
pub unsafe trait SharedPage: Send + Sync {
    /// Where the device writes it.
    fn address(&self) -> u64;
    /// What stands there now: one record, or two numbers that differ while one is being written.
    fn read(&self) -> FaultPage;
    /// Tells the device that record `number` was told, so that an input fault of a later round is recorded.
    fn acknowledge(&self, number: u64);
}
