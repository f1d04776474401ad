//! Waits of warps and ranks for each other: counters of a GPU, deadlines, the rank at fault.

pub mod arrivals;
pub mod culprit;
pub mod launch;
mod order;
mod room;
pub mod wait;
