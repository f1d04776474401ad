//! The driver's library.

use std::error::Error as _;
use std::ffi::{c_int, c_uint};
use std::mem::ManuallyDrop;
use std::path::PathBuf;

use crate::error::{DriverError, Error};

/// Name of the library. The driver installs this file; the one without a number is for linking.
pub(super) const NAME: &str = "libcuda.so.1";

/// Remedy if there is no driver.
const ADVICE: &str =
    "install the NVIDIA driver, or give the container its GPUs, as `docker run --gpus all` does";

/// Reason why the driver's functions cannot be called.
#[derive(Clone, Debug)]
pub(crate) enum NotLoaded {
    /// The loader does not find the library, or refuses it.
    Library {
        /// Name that it was asked for.
        name: String,
        /// Its message.
        reason: String,
    },
    /// The library has no such function.
    Function {
        /// The function.
        function: &'static str,
        /// The CUDA version of the driver.
        driver: String,
    },
}

impl From<NotLoaded> for Error {
    fn from(why: NotLoaded) -> Self {
        match why {
            NotLoaded::Library { name, reason } => Self::LibraryMissing {
                library: "the CUDA driver",
                tried: vec![PathBuf::from(name)],
                reason: format!("{reason}; {ADVICE}"),
            },
            NotLoaded::Function { function, driver } => {
                DriverError::TooOld { function, driver }.into()
            }
        }
    }
}

/// The loaded library. Never unloaded: the driver keeps threads and exit handlers.
pub(super) struct Library(ManuallyDrop<libloading::Library>);

impl Library {
    /// Loads the library that the system's loader finds by `name`.
    pub(super) fn load(name: &str) -> Result<Self, NotLoaded> {
        // SAFETY: the driver's library initializers do not touch this program's state.
        let library = unsafe { libloading::Library::new(name) };
        let library = library.map_err(|error| NotLoaded::Library {
            name: name.to_owned(),
            reason: said_by_the_loader(&error),
        })?;
        Ok(Self(ManuallyDrop::new(library)))
    }

    /// Looks up a function of the library.
    ///
    /// # Safety
    /// `F` is the type of a pointer to the function, as the driver's header declares it.
    pub(super) unsafe fn function<F: Copy>(&self, name: &'static str) -> Result<F, NotLoaded> {
        // SAFETY: `F` is the function's type: documented on this function.
        let found = unsafe { self.0.get::<F>(name) };
        let found = found.map_err(|_| NotLoaded::Function {
            function: name,
            driver: self.version(),
        })?;
        Ok(*found)
    }

    /// The CUDA version that the driver supports, for an error's text.
    fn version(&self) -> String {
        type DriverGetVersion = unsafe extern "C" fn(version: *mut c_int) -> c_uint;
        // SAFETY: every driver has the function with this signature.
        let function = unsafe { self.0.get::<DriverGetVersion>("cuDriverGetVersion") };
        let mut version = 0;
        // SAFETY: `version` is a live integer. The driver need not be initialized.
        match function.map(|function| unsafe { function(&mut version) }) {
            Ok(0) => dotted(version),
            _ => "of an unknown version".to_owned(),
        }
    }
}

/// The loader's message, which is the source of the error.
fn said_by_the_loader(error: &libloading::Error) -> String {
    match error.source() {
        Some(source) => source.to_string(),
        None => error.to_string(),
    }
}

/// A CUDA version as people write it: "13.0".
pub(super) fn dotted(version: c_int) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}
