//! Checks of streams and memory whose device is not known.

use std::ffi::c_int;
use std::ptr;

use super::core::raw;
use super::error::check;
use super::{CudaDevice, context, sys};
use crate::error::Error;
use crate::tensor::handles::{DevicePtr, Stream};

impl CudaDevice {
    /// Checks that this thread's current context is the device's primary one.
    pub(crate) fn require_current(&self) -> Result<(), Error> {
        let current = context::current()?;
        // SAFETY: this thread's current context is live, or null.
        unsafe { self.require_context("this thread's current context", current) }
    }

    /// Checks that a stream belongs to the device's primary context.
    ///
    /// # Safety
    /// The stream is live.
    pub(crate) unsafe fn require_stream(&self, stream: Stream) -> Result<(), Error> {
        let _current = self.enter()?;
        let mut context = ptr::null_mut();
        // SAFETY: the stream is live (documented on this function); `context` is a live pointer to
        // write to.
        check("cuStreamGetCtx", unsafe {
            sys::cuStreamGetCtx(raw(stream), &mut context)
        })?;
        // SAFETY: a live stream's context is live.
        unsafe { self.require_context("the stream", context) }
    }

    /// Checks that the driver's memory at an address was allocated for this device. Accepts empty memory.
    pub(crate) fn require_memory(&self, at: DevicePtr) -> Result<(), Error> {
        if at.bytes() == 0 {
            return Ok(());
        }
        let _current = self.enter()?;
        let mut ordinal: c_int = 0;
        // SAFETY: the attribute is an integer, and `ordinal` is a live one. Any address may be asked
        // about.
        check("cuPointerGetAttribute", unsafe {
            let value = ptr::from_mut(&mut ordinal).cast();
            sys::cuPointerGetAttribute(value, sys::POINTER_DEVICE_ORDINAL, at.address())
        })?;
        if usize::try_from(ordinal) == Ok(self.ordinal()) {
            return Ok(());
        }
        Err(self.other("the memory", format!("cuda:{ordinal}")))
    }
}
