//! Arithmetic on the elements of a token, the same bits on every machine: token formats with their sizes, the
//! places of their scales, the word for "not written yet", which no row carries, and the activation between
//! an expert's matrix multiplications.

pub mod arithmetic;
pub mod e2m1;
pub mod e8m0;
pub mod float;
pub mod format;
pub mod fp8;
pub mod mxfp4;
pub mod mxfp8;
pub mod nvfp4;
pub mod scale_placement;
pub(crate) mod sentinel;
pub mod silu;
