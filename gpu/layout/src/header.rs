//! The header of a dispatch row: what the receiver must know of a token beside its payload.

/// What a word of a header holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Field {
    /// The source's token index.
    Token,
    /// The expert id of entry `k`.
    Expert(u32),
    /// The router weight of entry `k`.
    Weight(u32),
    /// The ordinal of entry `k`.
    Ordinal(u32),
}

impl Field {
    /// The entry that it is about; 0 for the token index.
    #[inline(always)]
    pub const fn k(self) -> u32 {
        match self {
            Self::Token => 0,
            Self::Expert(k) | Self::Weight(k) | Self::Ordinal(k) => k,
        }
    }
}

/// Word positions (4 bytes each) inside a row header of a given top-k.
///
/// `[token, expert × K, weight × K, ordinal × K]`: the source's token index; the global expert
/// ids ([`NOT_ROUTED`](crate::NOT_ROUTED) for none); the router weights as f32 bits; and for
/// every entry its ordinal among the entries that this source sends to that expert.
pub struct Header;

impl Header {
    /// Word of the token index.
    pub const TOKEN: u32 = 0;

    /// Word of entry `k`'s expert id.
    pub const fn expert(k: u32) -> u32 {
        1 + k
    }

    /// Word of entry `k`'s router weight.
    pub const fn weight(top_k: u32, k: u32) -> u32 {
        1 + top_k + k
    }

    /// Word of entry `k`'s ordinal.
    pub const fn ordinal(top_k: u32, k: u32) -> u32 {
        1 + 2 * top_k + k
    }

    /// What stands in `word`. Words behind the last are said to hold an ordinal of the last entry.
    #[inline(always)]
    pub const fn field(top_k: u32, word: u32) -> Field {
        let last = top_k - 1;
        if word == Self::TOKEN {
            Field::Token
        } else if word < Self::weight(top_k, 0) {
            Field::Expert(word - Self::expert(0))
        } else if word < Self::ordinal(top_k, 0) {
            Field::Weight(word - Self::weight(top_k, 0))
        } else {
            let k = word - Self::ordinal(top_k, 0);
            Field::Ordinal(if k < last { k } else { last })
        }
    }

    /// Words in use.
    pub const fn words(top_k: u32) -> u32 {
        1 + 3 * top_k
    }

    /// Bytes, rounded up to 16 so that a row is copied in 16-byte pieces.
    pub const fn bytes(top_k: u32) -> u32 {
        (Self::words(top_k) * 4).next_multiple_of(16)
    }
}
