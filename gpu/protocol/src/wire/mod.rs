//! How bytes reach a rank, one file a way.

pub mod credit;
pub mod flagged;
pub mod inline;
