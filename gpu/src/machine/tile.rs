//! A tile of a row in registers: a few vectors a lane, a warp's width apart.

use crate::ptx::memory::{self, Vector, WARP_BYTES};
use crate::ptx::number;

/// Offset in bytes of a lane's vector `index` from its first one in the tile, which becomes an immediate of
/// the instruction, and its offset in the row, if the lane's first one is at `start`.
#[inline(always)]
fn vector(index: usize, start: u32) -> (u64, u32) {
    let before = index as u32 * WARP_BYTES;
    (before as u64, start + before)
}

/// This lane's vectors from byte `start` of a row, `DEPTH` of them, zeros from byte `end` on.
///
/// # Safety
/// `row` has `end` bytes.
#[inline(always)]
pub unsafe fn load<const DEPTH: usize>(row: u64, start: u32, end: u32) -> [Vector; DEPTH] {
    let first = row + start as u64;
    core::array::from_fn(|index| {
        let (before, at) = vector(index, start);
        // SAFETY: active only inside the row.
        unsafe { memory::load_vector(first + before, at < end) }
    })
}

/// One of this lane's vectors, from byte `at` of a row that a peer may be writing, zeros from byte `end` on.
///
/// # Safety
/// As for [`load`].
#[inline(always)]
pub unsafe fn load_arriving(row: u64, at: u32, end: u32) -> Vector {
    // SAFETY: active only inside the row.
    unsafe { memory::load_relaxed_vector(row + at as u64, at < end) }
}

/// Loads like [`load`] from a row, but vectors past the end repeat the row's last one: the assembler lets a
/// predicated load wait for the result of another. Nobody writes the row meanwhile, unless it `arrives`.
///
/// # Safety
/// `row` has `end` bytes, a vector at least.
#[inline(always)]
pub unsafe fn load_again<const DEPTH: usize>(
    row: u64,
    start: u32,
    end: u32,
    arrives: bool,
) -> [Vector; DEPTH] {
    let last = end - size_of::<Vector>() as u32;
    core::array::from_fn(|index| {
        let (_, at) = vector(index, start);
        let from = row + at.min(last) as u64;
        // SAFETY: inside the row.
        unsafe {
            match arrives {
                true => memory::load_relaxed_vector(from, true),
                false => memory::load_vector(from, true),
            }
        }
    })
}

/// The largest of a tile's words: [`SENTINEL`](ferry_layout::SENTINEL) if one has not arrived.
#[inline(always)]
pub fn largest_word<const DEPTH: usize>(tile: &[Vector; DEPTH]) -> u32 {
    let mut largest = 0;
    for [a, b, c, d] in tile {
        largest = largest.max(*a.max(b)).max(*c.max(d));
    }
    largest
}

/// Stores a tile as [`load`] returned it.
///
/// # Safety
/// `row` has `end` bytes.
#[inline(always)]
pub unsafe fn store<const DEPTH: usize>(row: u64, start: u32, end: u32, tile: &[Vector; DEPTH]) {
    let first = row + start as u64;
    for (index, &value) in tile.iter().enumerate() {
        let (before, at) = vector(index, start);
        // SAFETY: active only inside the row.
        unsafe { memory::store_vector(first + before, value, at < end) };
    }
}

/// Stores like [`store`], but words that a peer may be waiting for.
///
/// # Safety
/// As for [`store`].
#[inline(always)]
pub unsafe fn store_polled<const DEPTH: usize>(
    row: u64,
    start: u32,
    end: u32,
    tile: &[Vector; DEPTH],
) {
    let first = row + start as u64;
    for (index, &value) in tile.iter().enumerate() {
        let (before, at) = vector(index, start);
        // SAFETY: active only inside the row.
        unsafe { memory::store_relaxed_vector(first + before, value, at < end) };
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
