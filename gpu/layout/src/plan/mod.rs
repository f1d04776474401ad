//! Sizes and choices that the ranks of a group agree on before their first round, and what follows from them
//! alone: the shape and its limits, the layout of received rows, the bytes of a header, and the names by
//! which people choose.

pub mod header;
pub mod limits;
pub mod names;
pub mod receive;
pub mod shape;
pub mod shared_tokens;
