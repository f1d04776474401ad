//! The header of a dispatch row: what the receiver must know of a token beside its payload.

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

    /// Words in use.
    pub const fn words(top_k: u32) -> u32 {
        1 + 3 * top_k
    }

    /// Bytes, rounded up to 16 so that a row is copied in 16-byte pieces.
    pub const fn bytes(top_k: u32) -> u32 {
        (Self::words(top_k) * 4).next_multiple_of(16)
    }
}
