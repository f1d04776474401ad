//! Options of groups of GPUs.

use std::path::PathBuf;

#[cfg(feature = "cuda")]
use crate::device::kernels::Kernels;

/// Options of a group of GPUs: its kernels, whether ranks share GPUs, whether its links are checked, and the
/// path of NVSHMEM's library.
///
/// ```no_run
/// use ferry::{Group, GroupOptions};
///
/// # fn main() -> Result<(), ferry::Error> {
/// // Four ranks on one GPU, for a machine that has no more.
/// let group = Group::local(&[0; 4], &GroupOptions {
///     share_gpus: true,
///     ..GroupOptions::default()
/// })?;
/// # group.close()
/// # }
/// ```
#[derive(Clone, Debug, Default)]
pub struct GroupOptions {
    /// The kernels of this process's devices. All processes must use the same. Needs the feature `cuda`.
    #[cfg(feature = "cuda")]
    pub kernels: Kernels,
    /// Whether several ranks may be on one GPU: for machines with fewer GPUs than ranks, to develop and to
    /// test. Otherwise a GPU with two ranks is refused ([`Error::DeviceListedTwice`](crate::Error),
    /// [`Error::GpuShared`](crate::Error)), as it is mostly a mistake. All ranks on a GPU must set it.
    ///
    /// Each takes a [part](crate::device::GpuRanks::limit) of the GPU's multiprocessors, and there are
    /// [rules](crate::Communicator#ranks-that-share-a-gpu) for kernels at one time.
    ///
    /// In a process with several ranks on a GPU, streams in one hardware queue wait for each other: set
    /// `CUDA_DEVICE_MAX_CONNECTIONS=32` before anything uses the driver, and let no more streams than that
    /// have kernels at work that wait. As the driver cannot be asked how many queues it made, the variable
    /// is read when the group is made, only for a warning if it says fewer.
    ///
    /// Processes on one GPU run side by side under MPS (`nvidia-cuda-mps-control -d`, before all of them;
    /// the driver is asked whether a process is its client). Without MPS, those of a node group take turns,
    /// so that a kernel waits milliseconds for its peers, with a warning, and `Group::nvshmem` refuses
    /// ([`SharedGpuError::NeedsMps`](crate::error::SharedGpuError)). Side by side, there are at most as many
    /// ranks as multiprocessors ([`SharedGpuError::TooManyRanks`](crate::error::SharedGpuError)).
    pub share_gpus: bool,
    /// Whether the [links between all ranks are checked](crate::Group::check_links) when the group is made,
    /// which fails with [`LinksError::Bad`](crate::error::LinksError) if one is bad, and over NVSHMEM also if
    /// ranks do not map each other's memory. All processes must set it alike: the check is collective. Off by
    /// default.
    pub check_links: bool,
    /// Path of the NVSHMEM host library, only for `Group::nvshmem`; `None` for the loader's usual places.
    pub nvshmem_library: Option<PathBuf>,
}
