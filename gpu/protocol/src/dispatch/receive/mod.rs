//! The receiving half of dispatch: counts of the sources, first rows, and the received rows, with a file for
//! each layout.

pub mod batch;
pub mod by_expert;
pub mod counts;
pub mod host_counts;
pub mod offsets;
pub mod padded;
pub mod unsorted;
