//! Streams and memory of libraries that do not say whose they are.

use std::ffi::c_int;
use std::ptr;

use super::core::raw;
use super::error::check;
use super::{CudaDevice, context, sys};
use crate::error::Error;
use crate::tensor::handles::{DevicePtr, Stream};

impl CudaDevice {
    /// That this thread's current context is the device's primary one.
    pub(crate) fn require_current(&self) -> Result<(), Error> {
        let current = context::current()?;
        // SAFETY: what is current on this thread lives.
        unsafe { self.require_context("this thread's current context", current) }
    }

    /// That a stream is of the device's primary context.
    ///
    /// # Safety
    /// The stream lives.
    pub(crate) unsafe fn require_stream(&self, stream: Stream) -> Result<(), Error> {
        let _current = self.enter()?;
        let mut context = ptr::null_mut();
        // SAFETY: that the stream lives is the caller's promise; `context` is a live pointer to
        // write to.
        check("cuStreamGetCtx", unsafe {
            sys::cuStreamGetCtx(raw(stream), &mut context)
        })?;
        // SAFETY: its stream lives.
        unsafe { self.require_context("the stream", context) }
    }

    /// That memory of the driver's was allocated for this device. Nothing of none.
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
