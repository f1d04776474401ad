//! Dispatch and combine where every rank has all tokens: nothing is sent, and no rank waits for another. Each
//! rank keeps the assignments of its own experts, and what combine gives is summed over the ranks by whoever
//! calls it.
//!
//! The kernels see a group of one rank that has this rank's experts. So window and workspace are those of any
//! dispatch. Only expert ids are the whole group's: they are read less this rank's first expert, and those of
//! other ranks' experts go nowhere.

pub mod combine;
mod counting;
pub mod dispatch;
mod numbering;
mod tables;
