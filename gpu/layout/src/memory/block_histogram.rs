//! The histogram of a small batch. Every block keeps the ids of a small batch in its shared memory and
//! numbers its assignments itself, so that no block waits for another.
//!
//! A warp numbers a group of 32 assignments: the index of each within its group, and for each expert a byte
//! with the number of assignments of the group for that expert. A rank within an expert adds the bytes of the
//! groups before.

use crate::plan::limits::{HISTOGRAM_BYTES, SMALL_BATCH_ASSIGNMENTS, SMALL_BLOCK_TOKENS};
use crate::plan::shape::Shape;

/// Assignments of a group: one for each lane of a warp.
const GROUP: u32 = 32;
/// Bytes that are read at a time.
const VECTOR: u32 = 16;

impl Shape {
    /// Whether the assignments of `tokens` tokens are a small batch, and a block has room to count them.
    #[inline(always)]
    pub const fn is_small_batch(&self, tokens: u32) -> bool {
        // The most first: a kernel for one shape has no code for a case that never occurs.
        self.fits_small_batch(self.max_tokens_per_rank) || self.fits_small_batch(tokens)
    }

    /// Whether no rank brings enough tokens for blocks of full size to pay.
    #[inline(always)]
    pub const fn has_small_blocks(&self) -> bool {
        self.max_tokens_per_rank <= SMALL_BLOCK_TOKENS
    }

    #[inline(always)]
    const fn fits_small_batch(&self, tokens: u32) -> bool {
        let assignments = tokens * self.top_k;
        // Only a small batch has a table whose bytes can be counted in 32 bits.
        assignments <= SMALL_BATCH_ASSIGNMENTS
            && BlockHistogram::of(assignments).bytes(self.experts) <= HISTOGRAM_BYTES
    }
}

/// A table of bytes: the number of assignments of each group for each expert. The groups of an expert are
/// adjacent, followed by zeros up to a multiple of 16.
#[derive(Clone, Copy, Debug)]
pub struct BlockHistogram {
    groups: u32,
}

impl BlockHistogram {
    /// Histogram of so many assignments.
    #[inline(always)]
    pub const fn of(assignments: u32) -> Self {
        let groups = assignments.div_ceil(GROUP);
        Self { groups }
    }

    /// Bytes of one expert.
    #[inline(always)]
    const fn row(self) -> u32 {
        self.groups.next_multiple_of(VECTOR)
    }

    /// Bytes of all experts, a multiple of 16.
    #[inline(always)]
    pub const fn bytes(self, experts: u32) -> u32 {
        experts * self.row()
    }

    /// The byte of an expert and of the group of assignment `index`.
    #[inline(always)]
    pub const fn at(self, expert: u32, index: u32) -> u32 {
        debug_assert!(index / GROUP < self.groups);
        expert * self.row() + index / GROUP
    }

    /// Assignments for an expert in all groups. `read` and `dot` as for [`before`](Self::before).
    #[inline(always)]
    pub fn total(
        self,
        expert: u32,
        read: impl Fn(u32) -> [u32; 4],
        dot: impl Fn(u32, u32, u32) -> u32,
    ) -> u32 {
        self.before(expert, self.groups * GROUP, read, dot)
    }

    /// Assignments for an expert in the groups before that of assignment `index`.
    ///
    /// `read` returns the 16 bytes of the table from a place on, which is a multiple of 16. `dot` multiplies
    /// two words byte by byte, and adds all products to a third.
    #[inline(always)]
    pub fn before(
        self,
        expert: u32,
        index: u32,
        read: impl Fn(u32) -> [u32; 4],
        dot: impl Fn(u32, u32, u32) -> u32,
    ) -> u32 {
        debug_assert!(
            index <= self.groups * GROUP,
            "the group of assignment {index} of {} groups",
            self.groups
        );
        let (row, end) = (expert * self.row(), index / GROUP);
        let (mut sum, mut first) = (0, 0);
        while first < end {
            let words = read(row + first);
            let left = (end - first) as i32;
            sum = dot(words[0], ones(left), sum);
            sum = dot(words[1], ones(left - 4), sum);
            sum = dot(words[2], ones(left - 8), sum);
            sum = dot(words[3], ones(left - 12), sum);
            first += VECTOR;
        }
        sum
    }
}

/// The products of the bytes of two words, byte by byte, added to `sum`: `dp4a` on a GPU.
#[inline(always)]
pub const fn dot_bytes(a: u32, b: u32, sum: u32) -> u32 {
    let (a, b) = (a.to_le_bytes(), b.to_le_bytes());
    let (mut sum, mut index) = (sum, 0);
    while index < a.len() {
        sum += a[index] as u32 * b[index] as u32;
        index += 1;
    }
    sum
}

/// A word whose first `bytes` bytes are 1 and the others 0: all are 1 from 4 on, and 0 if `bytes` is
/// negative.
#[inline(always)]
fn ones(bytes: i32) -> u32 {
    let shift = (32 - 8 * bytes).max(0);
    0x01_01_01_01_u32.checked_shr(shift as u32).unwrap_or(0)
}
