//! Work items, and their division among warps.

pub mod batches;
pub mod extent;
pub mod item;
pub mod partition;
pub mod queue;
pub mod ranks;
pub mod received_row;
pub mod sub_warps;
pub mod tasks;
