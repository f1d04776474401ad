//! Ferry's kernels: the protocol on a GPU, compiled to PTX.
//!
//! Empty for every other target. `entry` holds the kernels, `machine` what they run
//! on, `ptx` one function per instruction, `shmem` the way to ranks of other nodes.
#![cfg_attr(target_arch = "nvptx64", no_std)]
#![cfg_attr(
    target_arch = "nvptx64",
    feature(abi_ptx, asm_experimental_arch, link_llvm_intrinsics)
)]
#![cfg_attr(target_arch = "nvptx64", allow(internal_features))]

#[cfg(target_arch = "nvptx64")]
pub mod encode;
#[cfg(target_arch = "nvptx64")]
pub mod entry;
#[cfg(target_arch = "nvptx64")]
pub mod machine;
#[cfg(target_arch = "nvptx64")]
pub mod probe;
#[cfg(target_arch = "nvptx64")]
pub mod ptx;
#[cfg(target_arch = "nvptx64")]
pub mod shmem;
#[cfg(target_arch = "nvptx64")]
mod sigmoids;
#[cfg(target_arch = "nvptx64")]
pub mod silu;

#[cfg(target_arch = "nvptx64")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    ptx::thread::trap()
}
