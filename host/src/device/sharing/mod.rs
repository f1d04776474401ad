//! Ranks that share a GPU: their parts of it, their room, and the order of their launches.

pub(crate) mod gpu_ranks;
pub(crate) mod one_stream;
#[cfg(any(feature = "cuda", test))]
pub(crate) mod own_gpu;
pub(crate) mod queues;
pub(crate) mod residents;
