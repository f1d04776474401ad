//! Work items, and their division among warps.

pub mod batches;
pub mod extent;
pub mod item;
pub mod lanes;
pub mod partition;
pub mod queue;
pub mod rank_set;
pub mod received_row;
pub mod sub_warps;
pub mod tasks;
