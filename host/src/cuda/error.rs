//! Driver results as errors.

use std::ffi::CStr;
use std::ptr;

use super::library::{NAME, NotLoaded};
use super::sys::{self, Code};
use crate::error::{CudaError, Error};

/// Turns the code that a driver function returned into a result.
pub(crate) fn check(call: &'static str, code: Code) -> Result<(), Error> {
    check_about(call, code, String::new)
}

/// [`check`] with the subject of the call, `detail`.
pub(crate) fn check_about(
    call: &'static str,
    code: Code,
    detail: impl FnOnce() -> String,
) -> Result<(), Error> {
    if code == sys::SUCCESS {
        Ok(())
    } else {
        Err(error(call, code, detail()))
    }
}

/// The error of a call that did not return success.
pub(crate) fn error(call: &'static str, code: Code, detail: String) -> Error {
    if code == sys::STUB_LIBRARY {
        return stub_found();
    }
    if let (sys::NOT_LOADED, Some(why)) = (code, sys::why_not_loaded()) {
        return why.into();
    }
    let name = name(code);
    Error::Cuda(CudaError {
        call,
        code,
        name,
        detail,
    })
}

fn stub_found() -> Error {
    let reason = "the loader found a library to link with, not a driver".to_owned();
    Error::from(NotLoaded::Library {
        name: NAME.to_owned(),
        reason,
    })
}

/// The driver's name of a code.
fn name(code: Code) -> String {
    let mut name = ptr::null();
    // SAFETY: `name` is a live pointer to write to; the driver accepts any code.
    let known = unsafe { sys::cuGetErrorName(code, &mut name) };
    if known != sys::SUCCESS || name.is_null() {
        return "an error that the driver has no name for".to_owned();
    }
    // SAFETY: the driver returns a static string that ends with a zero byte.
    unsafe { CStr::from_ptr(name) }
        .to_string_lossy()
        .into_owned()
}
