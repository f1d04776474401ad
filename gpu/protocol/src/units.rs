//! What a rank receives, cut into units of work: a part of a source's token.
//!
//! Sources are interleaved. Dispatch's receivers have their units from the start and take them 32 at a time,
//! so that the lanes look at 32 presence bits at once; combine's are dealt one by one
//! ([`Dealer`](crate::share::Dealer)).

use ferry_layout::{ByteOffset, Common, DispatchRow, Header, Rank, Region, Shape};

use crate::share::Share;
use crate::wait::{Awaited, Launch};
use crate::{LANES, Machine, Row, Span};

/// A part of a token of a source.
#[derive(Clone, Copy)]
pub struct Unit {
    pub source: Rank,
    pub token: u32,
    pub part: u32,
    /// Parts of this source's rows.
    pub parts: u32,
}

impl Unit {
    /// Its index among the source's flags.
    #[inline(always)]
    pub fn flag(self) -> u32 {
        self.token * self.parts + self.part
    }

    /// Where it stands in the windows that it is dispatched to.
    #[inline(always)]
    pub fn place(self, common: &Common) -> Place {
        let Common { shape, window, .. } = common;
        let span = Span::part(common.row.payload_bytes, self.part, self.parts);
        let is_bare = common.dispatches_bare(self.parts);
        let (row, header) = match is_bare {
            true => (
                window.bare_dispatch_row(self.source, self.token),
                Header::of_part(common.row.header, shape.top_k, self.part),
            ),
            false => (
                window.dispatch_row(self.source, self.token),
                common.row.header,
            ),
        };
        Place {
            is_bare,
            row,
            header,
            span,
        }
    }
}

/// Where a dispatched unit stands.
#[derive(Clone, Copy)]
pub struct Place {
    /// Whether its row is bare.
    pub is_bare: bool,
    /// The row.
    pub row: ByteOffset,
    /// Bytes from its start to the header that comes with the unit.
    pub header: u32,
    /// What of the row's payload is the unit's.
    pub span: Span,
}

impl Place {
    /// The row in the window of a rank of this node.
    #[inline(always)]
    pub fn of(self, rank: Rank) -> Row {
        match self.is_bare {
            true => Row::Bare(rank, self.row),
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
    pub fn units(self, shape: &Shape) -> u32 {
        self.tokens * shape.ranks * self.parts
    }

    /// Unit `index` of them, where its source has `parts`. Each rank starts with itself, so that not
    /// all read from the same source at the same time.
    #[inline(always)]
    pub fn unit(self, shape: &Shape, me: Rank, (index, parts): (u32, u32)) -> Unit {
        let row = index >> self.parts.trailing_zeros();
        let part = index & (self.parts - 1);
        let (token, turn) = (row / shape.ranks, row % shape.ranks);
        Unit {
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
        let Launch {
            machine,
            common,
            epoch,
            ..
        } = launch;
        let Unit {
            source,
            token,
            part,
            ..
        } = self.unit(&common.shape, common.rank(), (index, 1));
        // Both are read before either is looked at.
        let count = machine.load_tagged(common.window.token_count(source));
        let word = machine.load_tagged(common.window.presence(source, token / LANES));
        let tokens = count.value(*epoch)?;
        let parts = common.row.parts(tokens);
        if token >= tokens || part >= parts {
            return Some(0);
        }
        let present = word.value(*epoch)? >> (token % LANES) & 1 != 0;
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
    units: u32,
    warps: u32,
}

impl Batch {
    /// The first batch of a warp's share.
    #[inline(always)]
    pub fn first(shape: &Shape, extent: Extent, share: Share) -> Self {
        Self {
            extent,
            first: share.index,
            units: extent.units(shape),
            warps: share.of,
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
        self.first < self.units
    }

    /// The warp's share: asked again where it would occupy registers meanwhile.
    #[inline(always)]
    pub fn share(&self) -> Share {
        Share {
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
    pub fn unit(&self, lane: u32, parts: u32, shape: &Shape, me: Rank) -> Unit {
        self.extent.unit(shape, me, (self.index(lane), parts))
    }

    /// The parts that the source of the lane's unit has, if the unit comes here, else 0; `None`
    /// while that is not known.
    #[inline(always)]
    pub fn presence<M: Machine>(&self, launch: &Launch<M>, lane: u32) -> Option<u32> {
        if self.index(lane) >= self.units {
            return Some(0);
        }
        self.extent.presence(launch, self.index(lane))
    }

    /// What a lane waits for in [`presence`](Self::presence).
    #[inline(always)]
    pub fn awaited<M: Machine>(&self, launch: &Launch<M>, lane: u32) -> Awaited {
        let Launch {
            machine, common, ..
        } = launch;
        let Unit { source, token, .. } = self.unit(lane, 1, &common.shape, common.rank());
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
