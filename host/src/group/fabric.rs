//! The trait of fabrics between devices. Four implementations: the local and the node
//! one (feature `cuda`), the NVSHMEM one (feature `nvshmem`), and the simulator.

use std::sync::Arc;

use ferry_layout::{Rank, Shape};

use crate::device::Device;
use crate::device::loaded_kernels::LoadedKernels;
use crate::device::sharing::gpu_ranks::GpuRanks;
use crate::error::Error;
use crate::tensor::handles::DevicePtr;

/// The connection between the ranks of a group. One value per process, for all its local ranks.
///
/// # Safety
/// Kernels use the memory of a fabric unchecked. An implementation promises that
/// - [`ranks`](Self::ranks), [`local_ranks`](Self::local_ranks) and [`device`](Self::device) always
///   return the same;
/// - each window of [`alloc_windows`](Self::alloc_windows) is memory that the device of its rank
///   may read and write, of as many bytes as its value says, and that nothing else uses until
///   [`free_windows`](Self::free_windows);
/// - those of [`peer_windows`](Self::peer_windows) are memory that the device of `rank` may read
///   and write, of as many bytes as their values say, for as long as the window of the rank that
///   each belongs to;
/// - [`reaches_other_nodes`](Self::reaches_other_nodes) is true only if the kernels' calls for
///   ranks of other nodes work on the devices, and know the ranks by the same numbers and the
///   windows by the same addresses;
/// - [`all_gather`](Self::all_gather) and [`barrier`](Self::barrier) return `Ok` only after every
///   process has called them;
/// - its devices and windows stay as they are until they are freed, closed or dropped.
pub unsafe trait Fabric: Send + Sync {
    /// Name in messages: "local", "node", "nvshmem", "simulated".
    fn name(&self) -> &'static str;
    /// Number of ranks of the whole group.
    fn ranks(&self) -> u32;
    /// The ranks that this process drives, ascending.
    fn local_ranks(&self) -> Vec<Rank>;
    /// The device of a local rank.
    fn device(&self, rank: Rank) -> Result<Arc<dyn Device>, Error>;
    /// The CUDA device of a local rank, for graphs and events, which [`Device`] does not have.
    #[cfg(feature = "cuda")]
    fn cuda(&self, _rank: Rank) -> Option<Arc<crate::cuda::CudaDevice>> {
        None
    }
    /// The GPU of `rank`, and the ranks of the group on it, the same in every process. `None`
    /// if ranks have no GPU, as in the simulator, or none is ever shared.
    fn gpu_ranks(&self, _rank: Rank) -> Option<&GpuRanks> {
        None
    }
    /// [`Device::kernels_with_options`] of a local rank's device, ready for this fabric. Synchronizes.
    fn kernels_with_options(
        &self,
        rank: Rank,
        shape: Option<&Shape>,
    ) -> Result<LoadedKernels, Error> {
        self.device(rank)?.kernels_with_options(shape)
    }
    /// [`Device::kernels_with_rows`] of a local rank's device, ready for this fabric. Synchronizes.
    fn kernels_with_rows(&self, rank: Rank, shape: Option<&Shape>) -> Result<LoadedKernels, Error> {
        self.device(rank)?.kernels_with_rows(shape)
    }
    /// Whether ranks of other nodes can be reached.
    fn reaches_other_nodes(&self) -> bool;
    /// Returns every rank's `value`, by rank. Local ranks of one process pass the same. Collective.
    fn all_gather(&self, value: u64) -> Result<Vec<u64>, Error>;
    /// Waits for every process of the group. Collective.
    fn barrier(&self) -> Result<(), Error>;
    /// Allocates one window of `bytes` for each local rank, in the order of
    /// [`local_ranks`](Self::local_ranks). Collective.
    fn alloc_windows(&self, bytes: u64) -> Result<Vec<DevicePtr>, Error>;
    /// Addresses of each rank's window on `rank`; for ranks of other nodes that of its own window. `windows`
    /// are those of [`alloc_windows`](Self::alloc_windows).
    fn peer_windows(
        &self,
        rank: Rank,
        windows: &[DevicePtr],
        shape: &Shape,
    ) -> Result<Vec<DevicePtr>, Error>;
    /// Frees windows. Collective.
    ///
    /// # Safety
    /// [`alloc_windows`](Self::alloc_windows) returned them, and no kernel of any rank uses them any more.
    unsafe fn free_windows(&self, windows: &[DevicePtr]) -> Result<(), Error>;
    /// Leaves the group, after all windows were freed or leaked. Collective.
    ///
    /// # Safety
    /// No communicator over this fabric is open, and no graph of one is launched any more.
    unsafe fn close(&self) -> Result<(), Error> {
        Ok(())
    }
}
