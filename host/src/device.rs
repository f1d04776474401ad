//! What Ferry asks of a device and of the fabric between devices.
//!
//! Two implementations: CUDA (feature `cuda`) and the simulator. Addresses and
//! streams are made of raw numbers, so that any engine's tensors and streams can be passed in.

use std::any::Any;
use std::sync::Arc;

use bytemuck::Pod;
pub use ferry_layout::{CombineArgs, DispatchArgs, FaultPage, SiluArgs};
use ferry_layout::{Kernel, Rank, Shape};

use crate::{Error, LoadedKernels, Tensor, TensorError};

/// Device memory: an address (`CUdeviceptr`, or one in the simulator's memory) and the bytes that may be
/// used from there on.
///
/// Memory of [`Device::alloc`] is for that device, and for those that can address its memory: pass
/// it to no others. The address does not tell whose it is, so no call checks it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DevicePtr {
    address: u64,
    bytes: u64,
}

impl DevicePtr {
    /// No memory.
    pub const NULL: Self = Self {
        address: 0,
        bytes: 0,
    };

    /// `bytes` bytes of device memory from `address` on: another library's tensor, say.
    ///
    /// # Safety
    /// For as long as this value or a copy is passed to anything, and until what was enqueued with it has
    /// ended and no graph of it is launched any more, these bytes are memory that the device to which it is
    /// passed may read and write, and the host has no reference to them.
    pub const unsafe fn new(address: u64, bytes: u64) -> Self {
        Self { address, bytes }
    }

    /// The address. 0 is none.
    pub const fn address(self) -> u64 {
        self.address
    }

    /// Bytes that may be used from the address on.
    pub const fn bytes(self) -> u64 {
        self.bytes
    }

    /// What lies `bytes` bytes further on: nothing, behind the end.
    pub const fn plus(self, bytes: u64) -> Self {
        Self {
            address: self.address.wrapping_add(bytes),
            bytes: self.bytes.saturating_sub(bytes),
        }
    }

    /// Checks that `call` finds `bytes` bytes here.
    pub(crate) const fn require(self, call: &'static str, bytes: u64) -> Result<(), Error> {
        if bytes <= self.bytes {
            return Ok(());
        }
        Err(Error::MemoryTooShort {
            call,
            address: self.address,
            wanted: bytes,
            given: self.bytes,
        })
    }
}

/// A stream (`CUstream`). The simulator has one a rank and ignores it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Stream(u64);

impl Stream {
    /// The default stream, which every device has.
    pub const DEFAULT: Self = Self(0);

    /// The stream with this handle (a `CUstream` as a number).
    ///
    /// # Safety
    /// For as long as this value or a copy is passed to anything, it is a live stream of the primary context
    /// of the device to which it is passed. A graph that others than `CudaDevice::capture` make of
    /// what is enqueued on it is not launched after a communicator whose calls it has, or a group
    /// of theirs, was closed, nor after their devices were dropped.
    pub const unsafe fn new(handle: u64) -> Self {
        Self(handle)
    }

    /// The handle.
    pub const fn handle(self) -> u64 {
        self.0
    }
}

/// Arguments of a kernel launch.
#[derive(Clone, Copy, Debug)]
pub enum Args {
    /// Of the dispatch kernels.
    Dispatch(DispatchArgs),
    /// Of the combine kernels.
    Combine(CombineArgs),
    /// Of the fused SiLU kernel.
    Silu(SiluArgs),
}

