//! The header of a dispatch row: what the receiver must know of a token beside its payload.

/// An expert id that stands for "not routed" (`-1` as the user writes it).
pub const NOT_ROUTED: u32 = u32::MAX;

/// The bit of a row's position that says that the outputs do not hold the row. There are at most 2^31 - 1
/// rows.
pub const OVERFLOWED: u32 = 1 << 31;

/// A row's header: for each of its assignments a word of the expert and the rank within it
/// ([`AssignmentWords`]), and behind those a word each with the router's weight, as f32 bits.
pub struct Header;

impl Header {
    /// Bytes from a header's start to the word of assignment `k`.
    pub const fn assignment(k: u32) -> u32 {
        4 * k
    }

    /// Bytes from a header's start to the weight of assignment `k` of `top_k`.
    pub const fn weight(top_k: u32, k: u32) -> u32 {
        4 * (top_k + k)
    }

    /// Where the header of a part begins in a row with inline flags. The first part's is at `start`.
    #[inline(always)]
    pub const fn of_part(start: u32, top_k: u32, part: u32) -> u32 {
        start + part * Self::bytes(top_k)
    }

    /// Bytes, so that the next one is aligned.
    pub const fn bytes(top_k: u32) -> u32 {
        (8 * top_k).next_multiple_of(16)
    }
}

/// An assignment as a header has it: one of the experts that a token names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Assignment {
    /// The global expert id; where nothing is routed, one that there is not.
    pub expert: u32,
    /// The assignment's index among those that this source sends to that expert.
    pub rank_in_expert: u32,
}

/// How an assignment becomes a word, which is never [`SENTINEL`](crate::SENTINEL). The expert is in the
/// lowest bits, as many as the number of experts has, since that number stands where nothing is routed. The
/// rank within the expert is above them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AssignmentWords {
    experts: u32,
}

impl AssignmentWords {
    /// Of a group with so many experts.
    #[inline(always)]
    pub const fn of(experts: u32) -> Self {
        Self { experts }
    }

    #[inline(always)]
    const fn expert_bits(self) -> u32 {
        u32::BITS - self.experts.leading_zeros()
    }

    /// How many ranks within an expert a word can hold.
    pub const fn max_ranks_in_expert(self) -> u64 {
        1 << (u32::BITS - self.expert_bits())
    }

    /// The word of an assignment. `expert` is a global expert id or [`NOT_ROUTED`], `rank_in_expert` below
    /// [`max_ranks_in_expert`](Self::max_ranks_in_expert); it does not travel where nothing is routed.
    #[inline(always)]
    pub const fn encode(self, expert: u32, rank_in_expert: u32) -> u32 {
        match expert == NOT_ROUTED {
            true => self.experts,
            false => rank_in_expert << self.expert_bits() | expert,
        }
    }

    /// The assignment of a word.
    #[inline(always)]
    pub const fn decode(self, word: u32) -> Assignment {
        let bits = self.expert_bits();
        Assignment {
            expert: word & ((1 << bits) - 1),
            rank_in_expert: word >> bits,
        }
    }
}
