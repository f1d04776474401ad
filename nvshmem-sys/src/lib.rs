//! Raw bindings of NVSHMEM, in two halves that share nothing but the version.
//!
//! - Feature `host` (default): [`HostLibrary`] loads `libnvshmem_host.so.3` at run time, so
//!   nothing needs NVSHMEM to build, or to run without it.
//! - Feature `device`: the `device` module declares the functions that kernels call. Whoever
//!   links the kernels links NVSHMEM's bitcode; this crate links nothing.
//!
//! Everything under `generated` comes from `cargo xtask bindgen` and holds only what is used.

#![no_std]
#[cfg(feature = "host")]
extern crate std;

#[cfg(feature = "device")]
pub mod device;
#[cfg(feature = "host")]
mod error;
#[cfg(feature = "host")]
pub mod host;

#[cfg(feature = "host")]
pub use error::{CallError, LoadError};
#[cfg(feature = "host")]
pub use host::{HostLibrary, UniqueId};

/// The version whose device code is linked into the kernels: major, minor, patch.
///
/// The device code reads a state that the host library writes, so the two must be one version.
pub const LINKED_VERSION: (u32, u32, u32) = (3, 4, 5);
