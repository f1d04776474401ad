//! Groups of rows that a warp sums at a time: of a fixed size, so that their loads are in flight together.

use crate::plan::limits::SUMMED_ROWS;

/// Some of the rows that a warp sums: rows `0..rows`, [`SIZE`](Self::SIZE) at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowGroup {
    first: u32,
    rows: u32,
}

impl RowGroup {
    /// Rows of a group.
    pub const SIZE: u32 = SUMMED_ROWS;

    /// First group of the rows whose bits are set in `rows`. These are the lowest bits: all 32 may be set.
    #[inline(always)]
    pub const fn first_of(rows: u32) -> Self {
        Self {
            first: 0,
            rows: u32::BITS - rows.leading_zeros(),
        }
    }

    /// Whether the group has any rows. Compares numbers of rows, as a shift by 32 would be a shift by 0.
    #[inline(always)]
    pub const fn is_some(self) -> bool {
        self.first < self.rows
    }

    /// The group after this one.
    #[inline(always)]
    pub const fn next(self) -> Self {
        Self {
            first: self.first + Self::SIZE,
            ..self
        }
    }

    /// Whether the group has a row `index`.
    #[inline(always)]
    pub const fn has(self, index: u32) -> bool {
        self.first + index < self.rows
    }

    /// Row `index` of the group, which has at least one; its last row again if it has fewer, so that every
    /// load can be made.
    #[inline(always)]
    pub const fn row(self, index: u32) -> u32 {
        let (row, last) = (self.first + index, self.rows - 1);
        if row < last { row } else { last }
    }
}
