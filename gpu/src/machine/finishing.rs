//! Finishing of sums in a lane's registers, before they are stored.

use ferry_layout::{Arguments, EPILOGUE_ELEMENTS, Epilogue, Load, OutputElement};
use ferry_protocol::Finishing;

use super::Gpu;
use super::tile;
use crate::ptx::memory::{self, Vector};
use crate::ptx::{number, thread};

/// Eight BF16 in f32: exact.
#[inline(always)]
fn widen(vector: Vector) -> [f32; 8] {
    core::array::from_fn(|index| {
        let (low, high) = number::f32_pair(vector[index / 2]);
        if index % 2 == 0 { low } else { high }
    })
}

/// An address on which nothing is computed earlier: during a sum there are no registers for the results.
#[inline(always)]
fn late(tensor: u64) -> u64 {
    thread::late_u64(tensor)
}

/// `value`, or `otherwise` if there is no tensor: a choice, not a branch.
#[inline(always)]
fn or_otherwise(tensor: u64, value: f32, otherwise: f32) -> f32 {
    if tensor == 0 { otherwise } else { value }
}

impl<A: Arguments, const SHMEM: bool> Load for Gpu<'_, A, SHMEM> {
    #[inline(always)]
    fn bf16x8(&self, tensor: u64, index: u64, otherwise: f32) -> [f32; EPILOGUE_ELEMENTS] {
        let tensor = late(tensor);
        // SAFETY: an epilogue reads only inside the host's tensors: documented on `Gpu::new`.
        let vector = unsafe { memory::load_vector(tensor + 2 * index, tensor != 0) };
        widen(vector).map(|value| or_otherwise(tensor, value, otherwise))
    }

    #[inline(always)]
    fn f32x8(&self, tensor: u64, index: u64, otherwise: f32) -> [f32; EPILOGUE_ELEMENTS] {
        let tensor = late(tensor);
        let at = tensor + 4 * index;
        // SAFETY: as above.
        let [low, high] = [at, at + 16].map(|at| unsafe { memory::load_vector(at, tensor != 0) });
        core::array::from_fn(|index| {
            let half = if index < 4 { low } else { high };
            or_otherwise(tensor, f32::from_bits(half[index % 4]), otherwise)
        })
    }

    #[inline(always)]
    fn f32(&self, tensor: u64, index: u64, otherwise: f32) -> f32 {
        let tensor = late(tensor);
        // SAFETY: as above.
        let bits = unsafe { memory::load_u32_if(tensor + 4 * index, tensor != 0) };
        or_otherwise(tensor, f32::from_bits(bits), otherwise)
    }
}

impl<A: Arguments, const SHMEM: bool> Finishing for Gpu<'_, A, SHMEM> {
    #[inline(always)]
    fn widen_bf16(&self, vector: Vector) -> [f32; 8] {
        widen(vector)
    }

    #[inline(always)]
    fn add_sums(&self, sums: [f32; 8], others: [f32; 8]) -> [f32; 8] {
        core::array::from_fn(|index| sums[index] + others[index])
    }

    #[inline(always)]
    fn apply(
        &self,
        epilogue: &impl Epilogue,
        token: u32,
        start: u32,
        end: u32,
        sums: [f32; 8],
    ) -> [f32; 8] {
        // Past the row's end, its last vector again.
        let at = (start + self.lane_start()).min(end - size_of::<Vector>() as u32);
        epilogue.apply(self, token, at / 2, sums)
    }

    #[inline(always)]
    fn store_sums(&self, row: u64, start: u32, end: u32, sums: [f32; 8], element: OutputElement) {
        let at = start + self.lane_start();
        let (active, at) = (at < end, row + at as u64 * element.bits() as u64 / 16);
        // SAFETY: the protocol stores inside the rows, which have `Arguments::row_bytes` bytes.
        unsafe {
            match element {
                OutputElement::Bf16 => memory::store_vector(at, tile::round(&sums), active),
                OutputElement::F16 => {
                    let pair = |index| number::f16_pair(sums[index], sums[index + 1]);
                    memory::store_vector(at, [pair(0), pair(2), pair(4), pair(6)], active);
                }
                OutputElement::F32 => {
                    let [a, b, c, d, e, f, g, h] = sums.map(f32::to_bits);
                    memory::store_vector(at, [a, b, c, d], active);
                    memory::store_vector(at + 16, [e, f, g, h], active);
                }
            }
        }
    }
}
