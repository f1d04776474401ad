//! Ferry's kernels: the entries that the host launches, compiled to the PTX that it embeds. Empty for every
//! other target.
#![cfg_attr(target_arch = "nvptx64", no_std)]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx))]

#[cfg(target_arch = "nvptx64")]
pub mod entry;
