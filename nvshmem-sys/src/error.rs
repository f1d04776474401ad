//! Errors of loading the host library and of its calls.

use core::ffi::c_int;
use std::string::String;

/// Reason why the host library cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The loader did not find the library, or the library lacks a function.
    #[error(
        "cannot load {library}: {source}; get it with \
         `python3 -m pip install nvidia-nvshmem-cu13==3.4.5` and name its lib folder in \
         LD_LIBRARY_PATH, or pass the file's path"
    )]
    Library {
        /// The file or name that could not be loaded.
        library: String,
        /// The loader's error.
        source: libloading::Error,
    },
    /// The library is there, but the kernels were linked with another version.
    #[error(
        "{library} is NVSHMEM {}.{}.{}, but the kernels are linked with NVSHMEM {}.{}.{}; \
         both must be the same",
        found.0, found.1, found.2, linked.0, linked.1, linked.2
    )]
    Version {
        /// The file or name that was loaded.
        library: String,
        /// The library's version.
        found: (u32, u32, u32),
        /// [`LINKED_VERSION`](crate::LINKED_VERSION).
        linked: (u32, u32, u32),
    },
}

/// A call of NVSHMEM that returned a status other than zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{function} failed with status {status}")]
pub struct CallError {
    /// The function.
    pub function: &'static str,
    /// Its status.
    pub status: c_int,
}
