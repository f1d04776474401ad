//! What Ferry asks of a device and of the fabric between devices.
//!
//! Two implementations: CUDA (feature `cuda`) and the simulator. Addresses and
//! streams are raw numbers, so that any engine's tensors and streams can be passed in.

use std::sync::Arc;

pub use ferry_layout::{CombineArgs, DispatchArgs, FaultPage, SiluArgs};
use ferry_layout::{Kernel, Rank, Shape};

use crate::Error;

/// A device address (`CUdeviceptr`), or an address in the simulator's memory. 0 is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct DevicePtr(pub u64);

impl DevicePtr {
    /// No address.
    pub const NULL: Self = Self(0);

    /// The address `bytes` further on.
    pub const fn plus(self, bytes: u64) -> Self {
        Self(self.0 + bytes)
    }
}

/// A stream (`CUstream` as a number; 0 is the default stream). The simulator has one a rank and
/// ignores it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Stream(pub u64);

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

/// Which of a device's kernels: those for every shape, or those that [`Device::kernels`] gave.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kernels(pub u32);

impl Kernels {
    /// For every shape.
    pub const GENERAL: Self = Self(0);
}

/// A kernel launch.
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    /// Which kernel.
    pub kernel: Kernel,
    /// Of which kernels.
    pub kernels: Kernels,
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
pub trait Device: Send + Sync {
    /// For people: "NVIDIA H200 (cuda:0)".
    fn name(&self) -> String;
    /// Allocates `bytes` of device memory, not cleared. Synchronises.
    fn alloc(&self, bytes: u64) -> Result<DevicePtr, Error>;
    /// Frees what [`alloc`](Self::alloc) gave. Synchronises.
    fn free(&self, at: DevicePtr) -> Result<(), Error>;
    /// Copies to the device. Synchronises.
    fn upload(&self, to: DevicePtr, bytes: &[u8]) -> Result<(), Error>;
    /// Copies from the device. Synchronises, but not with other streams than its own: call
    /// [`synchronize`](Self::synchronize) on theirs first.
    fn download(&self, from: DevicePtr, bytes: &mut [u8]) -> Result<(), Error>;
    /// Sets `bytes` bytes to `value`. Synchronises.
    fn fill(&self, at: DevicePtr, value: u8, bytes: u64) -> Result<(), Error>;
    /// Creates a stream.
    fn stream(&self) -> Result<Stream, Error>;
    /// Waits for everything enqueued on `stream`.
    fn synchronize(&self, stream: Stream) -> Result<(), Error>;
    /// Kernels for `shape` alone, compiled unless they are there; the general ones where the device makes
    /// no others. Synchronises.
    fn kernels(&self, shape: &Shape) -> Result<Kernels, Error> {
        let _ = shape;
        Ok(Kernels::GENERAL)
    }
    /// Enqueues a kernel. Does not synchronise, allocate or compile.
    fn launch(&self, launch: &Launch) -> Result<(), Error>;
    /// Allocates a fault page that host and device share, empty.
    fn fault_page(&self) -> Result<Box<dyn SharedPage>, Error>;
}

/// A [`FaultPage`] that the device writes and the host reads without asking the device.
pub trait SharedPage: Send + Sync {
    /// Where the device writes it.
    fn address(&self) -> DevicePtr;
    /// What stands there now: one record, or two numbers that differ while one is being written.
    fn read(&self) -> FaultPage;
    /// Tells the device that record `number` was told, so that the next fault of the same kind is recorded.
    fn acknowledge(&self, number: u64);
}

/// How the ranks of a group reach each other. One value a process, for all its local ranks.
pub trait Fabric: Send + Sync {
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
    fn free_windows(&self, windows: &[DevicePtr]) -> Result<(), Error>;
    /// Leaves the group, after all windows were freed; nothing else may be called then.
    /// Collective.
    fn close(&self) -> Result<(), Error> {
        Ok(())
    }
}