impl Args {
    /// The most tokens that a rank may have; none where a kernel has nothing to do with ranks.
    pub const fn most_tokens(&self) -> u32 {
        match self {
            Self::Dispatch(args) => args.common.shape.max_tokens_per_rank,
            Self::Combine(args) => args.common.shape.max_tokens_per_rank,
            Self::Silu(_) => 0,
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
    /// Most streaming multiprocessors to use; `None` for all.
    pub max_sms: Option<u32>,
    /// Where it is enqueued.
    pub stream: Stream,
}

/// A device of the group, with plain memory and streams. None of its calls is collective.
///
/// # Safety
/// Kernels work with what a device gives, and nothing checks it there. An implementation promises that
/// - [`alloc`](Self::alloc) gives memory of this device, of as many bytes as it was asked for, that
///   nothing else uses until [`free`](Self::free);
/// - [`upload`](Self::upload), [`download`](Self::download) and [`fill`](Self::fill) are over when
///   they return, and touch no bytes but those that they were given;
/// - a stream of [`stream`](Self::stream) lives for as long as the process;
/// - [`synchronize`](Self::synchronize) gives `Ok` only after what was enqueued on the stream has ended;
/// - [`kernels`](Self::kernels) gives kernels of this device, and no others than for that shape or for all;
/// - [`fault_page`](Self::fault_page) gives a page that this device may write.
pub unsafe trait Device: Send + Sync {
    /// For people: "NVIDIA H200 (cuda:0)".
    fn name(&self) -> String;
    /// Allocates `bytes` of device memory, not cleared. Synchronises.
    fn alloc(&self, bytes: u64) -> Result<DevicePtr, Error>;
    /// Frees what [`alloc`](Self::alloc) gave. Synchronises.
    ///
    /// # Safety
    /// This device's `alloc` gave `at`, and nothing uses it any more: no kernel that is enqueued,
    /// no graph that will be launched, no copy of `at`.
    unsafe fn free(&self, at: DevicePtr) -> Result<(), Error>;
    /// Copies to the device; more bytes than `to` has are refused, here and below
    /// ([`Error::MemoryTooShort`]). Synchronises.
    fn upload(&self, to: DevicePtr, bytes: &[u8]) -> Result<(), Error>;
    /// Copies from the device. Synchronises, but not with other streams than its own: call
    /// [`synchronize`](Self::synchronize) on theirs first.
    fn download(&self, from: DevicePtr, bytes: &mut [u8]) -> Result<(), Error>;
    /// Sets `bytes` bytes to `value`. Synchronises.
    fn fill(&self, at: DevicePtr, value: u8, bytes: u64) -> Result<(), Error>;
    /// Creates a stream, which lives for as long as the process.
    fn stream(&self) -> Result<Stream, Error>;
    /// Waits for everything enqueued on `stream`.
    fn synchronize(&self, stream: Stream) -> Result<(), Error>;
    /// Kernels for `shape` alone, compiled unless they are there; the general ones where the device makes
    /// no others. Synchronises.
    fn kernels(&self, shape: &Shape) -> Result<LoadedKernels, Error> {
        let _ = shape;
        Ok(LoadedKernels::GENERAL)
    }
    /// Multiprocessors that kernels on `stream` are kept to, where these are not all of the device:
    /// those of a green context. May be called while the stream is captured. Does not synchronise.
    fn stream_multiprocessors(&self, stream: Stream) -> Option<u32> {
        let _ = stream;
        None
    }
    /// Keeps `held` for as long as there is the graph that `stream` is being captured to, if it is,
    /// by a device of this process. Called before each launch of a communicator. Does not
    /// synchronise.
    fn hold(&self, stream: Stream, held: &Arc<dyn Any + Send + Sync>) -> Result<(), Error> {
        let _ = (stream, held);
        Ok(())
    }
    /// Enqueues a kernel. Does not synchronise, allocate or compile.
    ///
    /// # Safety
    /// The addresses in `launch.args` are memory of the sizes that the other arguments imply, as with
    /// [`DevicePtr::new`], that of the fault page is what [`fault_page`](Self::fault_page) gave,
    /// and `launch.kernels` are what [`kernels`](Self::kernels) of this device gave for the shape
    /// in them, or the general ones.
    unsafe fn launch(&self, launch: &Launch) -> Result<(), Error>;
    /// Allocates a fault page that host and device share, empty.
    fn fault_page(&self) -> Result<Box<dyn SharedPage>, Error>;
}

/// Typed copies. Not collective.
impl dyn Device {
    /// Allocates a tensor without gaps, as [`alloc`](Device::alloc) does, and copies `values` into it.
    /// Synchronises.
    ///
    /// # Errors
    /// [`Error::Tensor`] if `values` are not as many as `dims` say; what the device reports.
    pub fn upload_tensor<T: Pod, const N: usize>(
        &self,
        dims: [usize; N],
        values: &[T],
    ) -> Result<Tensor<N>, Error> {
        let tensor = Tensor::contiguous(DevicePtr::NULL, dims);
        if tensor.elements() != values.len() {
            return Err(Error::Tensor(TensorError {
                tensor: "values",
                wanted: format!("{} elements (shape {dims:?})", tensor.elements()),
                given: values.len().to_string(),
            }));
        }
        let bytes = bytemuck::cast_slice(values);
        let at = self.alloc(bytes.len() as u64)?;
        self.upload(at, bytes)?;
        Ok(Tensor { at, ..tensor })
    }

    /// Copies the elements of a tensor without gaps, each a `T`, from the device. Synchronises as
    /// [`download`](Device::download) does.
    ///
    /// # Errors
    /// [`Error::Tensor`] if it has gaps; [`Error::MemoryTooShort`] if its elements are smaller than a `T`;
    /// what the device reports.
    pub fn download_tensor<T: Pod, const N: usize>(
        &self,
        tensor: &Tensor<N>,
    ) -> Result<Vec<T>, Error> {
        if !tensor.is_contiguous() {
            return Err(Error::Tensor(TensorError {
                tensor: "tensor",
                wanted: "no gaps".to_owned(),
                given: format!("strides {:?} (shape {:?})", tensor.strides, tensor.dims),
            }));
        }
        let bytes = (tensor.elements() as u64).saturating_mul(size_of::<T>() as u64);
        tensor.at.require("download", bytes)?;
        let mut values = vec![T::zeroed(); tensor.elements()];
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

/// How the ranks of a group reach each other. One value a process, for all its local ranks.
///
/// # Safety
/// Kernels work with what a fabric gives, and nothing checks it there. An implementation promises that
/// - [`ranks`](Self::ranks), [`local_ranks`](Self::local_ranks) and [`device`](Self::device) always
///   give the same;
/// - each window of [`alloc_windows`](Self::alloc_windows) is memory that the device of its rank
///   may read and write, of as many bytes as its value says, and that nothing else uses until
///   [`free_windows`](Self::free_windows);
/// - those of [`peer_windows`](Self::peer_windows) are memory that the device of `rank` may read
///   and write, of as many bytes as their values say, for as long as the window of the rank that
///   each is of;
/// - [`reaches_other_nodes`](Self::reaches_other_nodes) is true only where the kernels' calls for
///   ranks of other nodes work on the devices, and know the ranks by the same numbers and the
///   windows by the same addresses;
/// - [`all_gather`](Self::all_gather) and [`barrier`](Self::barrier) give `Ok` only after every
///   process has called them;
/// - all that it gave stays as it is until it is freed, closed or dropped.
pub unsafe trait Fabric: Send + Sync {
    /// For people: "local", "nvshmem", "simulated".
    fn name(&self) -> &'static str;
    /// Ranks of the whole group.
    fn ranks(&self) -> u32;
    /// The ranks that this process drives, ascending.
    fn local_ranks(&self) -> Vec<Rank>;
    /// The device of a local rank.
    fn device(&self, rank: Rank) -> Result<Arc<dyn Device>, Error>;
    /// The CUDA device of a local rank, for what [`Device`] does not have: graphs and events.
    #[cfg(feature = "cuda")]
    fn cuda(&self, _rank: Rank) -> Option<Arc<crate::cuda::CudaDevice>> {
        None
    }
    /// Whether ranks of other nodes can be reached at all.
    fn reaches_other_nodes(&self) -> bool;
    /// Every rank's `value`, by rank. Local ranks of one process pass the same. Collective.
    fn all_gather(&self, value: u64) -> Result<Vec<u64>, Error>;
    /// Waits for every process of the group. Collective.
    fn barrier(&self) -> Result<(), Error>;
    /// Allocates one window of `bytes` for each local rank, in the order of
    /// [`local_ranks`](Self::local_ranks). Collective.
    fn alloc_windows(&self, bytes: u64) -> Result<Vec<DevicePtr>, Error>;
    /// Each rank's window as `rank` addresses it; its own window's address for ranks of other
    /// nodes. `windows` is what [`alloc_windows`](Self::alloc_windows) gave.
    fn peer_windows(
        &self,
        rank: Rank,
        windows: &[DevicePtr],
        shape: &Shape,
    ) -> Result<Vec<DevicePtr>, Error>;
    /// Frees them. Collective.
    ///
    /// # Safety
    /// [`alloc_windows`](Self::alloc_windows) gave them, and no kernel of any rank uses them any more.
    unsafe fn free_windows(&self, windows: &[DevicePtr]) -> Result<(), Error>;
    /// Leaves the group, after all windows were freed or leaked. Collective.
    ///
    /// # Safety
    /// No communicator over this fabric, of whichever group, is open, and no graph of one is
    /// launched any more.
    unsafe fn close(&self) -> Result<(), Error> {
        Ok(())
    }
}
