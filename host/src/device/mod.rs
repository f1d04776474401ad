//! The trait of devices. Two implementations: CUDA (feature `cuda`) and the simulator.

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

pub use ferry_layout::{
    Args, CombineWith, DispatchCountsArgs, DispatchWith, EpilogueWords, FaultPage, GiveUpArgs,
    LinksArgs, SiluArgs,
};
use ferry_layout::{Kernel, Shape};

pub use self::loaded_kernels::LoadedKernels;
pub use self::pointers::DevicePointers;
pub use self::sharing::gpu_ranks::GpuRanks;
use crate::error::{Error, TensorError};
use crate::tensor::Tensor;
use crate::tensor::data_type::{DataType, TensorElement, has_its_bits};
pub use crate::tensor::handles::{DevicePtr, Stream};

/// A kernel launch.
#[derive(Clone, Debug)]
pub struct Launch {
    /// The kernel.
    pub kernel: Kernel,
    /// The loaded kernels that it is one of.
    pub kernels: LoadedKernels,
    /// Its arguments, by value.
    pub args: Args,
    /// Whether any peer is on another node.
    pub shmem: bool,
    /// Most streaming multiprocessors to use; `None` for all. [`Kernel::blocks`] computes the number of
    /// blocks from it. By expert, every launch of a communicator has the same.
    pub max_sms: Option<u32>,
    /// The stream of the launch.
    pub stream: Stream,
}

/// Whether a launch became a part of a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InGraph {
    /// The launch is in no graph.
    No,
    /// The launch is, or may be, in a graph that a device of this process makes, which holds the
    /// communicator.
    Held,
    /// The launch is, or may be, in a graph that others make, whose launches are not known here.
    Foreign,
}

/// A device of the group, with plain memory and streams. None of its calls is collective.
///
/// # Safety
/// Kernels use the memory of a device unchecked. An implementation promises that
/// - [`alloc`](Self::alloc) returns memory of this device, of at least the requested bytes, that
///   nothing else uses until [`free`](Self::free);
/// - [`upload`](Self::upload), [`download`](Self::download) and [`fill`](Self::fill) are over when
///   they return, and touch no bytes but those of their arguments;
/// - [`as_any`](Self::as_any) returns the device itself, or nothing;
/// - a stream of [`stream`](Self::stream) lives for as long as the process;
/// - [`synchronize`](Self::synchronize) returns `Ok` only after all work enqueued on the stream has ended;
/// - [`kernels`](Self::kernels) returns kernels of this device, for that shape or for all;
///   so do [`kernels_with_options`](Self::kernels_with_options), with options, and
///   [`kernels_with_rows`](Self::kernels_with_rows), for rows that stay as they came;
/// - its kernels stay loaded for as long as an enqueued launch or a graph may run them, also
///   after the device is dropped;
/// - a graph with a launch of [`launch_held`](Self::launch_held) keeps the value that it was to hold as long
///   as the graph can be launched, unless that call returned [`InGraph::Foreign`];
/// - [`fault_page`](Self::fault_page) returns a page that this device may write.
pub unsafe trait Device: Send + Sync {
    /// Name of the device in messages: "NVIDIA H200 (cuda:0)".
    fn name(&self) -> String;
    /// Allocates `bytes` bytes of device memory, not cleared. Synchronizes: if ranks share a GPU, perhaps
    /// with kernels of other ranks, see [`free`](Self::free).
    fn alloc(&self, bytes: u64) -> Result<DevicePtr, Error>;
    /// Bytes of device memory that are free; `None` if that is not known.
    fn free_memory(&self) -> Result<Option<u64>, Error> {
        Ok(None)
    }
    /// Frees memory of [`alloc`](Self::alloc). Synchronizes with all enqueued kernels: if ranks share a GPU,
    /// also with those of other ranks, which may wait for a launch that this thread has yet to make, until
    /// their deadline. So free between rounds.
    ///
    /// # Safety
    /// This device's `alloc` returned `at`, and nothing uses it any more: no enqueued kernel,
    /// no graph that will be launched, no copy of `at`.
    unsafe fn free(&self, at: DevicePtr) -> Result<(), Error>;
    /// Copies to the device; more bytes than `to` has are refused, here and below
    /// ([`Error::MemoryTooShort`]). Synchronizes.
    fn upload(&self, to: DevicePtr, bytes: &[u8]) -> Result<(), Error>;
    /// Copies from the device. Synchronizes, but only with the device's own stream: call
    /// [`synchronize`](Self::synchronize) on the streams of the writers first.
    fn download(&self, from: DevicePtr, bytes: &mut [u8]) -> Result<(), Error>;
    /// Sets `bytes` bytes to `value`. Synchronizes.
    fn fill(&self, at: DevicePtr, value: u8, bytes: u64) -> Result<(), Error>;
    /// The device itself, to be downcast: streams and memory of other libraries are checked
    /// against a `CudaDevice`.
    fn as_any(&self) -> Option<&dyn Any> {
        None
    }
    /// Creates a stream, which lives for as long as the process.
    fn stream(&self) -> Result<Stream, Error>;
    /// Waits for everything enqueued on `stream`.
    fn synchronize(&self, stream: Stream) -> Result<(), Error>;
    /// Kernels for `shape` alone, compiled unless they exist; the general ones if the device makes
    /// no others. Synchronizes.
    fn kernels(&self, shape: &Shape) -> Result<LoadedKernels, Error> {
        let _ = shape;
        Ok(LoadedKernels::GENERAL)
    }
    /// Kernels with options, compiled unless they exist: for `shape` alone, or for all. The general ones if
    /// the device has one set of kernels for everything. Synchronizes.
    fn kernels_with_options(&self, shape: Option<&Shape>) -> Result<LoadedKernels, Error> {
        let _ = shape;
        Ok(LoadedKernels::GENERAL)
    }
    /// Kernels for rows that stay as they came, of a plan whose [`receive`](crate::Config::receive) keeps
    /// rows; otherwise as [`kernels_with_options`](Self::kernels_with_options). Synchronizes.
    fn kernels_with_rows(&self, shape: Option<&Shape>) -> Result<LoadedKernels, Error> {
        let _ = shape;
        Ok(LoadedKernels::GENERAL)
    }
    /// Bytes of the user's epilogue in combines with options, rounded up to 8; `None` for Ferry's steps.
    fn epilogue_bytes(&self) -> Option<usize> {
        None
    }
    /// Number of multiprocessors that kernels on `stream` are limited to by a green context; `None` for all
    /// of the device. May be called while the stream is captured. Does not synchronize.
    fn stream_multiprocessors(&self, stream: Stream) -> Option<u32> {
        let _ = stream;
        None
    }
    /// Unique number in this process of the capture that `stream` is in, if any. Called before each launch on
    /// devices that ranks share. Does not synchronize.
    fn capture(&self, stream: Stream) -> Option<u64> {
        let _ = stream;
        None
    }
    /// Enqueues a kernel. Does not synchronize, allocate or compile.
    ///
    /// # Safety
    /// The addresses in `launch.args` are memory of the sizes that the other arguments imply, as with
    /// [`DevicePtr::new`], that of the fault page comes from [`fault_page`](Self::fault_page),
    /// and `launch.kernels` come from [`kernels`](Self::kernels) of this device for the shape
    /// in the arguments, or are the general ones; with [`Args::has_options`] they come from
    /// [`kernels_with_options`](Self::kernels_with_options), and with [`Args::keeps_rows`] from
    /// [`kernels_with_rows`](Self::kernels_with_rows).
    unsafe fn launch(&self, launch: &Launch) -> Result<(), Error>;
    /// [`launch`](Self::launch) of a communicator. If the launch becomes a part of a graph, because
    /// a device of this process captures the stream, the graph keeps `held` for as long as it exists.
    /// After an error no graph does.
    ///
    /// # Safety
    /// As [`launch`](Self::launch).
    unsafe fn launch_held(
        &self,
        launch: &Launch,
        held: &Arc<dyn Any + Send + Sync>,
    ) -> Result<InGraph, Error> {
        let _ = held;
        // SAFETY: the rules of `launch_held` are those of `launch`.
        unsafe { self.launch(launch) }?;
        Ok(InGraph::No)
    }
    /// Allocates a fault page that host and device share, empty, and after it as many 64-bit words, zero, for
    /// counts of a dispatch.
    fn fault_page(&self, words: usize) -> Result<Box<dyn SharedPage>, Error>;
}

