//! What there is to do, and which warp does it.

pub mod batches;
pub mod extent;
pub mod item;
pub mod partition;
pub mod queue;
pub mod ranks;
pub mod sub_warps;
pub mod tasks;
