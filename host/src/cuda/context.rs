//! The driver, a device's primary context, and making it current.

use std::ffi::{CStr, c_int};
use std::marker::PhantomData;
use std::ptr;

use super::error::{check, error};
use super::library::dotted;
use super::sys::{self, CUcontext, CUdevice};
use crate::error::Error;

/// Initializes the driver and counts its devices.
///
/// # Errors
/// [`Error::LibraryMissing`] without a CUDA driver, [`Error::Driver`], [`Error::Cuda`].
pub fn device_count() -> Result<usize, Error> {
    // SAFETY: takes no pointer; may be called any number of times, from any thread.
    match unsafe { sys::cuInit(0) } {
        sys::NO_DEVICE => return Ok(0),
        sys::SUCCESS => {}
        code => {
            let detail = "the CUDA driver does not start on this machine".to_owned();
            return Err(error("cuInit", code, detail));
        }
    }
    let mut count = 0;
    // SAFETY: `count` is a live integer.
    check("cuDeviceGetCount", unsafe {
        sys::cuDeviceGetCount(&mut count)
    })?;
    Ok(usize::try_from(count).unwrap_or(0))
}

/// The CUDA version that the driver supports, as people write it: "13.0".
pub(crate) fn driver_version() -> Result<String, Error> {
    let mut version = 0;
    // SAFETY: `version` is a live integer.
    check("cuDriverGetVersion", unsafe {
        sys::cuDriverGetVersion(&mut version)
    })?;
    Ok(dotted(version))
}

/// A device's primary context, the one that the CUDA runtime and other libraries use as well.
///
/// It is retained for the life of the process: addresses and streams are plain values that safe
/// code may use after the last device was dropped, and releasing the context would destroy their memory and
/// streams.
pub(crate) struct PrimaryContext {
    device: CUdevice,
    /// Never released.
    context: CUcontext,
}

// SAFETY: a context's handle may be used from any thread.
unsafe impl Send for PrimaryContext {}
// SAFETY: as above; nothing here changes.
unsafe impl Sync for PrimaryContext {}

impl PrimaryContext {
    /// Retains the primary context of device number `ordinal`. The thread's current context
    /// stays what it was.
    pub(crate) fn retain(ordinal: usize) -> Result<Self, Error> {
        let devices = device_count()?;
        let missing = Error::NoSuchDevice {
            device: ordinal,
            devices,
        };
        let Ok(number) = c_int::try_from(ordinal) else {
            return Err(missing);
        };
        if ordinal >= devices {
            return Err(missing);
        }
        let (mut device, mut context) = (0, ptr::null_mut());
        // SAFETY: `device` is a live integer.
        check("cuDeviceGet", unsafe {
            sys::cuDeviceGet(&mut device, number)
        })?;
        // SAFETY: `context` is a live pointer to write to, and the device exists.
        check("cuDevicePrimaryCtxRetain", unsafe {
            sys::cuDevicePrimaryCtxRetain(&mut context, device)
        })?;
        Ok(Self { device, context })
    }

    /// The driver's handle.
    pub(crate) const fn raw(&self) -> CUcontext {
        self.context
    }

    /// Makes the context current on this thread until the guard is dropped.
    pub(crate) fn enter(&self) -> Result<Current, Error> {
        let current = current()?;
        if ptr::eq(current, self.raw()) {
            return Ok(Current::unchanged());
        }
        // SAFETY: the context is retained for the life of the process.
        check("cuCtxPushCurrent", unsafe {
            sys::cuCtxPushCurrent_v2(self.raw())
        })?;
        Ok(Current::pushed())
    }

    /// An attribute of the device, by its number.
    pub(crate) fn attribute(&self, attribute: c_int) -> Result<u32, Error> {
        let mut value = 0;
        // SAFETY: `value` is a live integer, and the device exists.
        check("cuDeviceGetAttribute", unsafe {
            sys::cuDeviceGetAttribute(&mut value, attribute, self.device)
        })?;
        Ok(u32::try_from(value).unwrap_or(0))
    }

