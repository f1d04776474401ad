//! What a rank receives, cut into units of work: a part of a source's token.
//!
//! Sources are interleaved. Dispatch's receivers have their units from the start and take them 32 at a time,
//! so that the lanes look at 32 presence bits at once; combine's are dealt one by one
//! ([`WorkQueue`](crate::work::partition::Dealer)).

use ferry_layout::{ByteOffset, Common, DispatchRow, Header, Rank, Region, Shape};

use crate::machine::rows::{ByteRange, Row};
use crate::machine::{LANES, Machine};
use crate::sync::launch::{Awaited, Launch};
use crate::work::partition::Partition;

/// A part of a token of a source.
#[derive(Clone, Copy)]
pub struct Item {
    pub source: Rank,
    pub token: u32,
    pub part: u32,
    /// Parts of this source's rows.
    pub parts: u32,
}

impl Item {
    /// Its index among the source's flags.
    #[inline(always)]
    pub fn flag(self) -> u32 {
        self.token * self.parts + self.part
    }

    /// Where it stands in the windows that it is dispatched to.
    #[inline(always)]
    pub fn location(self, common: &Common) -> RowLocation {
        let Common { shape, window, .. } = common;
        let range = ByteRange::part(common.row.payload_bytes, self.part, self.parts);
        let is_inline = common.dispatches_inline(self.parts);
        let (row, header) = match is_inline {
            true => (
                window.inline_dispatch_row(self.source, self.token),
                Header::of_part(common.row.header, shape.top_k, self.part),
            ),
            false => (
                window.dispatch_row(self.source, self.token),
                common.row.header,
            ),
        };
        RowLocation {
            is_inline,
            row,
            header,
            range,
        }
    }
}

/// Where a dispatched unit stands.
#[derive(Clone, Copy)]
pub struct RowLocation {
    /// Whether its row is bare.
    pub is_inline: bool,
    /// The row.
    pub row: ByteOffset,
    /// Bytes from its start to the header that comes with the unit.
    pub header: u32,
    /// What of the row's payload is the unit's.
    pub range: ByteRange,
}

impl RowLocation {
    /// The row in the window of a rank of this node.
    #[inline(always)]
    pub fn of(self, rank: Rank) -> Row {
        match self.is_inline {
            true => Row::Inline(rank, self.row),
            false => Row::Window(rank, self.row),
        }
    }
}

/// How much can come from a source.
#[derive(Clone, Copy)]
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

    /// Of more sources, too: one `tokens` a lane, the same again where there are fewer.
    #[inline(always)]
    pub fn and<M: Machine>(self, machine: &M, row: &DispatchRow, tokens: M::Lanes<u32>) -> Self {
        let parts = machine.lanes(|lane| row.parts(machine.own(tokens, lane)));
        Self {
            tokens: self.tokens.max(machine.max(tokens)),
            parts: self.parts.max(machine.max(parts)),
        }
    }

    /// Units of all sources together, at most.
    #[inline(always)]
    pub fn items(self, shape: &Shape) -> u32 {
        self.tokens * shape.ranks * self.parts
    }

    /// Unit `index` of them, where its source has `parts`. Each rank starts with itself, so that not
    /// all read from the same source at the same time.
    #[inline(always)]
    pub fn item(self, shape: &Shape, me: Rank, (index, parts): (u32, u32)) -> Item {
        let row = index >> self.parts.trailing_zeros();
        let part = index & (self.parts - 1);
        let (token, turn) = (row / shape.ranks, row % shape.ranks);
        Item {
            source: Rank((turn + me.0) % shape.ranks),
            token,
            part,
            parts,
        }
    }

    /// The parts that the source of unit `index` has, if the unit comes here, else 0; `None` while that
    /// is not known. For one lane.
    #[inline(always)]
    pub fn presence<M: Machine>(self, launch: &Launch<M>, index: u32) -> Option<u32> {
        let (machine, common, epoch) = (launch.machine, launch.common, launch.epoch);
        let Item {
            source,
            token,
            part,
            ..
        } = self.item(&common.shape, common.rank(), (index, 1));
        // Both are read before either is looked at.
        let count = machine.load_tagged(common.window.token_count(source));
        let word = machine.load_tagged(common.window.presence(source, token / LANES));
        let tokens = count.value(epoch)?;
        let parts = common.row.parts(tokens);
        if token >= tokens || part >= parts {
            return Some(0);
        }
        let present = word.value(epoch)? >> (token % LANES) & 1 != 0;
        Some(if present { parts } else { 0 })
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

/// 32 units of a warp, one a lane.
#[derive(Clone, Copy)]
pub struct Batch {
    extent: Extent,
    first: u32,
    items: u32,
    warps: u32,
}

impl Batch {
    /// The first batch of a warp's share.
    #[inline(always)]
    pub fn first(shape: &Shape, extent: Extent, partition: Partition) -> Self {
        Self {
            extent,
            first: partition.index,
            items: extent.items(shape),
            warps: partition.of,
        }
    }

    /// The warp's next batch.
    #[inline(always)]
    pub fn next(self) -> Self {
        Self {
            first: self.first + LANES * self.warps,
            ..self
        }
    }

    /// Whether there are any units.
    #[inline(always)]
    pub fn is_some(&self) -> bool {
        self.first < self.items
    }

    /// The warp's share: asked again where it would occupy registers meanwhile.
    #[inline(always)]
    pub fn partition(&self) -> Partition {
        Partition {
            index: self.first % self.warps,
            of: self.warps,
        }
    }

    #[inline(always)]
    fn index(&self, lane: u32) -> u32 {
        self.first + lane * self.warps
    }

    /// A lane's unit, where its source has `parts`.
    #[inline(always)]
    pub fn item(&self, lane: u32, parts: u32, shape: &Shape, me: Rank) -> Item {
        self.extent.item(shape, me, (self.index(lane), parts))
    }

    /// The parts that the source of the lane's unit has, if the unit comes here, else 0; `None`
    /// while that is not known.
    #[inline(always)]
    pub fn presence<M: Machine>(&self, launch: &Launch<M>, lane: u32) -> Option<u32> {
        if self.index(lane) >= self.items {
            return Some(0);
        }
        self.extent.presence(launch, self.index(lane))
    }

    /// What a lane waits for in [`presence`](Self::presence).
    #[inline(always)]
    pub fn awaited<M: Machine>(&self, launch: &Launch<M>, lane: u32) -> Awaited {
        let (machine, common) = (launch.machine, launch.common);
        let Item { source, token, .. } = self.item(lane, 1, &common.shape, common.rank());
        let word = token / LANES;
        let saw = machine.load_tagged(common.window.presence(source, word)).0 >> 32;
        Awaited {
            peer: source,
            region: Region::Presence,
            index: word as u64,
            saw,
        }
    }
}
