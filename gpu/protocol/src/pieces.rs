//! Rows that several warps write: of a launch's rows, the last ones are dealt in pieces, so that all warps
//! are done at about the same time. Whoever writes a row's last piece flags the row; nobody else needs to know.
//!
//! ```text
//! every warp of the row:  write a piece ; join
//! the last of them:       release ; flag := epoch
//! ```

use ferry_layout::{JOINS, PIECES};

use crate::{Machine, Span};

/// How the rows of a launch are dealt to the warps that send them.
#[derive(Clone, Copy)]
pub struct Deal {
    /// Tasks of whole rows.
    groups: u32,
    /// Rows of each.
    together: u32,
    /// Rows in pieces, which come after the others.
    cut: u32,
}

impl Deal {
    /// All of them whole.
    #[inline(always)]
    pub fn whole(rows: u32) -> Self {
        Self {
            groups: rows,
            together: 1,
            cut: 0,
        }
    }

    /// The last ones in pieces: so many that each of `warps` has a few. The others `together` at a time, a power
    /// of two.
    #[inline(always)]
    pub fn in_pieces(rows: u32, warps: u32, together: u32) -> Self {
        let least = rows.min(warps).min(JOINS - together);
        let groups = (rows - least) >> together.trailing_zeros();
        Self {
            groups,
            together,
            cut: rows - (groups << together.trailing_zeros()),
        }
    }

    /// Tasks to be dealt.
    #[inline(always)]
    pub fn tasks(self) -> u32 {
        self.groups + self.cut * PIECES
    }

    /// Whether a task is several rows, as many as were to be dealt together.
    #[inline(always)]
    pub fn is_group(self, task: u32) -> bool {
        self.together > 1 && task < self.groups
    }

    /// The first row of a task, and what of it.
    #[inline(always)]
    pub fn row(self, task: u32) -> (u32, Piece) {
        match task.checked_sub(self.groups) {
            None => (task << self.together.trailing_zeros(), Piece::WHOLE),
            Some(after) => {
                let index = after / PIECES;
                let piece = Piece {
                    part: after % PIECES,
                    parts: PIECES,
                    join: index,
                };
                let whole = self.groups << self.together.trailing_zeros();
                (whole + index, piece)
            }
        }
    }
}

/// What of a row a warp writes.
#[derive(Clone, Copy)]
pub struct Piece {
    part: u32,
    parts: u32,
    /// Where the warps of the row join.
    join: u32,
}

impl Piece {
    /// All.
    pub const WHOLE: Self = Self {
        part: 0,
        parts: 1,
        join: 0,
    };

    /// What of a row of `bytes`.
    #[inline(always)]
    pub fn span(self, bytes: u32) -> Span {
        Span::part(bytes, self.part, self.parts)
    }

    /// Called once the piece is written: whether this warp releases and flags the row. All lanes.
    #[inline(always)]
    pub fn completes<M: Machine>(self, machine: &M) -> bool {
        self.parts == 1 || (machine.join(self.join) + 1).is_multiple_of(self.parts)
    }
}
