//! An example of kernels with an epilogue of one's own: `cargo xtask build-ptx --manifest-path
//! tests/epilogue/Cargo.toml` makes PTX of them, which `Kernels::with_epilogue` takes. Tests launch them.
#![cfg_attr(target_arch = "nvptx64", no_std)]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx))]

use bytemuck::{Pod, Zeroable};
use ferry_layout::{Epilogue, Load};

/// Limits each sum to a range around 0, and adds an f32 of its own to each element, which counts as
/// often as the token's number says.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct LimitedWithOffsets {
    /// f32 `[hidden]`, 16-byte aligned; 0: none.
    pub offsets: u64,
    /// The largest magnitude.
    pub limit: f32,
    /// Padding, zero.
    pub reserved: u32,
}

impl Epilogue for LimitedWithOffsets {
    #[inline(always)]
    fn apply(&self, memory: &impl Load, token: u32, column: u32, values: [f32; 8]) -> [f32; 8] {
        let offsets = memory.f32x8(self.offsets, column as u64, 0.0);
        let times = token as f32;
        core::array::from_fn(|index| {
            let value = values[index];
            let limited = if value > self.limit {
                self.limit
            } else if value < -self.limit {
                -self.limit
            } else {
                value
            };
            limited + offsets[index] * times
        })
    }
}

#[cfg(target_arch = "nvptx64")]
ferry_gpu::kernels_with_epilogue!(LimitedWithOffsets);
