//! Arguments of the kernel that checks the links between ranks, and the records that it leaves.

use bytemuck::{Pod, Zeroable};

use crate::launch::args::{Arguments, Common, Tensor};
use crate::memory::workspace::Table;
use crate::plan::shape::{Rank, Shape};

/// Way in which a launch of `links` sends over a link. Each row that arrives is answered by a flag, as a
/// credit answers the rows of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LinkTest {
    /// A flag of 8 bytes.
    Flag,
    /// A row with inline flags.
    Inline,
    /// Every row of a plan with most tokens, each with its flag.
    Rows,
}

impl LinkTest {
    /// Every test, in the order in which they are made.
    pub const ALL: [Self; 3] = [Self::Flag, Self::Inline, Self::Rows];

    /// The test with this number in [`ALL`](Self::ALL); the last one for others.
    #[inline(always)]
    pub const fn of_number(number: u64) -> Self {
        match number {
            0 => Self::Flag,
            1 => Self::Inline,
            _ => Self::Rows,
        }
    }

    /// Rows that travel.
    pub const fn rows(self, shape: &Shape) -> u32 {
        match self {
            Self::Flag | Self::Inline => 1,
            Self::Rows => shape.max_tokens_per_rank,
        }
    }

    /// Bytes that travel, without the flags of rows.
    pub const fn bytes(self, shape: &Shape) -> u64 {
        match self {
            Self::Flag => 8,
            Self::Inline | Self::Rows => self.rows(shape) as u64 * shape.payload_bytes() as u64,
        }
    }
}

/// Arguments of `links`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct LinksArgs {
    /// A [`LinkTest`], as its number.
    pub test: u64,
    /// Rank with which this one exchanges, which names this one; or this one's own, for nothing.
    pub peer: u64,
    /// Largest value of the flags of earlier launches: a launch takes the next `2 * repeats`.
    pub flags_before: u64,
    /// Arguments that every kernel needs. The deadline is after both halves.
    pub common: Common,
    /// Times that a rank sends to its peer, one after the other, at least 2: the first one is not timed, the
    /// shortest one of the others is kept.
    pub repeats: u64,
    /// Number that decides the words of rows, the same on all ranks.
    pub salt: u64,
    /// Nanoseconds of a half, in which one rank of each pair sends.
    pub wait_ns: u64,
}

impl LinksArgs {
    /// Whether one warp has all there is to send.
    pub const fn has_one_row(&self) -> bool {
        LinkTest::of_number(self.test).rows(&self.common.shape) == 1
    }
}

impl Arguments for LinksArgs {
    #[inline(always)]
    fn common(&self) -> &Common {
        &self.common
    }

    #[inline(always)]
    fn last_word(&self) -> u64 {
        self.wait_ns
    }

    #[inline(always)]
    fn tensor(&self, _tensor: Tensor) -> u64 {
        0
    }

    #[inline(always)]
    fn user_table(&self, _table: Table) -> u64 {
        0
    }
}

/// Outcome of a test for one rank of a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum LinkOutcome {
    /// The pair was left out.
    NotRun,
    /// The awaited has come.
    Well,
    /// It has not come.
    Missing,
    /// Something else has come in its place.
    Wrong,
}

impl LinkOutcome {
    /// The outcome with this number, if there is one.
    pub const fn of_number(number: u32) -> Option<Self> {
        Some(match number {
            0 => Self::NotRun,
            1 => Self::Well,
            2 => Self::Missing,
            3 => Self::Wrong,
            _ => return None,
        })
    }
}

/// Record of a warp with a peer, for a row: the words of that peer's token in
/// [`Table::RowMap`], of a plan with a top-k of [`WORDS`](Self::WORDS).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct LinkRecord {
    /// [`LinkOutcome`] of the answers to what this rank sent.
    pub sent: u32,
    /// [`LinkOutcome`] of the peer's rows or flags.
    pub received: u32,
    /// Time at which this rank began to send, on the GPU's clock, in nanoseconds.
    pub begun: u64,
    /// Time at which it had the answer.
    pub ended: u64,
    /// Padding, not written.
    pub reserved: u64,
}

impl LinkRecord {
    /// 32-bit words of a record.
    pub const WORDS: u32 = size_of::<Self>() as u32 / 4;
    /// Word of [`sent`](Self::sent).
    pub const SENT: u32 = 0;
    /// Word of [`received`](Self::received).
    pub const RECEIVED: u32 = 1;
    /// First word of [`begun`](Self::begun).
    pub const BEGUN: u32 = 2;
    /// First word of [`ended`](Self::ended).
    pub const ENDED: u32 = 4;

    /// Index in [`Table::RowMap`] of word `word` of the record of a peer's row.
    #[inline(always)]
    pub const fn index(shape: &Shape, peer: Rank, row: u32, word: u32) -> u64 {
        shape.row_map_index(peer, row, word)
    }
}

const _: () = {
    use core::mem::offset_of;
    assert!(offset_of!(LinkRecord, sent) == 4 * LinkRecord::SENT as usize);
    assert!(offset_of!(LinkRecord, received) == 4 * LinkRecord::RECEIVED as usize);
    assert!(offset_of!(LinkRecord, begun) == 4 * LinkRecord::BEGUN as usize);
    assert!(offset_of!(LinkRecord, ended) == 4 * LinkRecord::ENDED as usize);
    assert!(offset_of!(LinksArgs, common) == crate::launch::args::COMMON_OFFSET);
};
