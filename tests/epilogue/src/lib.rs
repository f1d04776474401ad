//! An example of kernels with a user's epilogue: `cargo xtask build-ptx --manifest-path
//! tests/epilogue/Cargo.toml` compiles them to PTX for `Kernels::with_epilogue`. Tests launch them.
#![cfg_attr(target_arch = "nvptx64", no_std)]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx))]

use bytemuck::{Pod, Zeroable};
use ferry_layout::{Epilogue, Load};

/// Limits each sum to a range around 0, and adds an f32 of its own to each element, multiplied by the
/// token's number.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct LimitedWithOffsets {
    /// Address of f32 `[hidden]`, 16-byte aligned; 0 for none.
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
