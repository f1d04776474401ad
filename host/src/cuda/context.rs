//! The driver, a device's primary context, and making it current.

use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ptr;

use cust::context::{Context, ContextHandle};
use cust::device::{Device, DeviceAttribute};

use super::error::{check, error, of_cust};
use super::sys;
use crate::Error;

/// Initialises the driver and counts its devices.
///
/// # Errors
/// [`Error::LibraryMissing`] where only a library to link with was found, [`Error::Cuda`].
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
pub(super) fn driver_version() -> Result<String, Error> {
    let mut version = 0;
    // SAFETY: `version` is a live integer.
    check("cuDriverGetVersion", unsafe {
        sys::cuDriverGetVersion(&mut version)
    })?;
    Ok(format!("{}.{}", version / 1000, version % 1000 / 10))
}

/// A device's primary context, the one that the CUDA runtime and other libraries use as well.
///
/// It is retained for the life of the process: addresses and streams are plain values, which safe
/// code may use after the last device was dropped, and with the context their memory and streams
/// would go.
pub(super) struct PrimaryContext {
    pub(super) device: Device,
    /// Dropped, it would be released.
    context: ManuallyDrop<Context>,
}

impl PrimaryContext {
    /// Retains the primary context of device number `ordinal`. The thread's current context
    /// stays what it was.
    pub(super) fn retain(ordinal: usize) -> Result<Self, Error> {
        let devices = device_count()?;
        let missing = Error::NoSuchDevice {
            device: ordinal,
            devices,
        };
        let Ok(number) = u32::try_from(ordinal) else {
            return Err(missing);
        };
        if ordinal >= devices {
            return Err(missing);
        }
        let device = Device::get_device(number).map_err(|error| of_cust("cuDeviceGet", error))?;
        // `Context::new` puts its context in the place of the current one.
        let before = current()?;
        let retained =
            Context::new(device).map_err(|error| of_cust("cuDevicePrimaryCtxRetain", error));
        // SAFETY: `before` was current on this thread a moment ago, or is null for none.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(before) })?;
        Ok(Self {
            device,
            context: ManuallyDrop::new(retained?),
        })
    }

    /// The driver's handle.
    pub(super) fn raw(&self) -> sys::CUcontext {
        self.context.get_inner()
    }

    /// Makes the context current on this thread until the guard is dropped.
    pub(super) fn enter(&self) -> Result<Current, Error> {
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

    /// An attribute of the device.
    pub(super) fn attribute(&self, attribute: DeviceAttribute) -> Result<u32, Error> {
        let value = self
            .device
            .get_attribute(attribute)
            .map_err(|error| of_cust("cuDeviceGetAttribute", error))?;
        Ok(u32::try_from(value).unwrap_or(0))
    }

    /// The device's name: "NVIDIA H200".
    pub(super) fn device_name(&self) -> Result<String, Error> {
        self.device
            .name()
            .map_err(|error| of_cust("cuDeviceGetName", error))
    }

    /// What no other device has; of a part of a GPU, the part's.
    pub(super) fn uuid(&self) -> Result<[u8; 16], Error> {
        let mut uuid = [0; 16];
        // SAFETY: `uuid` is a live array of `CUuuid`'s size, and the device exists.
        check("cuDeviceGetUuid", unsafe {
            sys::cuDeviceGetUuid_v2(&mut uuid, self.device.as_raw())
        })?;
        Ok(uuid)
    }

    /// Whether this device can address the memory of `peer`.
    pub(super) fn can_access(&self, peer: &Self) -> Result<bool, Error> {
        let mut can = 0;
        // SAFETY: `can` is a live integer, and both devices exist.
        check("cuDeviceCanAccessPeer", unsafe {
            sys::cuDeviceCanAccessPeer(&mut can, self.device.as_raw(), peer.device.as_raw())
        })?;
        Ok(can != 0)
    }
}

fn current() -> Result<sys::CUcontext, Error> {
    let mut context = ptr::null_mut();
    // SAFETY: `context` is a live pointer to write to.
    check("cuCtxGetCurrent", unsafe {
        sys::cuCtxGetCurrent(&mut context)
    })?;
    Ok(context)
}

/// Puts the thread's context back when dropped. Stays on its thread.
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
            // has popped. It fails only where the driver has shut down; nothing is left to do.
            let _ = unsafe { sys::cuCtxPopCurrent_v2(&mut popped) };
        }
    }
}
