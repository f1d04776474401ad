//! All ranks in one process, over peer access, or on one GPU.

use std::sync::Arc;

use ferry_layout::{Rank, Shape};

use crate::cuda::CudaDevice;
use crate::cuda::context::PrimaryContext;
use crate::cuda::error::check_about;
use crate::cuda::sys;
use crate::device::Device;
use crate::device::sharing::gpu_ranks::GpuRanks;
use crate::device::sharing::own_gpu::{Gpu, Terms, require_own};
use crate::error::Error;
use crate::group::fabric::Fabric;
use crate::group::options::GroupOptions;
use crate::tensor::handles::DevicePtr;

/// GPUs of one machine, all driven by this process; rank `r` is the `r`-th device. Ranks on one GPU are one
/// device.
pub(crate) struct LocalFabric {
    devices: Vec<Arc<CudaDevice>>,
    gpus: Vec<GpuRanks>,
}

impl LocalFabric {
    /// Opens the devices, by number, and lets each address the memory of all others.
    /// Synchronizes.
    ///
    /// # Errors
    /// [`Error::RankCount`], [`Error::DeviceListedTwice`], [`Error::NoPeerAccess`] for the first
    /// two without access, and those of [`CudaDevice::open`].
    pub(crate) fn new(devices: &[usize], options: &GroupOptions) -> Result<Self, Error> {
        require_devices(devices, options.share_gpus)?;
        let mut opened: Vec<Arc<CudaDevice>> = Vec::new();
        for &device in devices {
            // Ranks that share a GPU share its kernels, too.
            let known = opened.iter().find(|known| known.ordinal() == device);
            opened.push(match known {
                Some(known) => known.clone(),
                None => Arc::new(CudaDevice::open_with(device, &options.kernels)?),
            });
        }
        let devices = opened;
        for from in &devices {
            for to in &devices {
                if from.ordinal() != to.ordinal() {
                    enable_access(from, to)?;
                }
            }
        }
        let ranks = devices.iter().map(|device| {
            let terms = Terms {
                multiprocessors: device.multiprocessors(),
                shares: options.share_gpus,
                runs_beside_others: true,
            };
            Ok((Gpu::here(device.uuid()?), terms))
        });
        let gpus = require_own(&ranks.collect::<Result<Vec<_>, Error>>()?)?;
        Ok(Self { devices, gpus })
    }

    /// The CUDA device of `rank`, for graphs and events.
    ///
    /// # Errors
    /// [`Error::NotLocal`].
    pub fn cuda_device(&self, rank: Rank) -> Result<Arc<CudaDevice>, Error> {
        let device = self.devices.get(rank.0 as usize);
        device.cloned().ok_or_else(|| self.not_local(rank))
    }

    fn not_local(&self, rank: Rank) -> Error {
        let local = (0..self.ranks()).collect();
        Error::NotLocal { rank, local }
    }
}

/// Refuses an empty list, and a device that is listed twice unless GPUs are shared.
fn require_devices(devices: &[usize], share_gpus: bool) -> Result<(), Error> {
    if devices.is_empty() {
        return Err(Error::RankCount { ranks: 0 });
    }
    if share_gpus {
        return Ok(());
    }
    for (second, &device) in devices.iter().enumerate() {
        let before = devices.iter().take(second);
        if let Some(first) = before.clone().position(|&other| other == device) {
            return Err(Error::DeviceListedTwice {
                device,
                first,
                second,
            });
        }
    }
    Ok(())
}

fn enable_access(from: &CudaDevice, to: &CudaDevice) -> Result<(), Error> {
    let peer: &PrimaryContext = to.context();
    if !from.context().can_access(peer)? {
        return Err(Error::NoPeerAccess {
            from: from.ordinal(),
            to: to.ordinal(),
        });
    }
    let _current = from.enter()?;
    // SAFETY: both contexts are retained, and that of `from` is current.
    let code = unsafe { sys::cuCtxEnablePeerAccess(peer.raw(), 0) };
    if code == sys::PEER_ACCESS_ALREADY_ENABLED {
        return Ok(());
    }
    check_about("cuCtxEnablePeerAccess", code, || {
        format!("from {} to {}", from.name(), to.name())
    })
}

// SAFETY: each window is memory of its rank's device, in the requested size, and every two devices
// have access to each other's memory, at the same addresses. `reaches_other_nodes` is false,
// and no rank is in another process.
unsafe impl Fabric for LocalFabric {
    fn name(&self) -> &'static str {
        "local"
    }

    fn ranks(&self) -> u32 {
        self.devices.len() as u32
    }

    fn local_ranks(&self) -> Vec<Rank> {
        (0..self.ranks()).map(Rank).collect()
    }

    fn device(&self, rank: Rank) -> Result<Arc<dyn Device>, Error> {
        Ok(self.cuda_device(rank)?)
    }

    fn gpu_ranks(&self, rank: Rank) -> Option<&GpuRanks> {
        GpuRanks::of(&self.gpus, rank)
    }

    fn cuda(&self, rank: Rank) -> Option<Arc<CudaDevice>> {
        self.cuda_device(rank).ok()
    }

    fn reaches_other_nodes(&self) -> bool {
        false
    }

    fn all_gather(&self, value: u64) -> Result<Vec<u64>, Error> {
        Ok(vec![value; self.devices.len()])
    }

    fn barrier(&self) -> Result<(), Error> {
        Ok(())
    }

    fn alloc_windows(&self, bytes: u64) -> Result<Vec<DevicePtr>, Error> {
        let mut windows = Vec::new();
        for device in &self.devices {
            match device.alloc(bytes) {
                Ok(window) => windows.push(window),
                Err(error) => {
                    // The first error says more than one of freeing.
                    // SAFETY: they were allocated above, and nobody else has their addresses.
                    let _ = unsafe { self.free_windows(&windows) };
                    return Err(error);
                }
            }
        }
        Ok(windows)
    }

    /// Addresses are unified: a window has the same one on every device. `shape` has one node.
    fn peer_windows(
        &self,
        rank: Rank,
        windows: &[DevicePtr],
        shape: &Shape,
    ) -> Result<Vec<DevicePtr>, Error> {
        let own = windows.get(rank.0 as usize);
        let own = *own.ok_or_else(|| self.not_local(rank))?;
        let as_seen = |(peer, &window)| {
            if shape.same_node(rank, Rank(peer)) {
                window
            } else {
                own
            }
        };
        Ok((0..).zip(windows).map(as_seen).collect())
    }

    unsafe fn free_windows(&self, windows: &[DevicePtr]) -> Result<(), Error> {
        let mut result = Ok(());
        for (device, &window) in self.devices.iter().zip(windows) {
            // SAFETY: `alloc_windows` got it from this device, and no kernel uses it any more: documented on
            // `Fabric::free_windows`.
            result = result.and(unsafe { device.free(window) });
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_list_and_a_repeated_device_are_refused_before_the_driver_is_asked() {
        assert!(matches!(
            LocalFabric::new(&[], &GroupOptions::default()),
            Err(Error::RankCount { ranks: 0 })
        ));
        let Err(error) = LocalFabric::new(&[3, 1, 3], &GroupOptions::default()) else {
            panic!("a repeated device is accepted");
        };
        let text = error.to_string();
        assert!(
            text.contains("device 3") && text.contains("0 and 2") && text.contains("share_gpus"),
            "{text}"
        );
        require_devices(&[3, 1, 3], true).unwrap();
        assert!(matches!(
            require_devices(&[], true),
            Err(Error::RankCount { ranks: 0 })
        ));
    }
}
