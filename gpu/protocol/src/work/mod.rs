//! What there is to do, and which warp does it.

pub mod batches;
pub mod item;
pub mod partition;
pub mod route;
pub mod sub_warps;
