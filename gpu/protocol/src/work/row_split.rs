//! Rows that several warps write: of a launch's rows, the last ones are dealt in pieces, so that all warps
//! are done at about the same time. Whoever writes a row's last piece flags the row; nobody else needs to know.
//!
//! ```text
//! every warp of the row:  write a piece ; join
//! the last of them:       release ; flag := epoch
//! ```

use ferry_layout::{MAX_SPLIT_ROWS, SPLITS};

use crate::machine::Machine;
use crate::machine::rows::ByteRange;

/// How the rows of a launch are dealt to the warps that send them.
#[derive(Clone, Copy)]
pub struct RowSplit {
    /// Tasks of whole rows.
    groups: u32,
    /// Rows of each.
    batched: u32,
    /// Rows in pieces, which come after the others.
    cut: u32,
}

impl RowSplit {
    /// All of them whole.
    #[inline(always)]
    pub fn whole(rows: u32) -> Self {
        Self {
            groups: rows,
            batched: 1,
            cut: 0,
        }
    }

    /// The last ones in pieces: so many that each of `warps` has a few. The others `batched` at a time, a power
    /// of two.
    #[inline(always)]
    pub fn split(rows: u32, warps: u32, batched: u32) -> Self {
        let least = rows.min(warps).min(MAX_SPLIT_ROWS - batched);
        let groups = (rows - least) >> batched.trailing_zeros();
        Self {
            groups,
            batched,
            cut: rows - (groups << batched.trailing_zeros()),
        }
    }

    /// Tasks to be dealt.
    #[inline(always)]
    pub fn tasks(self) -> u32 {
        self.groups + self.cut * SPLITS
    }

    /// Whether a task is several rows, as many as were to be dealt together.
    #[inline(always)]
    pub fn is_batch(self, task: u32) -> bool {
        self.batched > 1 && task < self.groups
    }

    /// The first row of a task, and what of it.
    #[inline(always)]
    pub fn row(self, task: u32) -> (u32, SplitPart) {
        match task.checked_sub(self.groups) {
            None => (task << self.batched.trailing_zeros(), SplitPart::WHOLE),
            Some(after) => {
                let index = after / SPLITS;
                let part = SplitPart {
                    part: after % SPLITS,
                    parts: SPLITS,
                    arrive_split: index,
                };
                let whole = self.groups << self.batched.trailing_zeros();
                (whole + index, part)
            }
        }
    }
}

/// What of a row a warp writes.
#[derive(Clone, Copy)]
pub struct SplitPart {
    part: u32,
    parts: u32,
    /// Where the warps of the row join.
    arrive_split: u32,
}

impl SplitPart {
    /// All.
    pub const WHOLE: Self = Self {
        part: 0,
        parts: 1,
        arrive_split: 0,
    };

    /// What of a row of `bytes`.
    #[inline(always)]
    pub fn range(self, bytes: u32) -> ByteRange {
        ByteRange::part(bytes, self.part, self.parts)
    }

    /// Called once the piece is written: whether this warp releases and flags the row. All lanes.
    #[inline(always)]
    pub fn completes<M: Machine>(self, machine: &M) -> bool {
        self.parts == 1 || (machine.arrive_split(self.arrive_split) + 1).is_multiple_of(self.parts)
    }
}
