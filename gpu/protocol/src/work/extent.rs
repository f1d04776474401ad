//! How much can come to a rank in a round.

use ferry_layout::{Rank, Shape};

use crate::work::item::Item;

/// How much can come from a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The most tokens that one has.
    pub tokens: u32,
    /// The most parts that the rows of one have, a power of two.
    pub parts: u32,
}

impl Extent {
    /// Nothing.
    pub const NONE: Self = Self {
        tokens: 0,
        parts: 1,
    };

    /// Work items of all sources together, at most.
    #[inline(always)]
    pub fn items(self, shape: &Shape) -> u32 {
        self.tokens * shape.ranks * self.parts
    }

    /// Work item `index` of all, where its source's rows have `parts`. Sources are interleaved, and each rank
    /// begins with itself, so that not all ranks send to the same source at the same time.
    #[inline(always)]
    pub fn item(self, shape: &Shape, me: Rank, index: u32, parts: u32) -> Item {
        let row = index >> self.parts.trailing_zeros();
        let part = index & (self.parts - 1);
        let (token, rotation) = (row / shape.ranks, row % shape.ranks);
        Item {
            source: Rank((rotation + me.0) % shape.ranks),
            token,
            part,
            parts,
        }
    }

    /// For [`Counter::Extent`](ferry_layout::Counter::Extent).
    #[inline(always)]
    pub fn word(self) -> u64 {
        (self.tokens as u64) << 32 | self.parts as u64
    }

    /// What [`word`](Self::word) gave.
    #[inline(always)]
    pub fn of_word(word: u64) -> Self {
        Self {
            tokens: (word >> 32) as u32,
            parts: word as u32,
        }
    }
}
