//! What there is to do, and which warp does it.

pub mod item;
pub mod partition;
pub mod route;
pub mod row_split;
pub mod sub_warps;
