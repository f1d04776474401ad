//! Places in the outputs: of rows, of their scales, and of the entries that describe them.

pub mod destination;
pub mod entries;
pub mod fill;
pub mod overflow;
pub mod padding;
pub mod pass_through;
pub mod scales;
pub mod shared;
