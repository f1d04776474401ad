//! Token formats: their sizes, and the arithmetic of each.

pub mod arithmetic;
pub mod e2m1;
pub mod e8m0;
pub mod float;
pub mod format;
pub mod fp8;
pub mod mxfp4;
pub mod mxfp8;
pub mod nvfp4;
