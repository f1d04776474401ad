//! Ferry's kernels for rows that stay as they came: the entries of `ferry-options` by the same names and with
//! the same arguments, except the local ones. A PTX of its own, which is loaded only for a plan whose receive
//! layout keeps rows, so that kernels which put rows in expert order stay as small as they are. Empty for
//! every other target.
#![cfg_attr(target_arch = "nvptx64", no_std)]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx))]

#[cfg(target_arch = "nvptx64")]
pub mod entry;
