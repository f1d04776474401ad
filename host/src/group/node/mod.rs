//! One process per GPU, all on one node, over windows that the processes map from each other.

#[cfg(feature = "cuda")]
pub(crate) mod ipc;

pub(crate) mod exchange;
pub(crate) mod fabric;
pub(crate) mod introduction;
#[cfg(test)]
mod tests;
mod time_slices;
