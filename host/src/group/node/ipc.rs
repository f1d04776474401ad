//! Device memory that other processes of this machine map: CUDA IPC handles.

use std::ffi::c_int;
use std::sync::Arc;

use ferry_layout::Rank;

use crate::cuda::error::{check, check_about};
use crate::cuda::sys::{self, CUdevice, IpcMemHandle};
use crate::cuda::{CudaDevice, device_count};
use crate::device::Device;
use crate::device::sharing::own_gpu::Gpu;
use crate::error::{CudaError, Error, NodeError};
use crate::group::node::exchange::{Extent, Share, require_whole};
use crate::group::node::introduction::Place;
use crate::group::options::GroupOptions;
use crate::tensor::handles::DevicePtr;

/// Windows are a multiple of this size, in bytes: the driver puts several smaller ones into one
/// piece of memory, and a handle shares the whole piece. Whether a window is a piece of its own is checked
/// when it is shared.
const PIECE_BYTES: u64 = 2 << 20;

/// This process's GPU.
pub(crate) struct Ipc {
    device: Arc<CudaDevice>,
    share_gpus: bool,
}

impl Ipc {
    /// Opens device number `ordinal` with the options' kernels. Synchronizes.
    ///
    /// # Errors
    /// Those of [`CudaDevice::open_with`].
    pub(crate) fn open(ordinal: usize, options: &GroupOptions) -> Result<Self, Error> {
        let device = Arc::new(CudaDevice::open_with(ordinal, &options.kernels)?);
        let share_gpus = options.share_gpus;
        Ok(Self { device, share_gpus })
    }
}

impl Share for Ipc {
    fn device(&self) -> Arc<dyn Device> {
        self.device.clone()
    }

    fn cuda(&self) -> Option<Arc<CudaDevice>> {
        Some(self.device.clone())
    }

    fn place(&self) -> Result<Place, Error> {
        let terms = self.device.terms(self.share_gpus)?;
        let place = Place::here(self.device.uuid()?, terms);
        if self.device.context().is_part()? {
            let device = place.gpu.name();
            return Err(Error::Node(NodeError::PartOfGpu { device }));
        }
        Ok(place)
    }

    /// Accepts a GPU that this process does not see: mapping its memory will tell. A GPU reaches its own
    /// memory, and is no peer of itself.
    fn require_access(&self, rank: Rank, peer: Rank, gpu: &Gpu) -> Result<(), Error> {
        let own = Gpu::here(self.device.uuid()?);
        if own == *gpu {
            return Ok(());
        }
        let (Some(from), Some(to)) = (visible(own.uuid)?, visible(gpu.uuid)?) else {
            return Ok(());
        };
        let mut can = 0;
        // SAFETY: `can` is a live integer, and both devices exist.
        check("cuDeviceCanAccessPeer", unsafe {
            sys::cuDeviceCanAccessPeer(&mut can, from, to)
        })?;
        if can != 0 {
            return Ok(());
        }
        Err(Error::Node(NodeError::NoPeerAccess {
            rank,
            peer,
            device: own.name(),
            peer_device: gpu.name(),
        }))
    }

    fn alloc(&self, bytes: u64) -> Result<DevicePtr, Error> {
        // The driver refuses a size that is too large to be rounded up.
        let whole = bytes.max(1).checked_next_multiple_of(PIECE_BYTES);
        self.device.alloc(whole.unwrap_or(bytes))
    }

    unsafe fn free(&self, window: DevicePtr) -> Result<(), Error> {
        // SAFETY: `alloc` got it from the device, and nothing uses it any more: documented on `Share::free`.
        unsafe { self.device.free(window) }
    }