/// Typed copies. Not collective.
impl dyn Device + '_ {
    /// Allocates a tensor without gaps, as [`alloc`](Device::alloc) does, and copies `values` into it.
    /// [`free`](Device::free) of its [`at`](Tensor::at) frees it. Synchronizes.
    ///
    /// # Errors
    /// [`Error::Tensor`] if the number of `values` is not that of `dims`; errors of the device.
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
            // SAFETY: `alloc` returned the memory above, and only the upload, which is over, has used its
            // address.
            if let Err(error) = unsafe { self.free(at) } {
                tracing::warn!(%error, "cannot free a tensor that was not uploaded");
            }
            return Err(refused);
        }
        Ok(Tensor { at, ..tensor })
    }

    /// Copies the elements of a tensor without gaps from the device: as `T` that its
    /// [`data_type`](Tensor::data_type) [takes](DataType::takes), or as `u8`, which returns the bytes of any
    /// tensor. Synchronizes as [`download`](Device::download) does: synchronize with the streams of its
    /// writers first.
    ///
    /// # Errors
    /// [`Error::Tensor`] if it has gaps or its elements are not `T`; [`Error::MemoryTooShort`] if the memory
    /// from its address on is shorter; errors of the device.
    pub fn download_tensor<T: TensorElement, const N: usize>(
        &self,
        tensor: &Tensor<N>,
    ) -> Result<Vec<T>, Error> {
        self.download_named("tensor", tensor)
    }

    /// [`download_tensor`](Self::download_tensor) with the tensor's name in errors.
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

/// A [`FaultPage`], and counts of a dispatch after it, that the device writes and the host reads without
/// synchronizing with the device.
///
/// # Safety
/// At [`address`](Self::address), which stays the same, is a [`FaultPage`], with the words after it, that the
/// kernels of the device that returned the value may read and write until the value is dropped, and that the
/// host accesses only in ways that allow for that.
pub unsafe trait SharedPage: Send + Sync {
    /// Address of the page on the device.
    fn address(&self) -> u64;
    /// Returns the current contents: one record, or two numbers that differ while one is being written.
    ///
    /// # Errors
    /// The device's, if the page cannot be read now: a fault is found by the next call.
    fn read(&self) -> Result<FaultPage, Error>;
    /// Copies the first words after the page, as many as there are, all at most: the first one first, and
    /// then the others as they were when the device stored that one, or later.
    ///
    /// # Errors
    /// The device's, if the words cannot be read any more.
    fn counts(&self, words: &mut [u64]) -> Result<(), Error>;
    /// Tells the device that record `number` was reported, so that later input faults are recorded.
    fn acknowledge(&self, number: u64);
}
