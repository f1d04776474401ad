//! A network between NVSHMEM's PEs on machines without a NIC: a remote transport for NVSHMEM 3.4.5 over TCP.
//!
//! An agent at each end moves bytes: GPU, pinned memory, socket, pinned memory, GPU. No process maps
//! another's memory. The network delays, cuts and reorders all that NVSHMEM's interface lets a network
//! delay, cut and reorder ([`settings::Order`]); it loses peers, stalls, and counts.
//!
//! `plugin` makes of it the library that NVSHMEM loads. [`entry`] has what NVSHMEM calls.

pub mod counts;
mod cuda;
mod endpoint;
pub mod entry;
mod error;
mod frame;
pub mod host_name;
#[cfg(test)]
mod hostile_tests;
pub mod interface;
mod join;
mod link;
mod memory;
mod mover;
mod receiver;
mod schedule;
mod sender;
pub mod settings;
mod shared;
