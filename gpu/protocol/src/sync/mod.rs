//! How warps and ranks wait for each other: counters of a GPU, waits that end, who is at fault.

pub mod arrivals;
pub mod culprit;
pub mod launch;
mod order;
pub mod wait;
