//! The header of a dispatch row: what the receiver must know of a token beside its payload.

use crate::{ABSENT, sent};

/// A row's header: 16 bytes for each of its entries, so that a lane reads or writes an entry at
/// once.
pub struct Header;

/// An entry of a header: a token and one of the experts that it names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The global expert id, or one that there is not.
    pub expert: u32,
    /// The router's weight, as f32 bits.
    pub weight: u32,
    /// The entry's number among those that this source sends to that expert.
    pub ordinal: u32,
    /// The source's token index.
    pub token: u32,
}

impl Entry {
    /// Bytes.
    pub const BYTES: u32 = 16;
    /// One that has not come.
    pub const ABSENT: Self = Self::of_words([ABSENT; 4]);

    /// Whether a word of it has not come.
    #[inline(always)]
    pub const fn is_absent(self) -> bool {
        let [a, b, c, d] = self.words();
        a == ABSENT || b == ABSENT || c == ABSENT || d == ABSENT
    }

    /// As it is [`sent`].
    #[inline(always)]
    pub const fn sent(self) -> Self {
        let [a, b, c, d] = self.words();
        Self::of_words([sent(a), sent(b), sent(c), sent(d)])
    }

    /// As it travels.
    #[inline(always)]
    pub const fn words(self) -> [u32; 4] {
        [self.expert, self.weight, self.ordinal, self.token]
    }

    /// What arrived.
    #[inline(always)]
    pub const fn of_words(words: [u32; 4]) -> Self {
        let [expert, weight, ordinal, token] = words;
        Self {
            expert,
            weight,
            ordinal,
            token,
        }
    }
}

impl Header {
    /// Bytes from a header's start to entry `k`.
    pub const fn entry(k: u32) -> u32 {
        k * Entry::BYTES
    }

    /// Bytes.
    pub const fn bytes(top_k: u32) -> u32 {
        top_k * Entry::BYTES
    }
}
