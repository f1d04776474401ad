//! Upper bound of the items that a rank receives in a round, and the items that it does receive.

use ferry_layout::{Rank, Shape};

use crate::machine::{LANES, Machine};
use crate::sync::launch::Launch;
use crate::work::item::Item;

/// Most tokens and parts of any source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Most tokens of any source.
    pub tokens: u32,
    /// Most parts of any source's rows, a power of two.
    pub parts: u32,
}

impl Extent {
    /// Extent without tokens.
    pub const NONE: Self = Self {
        tokens: 0,
        parts: 1,
    };

    /// Work items of all sources together, at most.
    #[inline(always)]
    pub fn items(self, shape: &Shape) -> u32 {
        self.tokens * shape.ranks * self.parts
    }

    /// Work item `index` of all, if its source's rows have `parts` parts. Sources are interleaved, and each
    /// rank begins with itself, so that not all ranks send to the same source at the same time.
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

    /// Parts of the rows of item `index`'s source if the item comes to this rank, else 0. `None` while that
    /// is unknown. For one lane.
    #[inline(always)]
    pub fn parts_here<M: Machine>(self, launch: &Launch<M>, index: u32) -> Option<u32> {
        let (machine, common, epoch) = (launch.machine, launch.common, launch.epoch);
        let item = self.item(&common.shape, common.rank(), index, 1);
        // Both words are loaded before either is used.
        let count = machine.load_tagged(common.window.token_count(item.source));
        let word = machine.load_tagged(common.window.presence(item.source, item.token / LANES));
        let tokens = count.value(epoch)?;
        let parts = common.row.parts(tokens);
        if item.token >= tokens || item.part >= parts {
            return Some(0);
        }
        let present = word.value(epoch)? >> (item.token % LANES) & 1 != 0;
        Some(if present { parts } else { 0 })
    }

    /// The extent as a word, for [`Counter::Extent`](ferry_layout::Counter::Extent).
    #[inline(always)]
    pub fn word(self) -> u64 {
        (self.tokens as u64) << 32 | self.parts as u64
    }

    /// Extent of a [`word`](Self::word).
    #[inline(always)]
    pub fn of_word(word: u64) -> Self {
        Self {
            tokens: (word >> 32) as u32,
            parts: word as u32,
        }
    }
}
