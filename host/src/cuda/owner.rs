//! Whose streams, memory and contexts of other libraries are.

use std::ffi::c_int;
use std::ptr;

use super::CudaDevice;
use super::context::{self, PrimaryContext};
use super::core::raw;
use super::error::check;
use super::sys::{self, CUcontext};
use crate::device::Device;
use crate::{DevicePtr, Error, Stream};

impl CudaDevice {
    /// That this thread's current context is the device's primary one.
    pub(crate) fn require_current(&self) -> Result<(), Error> {
        let current = context::current()?;
        self.require_context("this thread's current context", current)
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
        self.require_context("the stream", context)
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

    /// That a context is the device's primary one.
    fn require_context(&self, what: &'static str, context: CUcontext) -> Result<(), Error> {
        if context.is_null() {
            return Err(self.other(what, "no device".to_owned()));
        }
        let own: &PrimaryContext = self.context();
        if ptr::eq(context, own.raw()) {
            return Ok(());
        }
        let ordinal = context::ordinal_of(context)?;
        let of = if usize::try_from(ordinal) == Ok(self.ordinal()) {
            "another context than the primary one of "
        } else {
            ""
        };
        Err(self.other(what, format!("{of}cuda:{ordinal}")))
    }

    fn other(&self, what: &'static str, owner: String) -> Error {
        let device = self.name();
        Error::OtherDevice {
            what,
            owner,
            device,
        }
    }
}
