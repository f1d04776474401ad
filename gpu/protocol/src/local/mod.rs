//! Dispatch and combine with `skip_a2a`: every rank has all tokens, nothing is sent, and no rank waits for
//! another. Each rank keeps the assignments of its own experts, and the caller adds combine's results over
//! the ranks.
//!
//! The kernels see a group of one rank that has this rank's experts. So window and workspace are those of any
//! dispatch. Only expert ids are the whole group's: this rank's first expert is subtracted from them, and
//! those of other ranks' experts are not routed.

pub mod combine;
mod counting;
pub mod dispatch;
mod numbering;
mod tables;
