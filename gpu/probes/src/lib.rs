//! Kernels that measure the machine, for the benchmark, and kernels that convert numbers and write tensors,
//! for the tests: compiled to a PTX of their own. For every other target, only their arguments.
#![cfg_attr(target_arch = "nvptx64", no_std)]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx))]

mod args;
#[cfg(target_arch = "nvptx64")]
pub mod kernels;

pub use args::{ClearArgs, Conversion, ConvertArgs, ProbeArgs, TensorCopy, WriteArgs};
