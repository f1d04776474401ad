//! A round: its number, the kernels that it may consist of and their order, and what it tells: to the host
//! the counts, or the fault that it ended with, to the other ranks the culprit.

pub mod culprit;
pub mod epoch;
pub mod fault;
pub mod host_counts;
pub mod kernel;
pub mod last_launch;
pub mod region;
