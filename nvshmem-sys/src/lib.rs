//! Raw bindings of NVSHMEM, in two halves that share nothing but the version.
//!
//! - Feature `host` (default): [`HostLibrary`] loads `libnvshmem_host.so.3` at run time, so
//!   nothing needs NVSHMEM to build, or to run without it.
//! - Feature `device`: the `device` module declares the functions that kernels call. The kernels' own build
//!   links NVSHMEM's bitcode; this crate links nothing.
//!
//! Everything under `generated` comes from `cargo xtask bindgen`, limited to the functions in use.

#![no_std]
#[cfg(feature = "host")]
extern crate std;

#[cfg(feature = "device")]
pub mod device;
#[cfg(feature = "host")]
mod error;
#[cfg(feature = "host")]
pub mod host;
mod version;

#[cfg(feature = "host")]
pub use error::{CallError, LoadError};
#[cfg(feature = "host")]
pub use host::{HostLibrary, UniqueId};
pub use version::LINKED_VERSION;