    /// The device's name: "NVIDIA H200".
    pub(crate) fn device_name(&self) -> Result<String, Error> {
        let mut name = [0_u8; 256];
        // SAFETY: `name` has `bytes` bytes, and the device exists.
        check("cuDeviceGetName", unsafe {
            let bytes = name.len() as c_int;
            sys::cuDeviceGetName(name.as_mut_ptr().cast(), bytes, self.device)
        })?;
        let name = CStr::from_bytes_until_nul(&name).unwrap_or_default();
        Ok(name.to_string_lossy().into_owned())
    }

    /// Unique identifier of the device; for a part of a GPU, that of the part.
    pub(crate) fn uuid(&self) -> Result<[u8; 16], Error> {
        let mut uuid = [0; 16];
        // SAFETY: `uuid` is a live array of `CUuuid`'s size, and the device exists.
        check("cuDeviceGetUuid", unsafe {
            sys::cuDeviceGetUuid_v2(&mut uuid, self.device)
        })?;
        Ok(uuid)
    }

    /// Whether the device is a part of a GPU (MIG): only parts have an identifier beside the GPU's.
    pub(crate) fn is_part(&self) -> Result<bool, Error> {
        let mut whole = [0; 16];
        // SAFETY: `whole` is a live array of `CUuuid`'s size, and the device exists.
        check("cuDeviceGetUuid", unsafe {
            sys::cuDeviceGetUuid(&mut whole, self.device)
        })?;
        Ok(whole != self.uuid()?)
    }

    /// Whether this process is a client of MPS: only clients can make contexts with some of a GPU's
    /// multiprocessors, and the driver is asked whether this one can.
    pub(crate) fn is_mps_client(&self) -> Result<bool, Error> {
        let mut supported = 0;
        // SAFETY: `supported` is a live integer, and the device exists.
        check("cuDeviceGetExecAffinitySupport", unsafe {
            let kind = sys::EXEC_AFFINITY_SM_COUNT;
            sys::cuDeviceGetExecAffinitySupport(&mut supported, kind, self.device)
        })?;
        Ok(supported != 0)
    }

    /// Whether this device can address the memory of `peer`.
    pub(crate) fn can_access(&self, peer: &Self) -> Result<bool, Error> {
        let mut can = 0;
        // SAFETY: `can` is a live integer, and both devices exist.
        check("cuDeviceCanAccessPeer", unsafe {
            sys::cuDeviceCanAccessPeer(&mut can, self.device, peer.device)
        })?;
        Ok(can != 0)
    }
}

/// The number of a context's device.
///
/// # Safety
/// The context is live.
#[cfg(any(feature = "cust", feature = "cudarc"))]
pub(crate) unsafe fn ordinal_of(context: CUcontext) -> Result<c_int, Error> {
    // SAFETY: the context is live: documented on this function.
    check("cuCtxPushCurrent", unsafe {
        sys::cuCtxPushCurrent_v2(context)
    })?;
    let _pushed = Current::pushed();
    let mut device = 0;
    // SAFETY: `device` is a live integer.
    check("cuCtxGetDevice", unsafe {
        sys::cuCtxGetDevice(&mut device)
    })?;
    Ok(device)
}

/// This thread's current context; null for none.
pub(crate) fn current() -> Result<CUcontext, Error> {
    let mut context = ptr::null_mut();
    // SAFETY: `context` is a live pointer to write to.
    check("cuCtxGetCurrent", unsafe {
        sys::cuCtxGetCurrent(&mut context)
    })?;
    Ok(context)
}

/// Restores the thread's context when dropped. Stays on its thread. Drop the guards of a thread in
/// reverse order, as local variables are: each pops the topmost context, so that in another order the
/// context of another device would be current meanwhile.
#[must_use]
pub struct Current {
    pushed: bool,
    not_send: PhantomData<*const ()>,
}

impl Current {
    const fn unchanged() -> Self {
        Self {
            pushed: false,
            not_send: PhantomData,
        }
    }

    const fn pushed() -> Self {
        Self {
            pushed: true,
            not_send: PhantomData,
        }
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        if self.pushed {
            let mut popped = ptr::null_mut();
            // SAFETY: `popped` is a live pointer, and this thread pushed a context that nobody
            // has popped. It fails only if the driver has shut down; nothing is left to do.
            let _ = unsafe { sys::cuCtxPopCurrent_v2(&mut popped) };
        }
    }
}
