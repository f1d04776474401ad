//! Checks of other libraries' contexts.

use std::ptr;

use super::CudaDevice;
use super::context::{self, PrimaryContext};
use super::sys::CUcontext;
use crate::device::Device;
use crate::error::Error;

impl CudaDevice {
    /// Checks that a context is the device's primary one.
    ///
    /// # Safety
    /// The context is live, or null.
    pub(crate) unsafe fn require_context(
        &self,
        what: &'static str,
        context: CUcontext,
    ) -> Result<(), Error> {
        if context.is_null() {
            return Err(self.other(what, "no device".to_owned()));
        }
        let own: &PrimaryContext = self.context();
        if ptr::eq(context, own.raw()) {
            return Ok(());
        }
        // SAFETY: the context is live: documented on this function, and it is not null.
        let ordinal = unsafe { context::ordinal_of(context) }?;
        let of = if usize::try_from(ordinal) == Ok(self.ordinal()) {
            "another context than the primary one of "
        } else {
            ""
        };
        Err(self.other(what, format!("{of}cuda:{ordinal}")))
    }

    pub(super) fn other(&self, what: &'static str, owner: String) -> Error {
        let device = self.name();
        Error::OtherDevice {
            what,
            owner,
            device,
        }
    }
}
