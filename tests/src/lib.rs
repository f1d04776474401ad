//! Runs Ferry on any group and compares it with the oracle. The program `ferry-tests` and the
//! integration tests are built on it.

pub mod bench;
pub mod damaged;
pub mod demo;
pub mod explain;
pub mod formats;
pub mod gpu;
pub mod group;
pub mod halves;
pub mod kernel_files;
pub mod local;
#[cfg(feature = "mpi")]
mod mpi_bootstrap;
#[cfg(feature = "cuda")]
pub mod probes;
pub mod replay;
pub mod session;
pub mod sharing;
pub mod silu;
pub mod simulated;
pub mod soak;
pub mod verify;