    fn export(&self, rank: Rank, window: DevicePtr) -> Result<Vec<u8>, Error> {
        let _current = self.device.enter()?;
        let (at, bytes) = (window.address(), window.bytes());
        require_whole(rank, rank, Extent { at, bytes }, allocation(at)?)?;
        let mut handle = IpcMemHandle([0; 64]);
        // SAFETY: `handle` is a live value of the driver's type; the driver refuses an address that
        // it has not allocated.
        let code = unsafe { sys::cuIpcGetMemHandle(&mut handle, window.address()) };
        let about = || self.device.name();
        check_about("cuIpcGetMemHandle", code, about)
            .map_err(|error| refused(error, |source| NodeError::NotShared { rank, source }))?;
        Ok(handle.0.to_vec())
    }

    unsafe fn map(
        &self,
        rank: Rank,
        peer: Rank,
        handle: &[u8],
        bytes: u64,
    ) -> Result<DevicePtr, Error> {
        let mut whole = IpcMemHandle([0; 64]);
        let wrong = crate::group::job::wrong_length(peer.0 as usize, handle.len(), whole.0.len());
        whole.0 = handle.try_into().map_err(|_| wrong)?;
        let _current = self.device.enter()?;
        let mut at = 0;
        // SAFETY: `at` is a live integer, the device's context is current, and `handle` is another
        // process's (documented on `Share::map`); the driver refuses one that is not.
        let code = unsafe {
            sys::cuIpcOpenMemHandle_v2(&mut at, whole, sys::IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        };
        let about = || format!("{bytes} bytes on {}", self.device.name());
        let not_mapped = |source| NodeError::NotMapped { rank, peer, source };
        check_about("cuIpcOpenMemHandle", code, about)
            .map_err(|error| refused(error, not_mapped))?;
        let window = Extent { at, bytes };
        let whole = allocation(at).and_then(|found| require_whole(rank, peer, window, found));
        let bytes = whole.inspect_err(|_| {
            // The first error says more.
            // SAFETY: it was mapped above, and nobody else has its address.
            let _ = unsafe { sys::cuIpcCloseMemHandle(at) };
        })?;
        // SAFETY: the driver reports that many bytes at this address. They stay until `unmap`:
        // the context is never released.
        Ok(unsafe { DevicePtr::new(at, bytes) })
    }

    unsafe fn unmap(&self, mapped: DevicePtr) -> Result<(), Error> {
        let _current = self.device.enter()?;
        // SAFETY: `map` got it from the driver in this context, and nothing uses it any more: documented on
        // `Share::unmap`.
        check("cuIpcCloseMemHandle", unsafe {
            sys::cuIpcCloseMemHandle(mapped.address())
        })
    }

    fn drain(&self) -> Result<(), Error> {
        self.device.synchronize_all()
    }
}

/// The allocation that `at` is in. The context is current.
fn allocation(at: u64) -> Result<Extent, Error> {
    let (mut base, mut bytes) = (0, 0);
    // SAFETY: both numbers are live; the driver refuses an address that is not its own.
    check("cuMemGetAddressRange", unsafe {
        sys::cuMemGetAddressRange_v2(&mut base, &mut bytes, at)
    })?;
    let bytes = bytes as u64;
    Ok(Extent { at: base, bytes })
}

/// Converts an error of the driver by `of`.
fn refused(error: Error, of: impl FnOnce(CudaError) -> NodeError) -> Error {
    match error {
        Error::Cuda(source) => Error::Node(of(source)),
        other => other,
    }
}

/// The device with this identifier, if this process sees it. Opens none.
fn visible(uuid: [u8; 16]) -> Result<Option<CUdevice>, Error> {
    for ordinal in 0..device_count()? {
        let (mut device, mut found) = (0, [0; 16]);
        // SAFETY: `device` is a live integer; there are more devices than `ordinal`.
        check("cuDeviceGet", unsafe {
            sys::cuDeviceGet(&mut device, ordinal as c_int)
        })?;
        // SAFETY: `found` is a live array of `CUuuid`'s size, and the device exists.
        check("cuDeviceGetUuid", unsafe {
            sys::cuDeviceGetUuid_v2(&mut found, device)
        })?;
        if found == uuid {
            return Ok(Some(device));
        }
    }
    Ok(None)
}
