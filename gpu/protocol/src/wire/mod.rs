//! Ways in which bytes reach a rank, one file each.

pub mod credit;
pub mod flagged;
pub mod inline;
pub mod remote;
pub mod ticket;
