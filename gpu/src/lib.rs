//! Parts of which kernels are built: the protocol's machine on a GPU, encoders and the fused SiLU. Has no
//! entries: `ferry-kernels` declares Ferry's, and a crate of yours can declare others with the same parts
//! (`kernels_with_epilogue!`).
//!
//! Empty for every other target. `machine` runs the protocol, `ptx` has one function per instruction, and
//! `shmem`, with the feature `nvshmem`, reaches ranks of other nodes. A crate that is linked with this one
//! gets its panic handler, which traps.
#![cfg_attr(target_arch = "nvptx64", no_std)]
#![cfg_attr(
    target_arch = "nvptx64",
    feature(asm_experimental_arch, link_llvm_intrinsics)
)]
#![cfg_attr(target_arch = "nvptx64", allow(internal_features))]

#[cfg(target_arch = "nvptx64")]
mod elements;
#[cfg(target_arch = "nvptx64")]
pub mod encode;
#[cfg(target_arch = "nvptx64")]
mod entries;
#[cfg(target_arch = "nvptx64")]
mod kernel;
#[cfg(target_arch = "nvptx64")]
#[cfg(target_arch = "nvptx64")]
pub mod machine;
#[cfg(target_arch = "nvptx64")]
pub mod ptx;
#[cfg(all(target_arch = "nvptx64", feature = "nvshmem"))]
pub mod shmem;
#[cfg(all(target_arch = "nvptx64", not(feature = "nvshmem")))]
#[path = "no_shmem.rs"]
mod shmem;
#[cfg(target_arch = "nvptx64")]
mod sigmoids;
#[cfg(target_arch = "nvptx64")]
pub mod silu;

#[cfg(target_arch = "nvptx64")]
pub use ferry_layout as layout;
#[cfg(target_arch = "nvptx64")]
pub use ferry_layout::{Epilogue, Load};
#[cfg(target_arch = "nvptx64")]
pub use ferry_protocol as protocol;

/// The standard library of the second code generator, which has a panic handler of its own.
#[cfg(ferry_nvvm)]
pub use cuda_std;

#[cfg(all(target_arch = "nvptx64", not(ferry_nvvm)))]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    ptx::thread::trap()
}

/// Fingerprint by which the host checks the memory layout that the kernels were built from. In every PTX that
/// is linked with this crate.
#[cfg(target_arch = "nvptx64")]
#[allow(non_upper_case_globals)]
#[unsafe(no_mangle)]
#[used]
pub static ferry_layout_fingerprint: u64 = ferry_layout::LAYOUT_FINGERPRINT;
