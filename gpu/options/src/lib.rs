//! Ferry's kernels with options: the entries of `ferry-kernels` by the same names, which take a launch's
//! options after its arguments. A PTX of its own, which is loaded only if options are used, so that kernels
//! without them stay as small as they are. Empty for every other target.
#![cfg_attr(target_arch = "nvptx64", no_std)]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx))]

#[cfg(target_arch = "nvptx64")]
pub mod entry;
