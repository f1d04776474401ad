//! How a group of GPUs is made.

use crate::Kernels;

/// What a group of GPUs is made with, besides its ranks.
///
/// ```no_run
/// use ferry::{Group, GroupOptions};
///
/// # fn main() -> Result<(), ferry::Error> {
/// // Four ranks on one GPU, for a machine that has no more.
/// let group = Group::local_with(&[0; 4], &GroupOptions {
///     share_gpus: true,
///     ..GroupOptions::default()
/// })?;
/// # group.close()
/// # }
/// ```
#[derive(Clone, Debug, Default)]
pub struct GroupOptions {
    /// The kernels of this process's devices. All processes give the same.
    pub kernels: Kernels,
    /// Whether several ranks may be on one GPU. Without, a GPU that two ranks have is refused
    /// ([`Error::DeviceListedTwice`](crate::Error), [`Error::GpuShared`](crate::Error)), as it is mostly a
    /// mistake. All ranks on a GPU say so.
    pub share_gpus: bool,
}
