//! Runs Ferry on any group and compares it with the oracle. The program `ferry-tests` and the
//! integration tests are built on it.

#[cfg(feature = "suites")]
pub mod all;
#[cfg(feature = "suites")]
pub mod bench;
#[cfg(feature = "suites")]
pub mod damaged;
pub mod demo;
#[cfg(feature = "suites")]
pub mod doctor;
#[cfg(feature = "suites")]
pub mod explain;
#[cfg(feature = "suites")]
pub mod gpu;
pub mod group;
pub mod kernel_files;
#[cfg(feature = "mpi")]
mod mpi_bootstrap;
#[cfg(feature = "suites")]
pub mod network;
#[cfg(feature = "cuda")]
pub mod probes;
#[cfg(feature = "suites")]
pub mod replay;
#[cfg(feature = "suites")]
pub mod rows;
pub mod sharing;
#[cfg(feature = "suites")]
pub mod silu;
#[cfg(feature = "suites")]
pub mod soak;
