//! A strip of a row in registers: a few vectors a lane, a warp's width apart.

use ferry_protocol::LANES;

use crate::ptx::memory::{self, Vector};
use crate::ptx::number;

/// Bytes that the lanes of a warp move with one instruction.
pub const WARP_BYTES: u32 = LANES * size_of::<Vector>() as u32;

/// This lane's vectors from byte `start` of a row, `DEPTH` of them, zeros from byte `end` on.
///
/// # Safety
/// `row` has `end` bytes.
#[inline(always)]
pub unsafe fn load<const DEPTH: usize>(
    row: u64,
    start: u32,
    end: u32,
    constant: bool,
) -> [Vector; DEPTH] {
    core::array::from_fn(|index| {
        let at = start + index as u32 * WARP_BYTES;
        // SAFETY: active only inside the row.
        unsafe {
            if constant {
                memory::load_constant_vector(row + at as u64, at < end)
            } else {
                memory::load_vector(row + at as u64, at < end)
            }
        }
    })
}

/// As [`load`], of words that a peer may be writing.
///
/// # Safety
/// As for [`load`].
#[inline(always)]
pub unsafe fn load_arriving<const DEPTH: usize>(row: u64, start: u32, end: u32) -> [Vector; DEPTH] {
    core::array::from_fn(|index| {
        let at = start + index as u32 * WARP_BYTES;
        // SAFETY: active only inside the row.
        unsafe { memory::load_relaxed_vector(row + at as u64, at < end) }
    })
}

/// The largest of a strip's words: [`ABSENT`](ferry_layout::ABSENT) if one has not come.
#[inline(always)]
pub fn largest_word<const DEPTH: usize>(strip: &[Vector; DEPTH]) -> u32 {
    let mut largest = 0;
    for [a, b, c, d] in strip {
        largest = largest.max(*a.max(b)).max(*c.max(d));
    }
    largest
}

/// Stores what [`load`] loaded.
///
/// # Safety
/// `row` has `end` bytes.
#[inline(always)]
pub unsafe fn store<const DEPTH: usize>(row: u64, start: u32, end: u32, strip: &[Vector; DEPTH]) {
    for (index, &vector) in strip.iter().enumerate() {
        let at = start + index as u32 * WARP_BYTES;
        // SAFETY: active only inside the row.
        unsafe { memory::store_vector(row + at as u64, vector, at < end) };
    }
}

/// As [`store`], of words that a peer may be waiting for.
///
/// # Safety
/// As for [`store`].
#[inline(always)]
pub unsafe fn store_polled<const DEPTH: usize>(
    row: u64,
    start: u32,
    end: u32,
    strip: &[Vector; DEPTH],
) {
    for (index, &vector) in strip.iter().enumerate() {
        let at = start + index as u32 * WARP_BYTES;
        // SAFETY: active only inside the row.
        unsafe { memory::store_relaxed_vector(row + at as u64, vector, at < end) };
    }
}

/// Eight sums plus weight times eight BF16.
#[inline(always)]
pub fn add(sums: [f32; 8], vector: Vector, weight: f32) -> [f32; 8] {
    core::array::from_fn(|index| {
        let (low, high) = number::f32_pair(vector[index / 2]);
        let value = if index % 2 == 0 { low } else { high };
        number::add_product(sums[index], weight, value)
    })
}

/// Eight sums as BF16.
#[inline(always)]
pub fn round(sums: &[f32; 8]) -> Vector {
    [
        number::bf16_pair(sums[0], sums[1]),
        number::bf16_pair(sums[2], sums[3]),
        number::bf16_pair(sums[4], sums[5]),
        number::bf16_pair(sums[6], sums[7]),
    ]
}
