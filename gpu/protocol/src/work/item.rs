//! Work items: a part of a token of a source, and its place in a window.

use ferry_layout::{ByteOffset, Common, Header, Rank};

use crate::machine::rows::{ByteRange, Row};

/// A part of a token of a source.
#[derive(Clone, Copy, Debug)]
pub struct Item {
    pub source: Rank,
    pub token: u32,
    pub part: u32,
    /// Parts of this source's rows.
    pub parts: u32,
}

impl Item {
    /// The item's index among the source's flags.
    #[inline(always)]
    pub fn flag(self) -> u32 {
        self.token * self.parts + self.part
    }

    /// The item's bytes, of a row of `bytes` bytes.
    #[inline(always)]
    pub fn range(self, bytes: u32) -> ByteRange {
        ByteRange::part(bytes, self.part, self.parts)
    }

    /// Place of the item in the windows to which it is dispatched.
    #[inline(always)]
    pub fn location(self, common: &Common) -> RowLocation {
        let Common { shape, window, .. } = common;
        debug_assert!(
            self.source.0 < shape.ranks && self.token < shape.max_tokens_per_rank,
            "{self:?}"
        );
        let range = self.range(common.row.payload_bytes);
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

/// Place of a dispatched item in a window.
#[derive(Clone, Copy)]
pub struct RowLocation {
    /// Whether its row has inline flags.
    pub is_inline: bool,
    /// The row.
    pub row: ByteOffset,
    /// Bytes from the row's start to the item's header.
    pub header: u32,
    /// The item's bytes of the row's payload.
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
