//! The header of a dispatch row: everything the receiver needs of a token except its payload.

/// Expert id of an assignment that is not routed (`-1` as the user writes it).
pub const NOT_ROUTED: u32 = u32::MAX;

/// The bit of a row's position that is set if the row does not fit in the outputs. There are at most 2^31 - 1
/// rows.
pub const OVERFLOWED: u32 = 1 << 31;

/// A row's header: a word for each of its assignments with the expert and the rank within it
/// ([`AssignmentWords`]), then a word for each with the router's weight, as f32 bits.
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

    /// Start of the header of a part in a row with inline flags. The first part's is at `start`.
    #[inline(always)]
    pub const fn of_part(start: u32, top_k: u32, part: u32) -> u32 {
        start + part * Self::bytes(top_k)
    }

    /// Bytes of a header, rounded up so that the next one is aligned.
    pub const fn bytes(top_k: u32) -> u32 {
        (8 * top_k).next_multiple_of(16)
    }
}

/// An assignment as decoded from a header: one of the experts that a token names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Assignment {
    /// The global expert id; an id past the last expert if the assignment is not routed.
    pub expert: u32,
    /// Index of the assignment among all that this source sends to that expert.
    pub rank_in_expert: u32,
}

/// Encoding of assignments as words, of which none is [`SENTINEL`](crate::SENTINEL). The expert is in the
/// lowest bits, wide enough for the number of experts, which marks an assignment that is not routed. The rank
/// within the expert is above them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AssignmentWords {
    experts: u32,
}

impl AssignmentWords {
    /// Encoding for a group with so many experts.
    #[inline(always)]
    pub const fn of(experts: u32) -> Self {
        Self { experts }
    }

    #[inline(always)]
    const fn expert_bits(self) -> u32 {
        u32::BITS - self.experts.leading_zeros()
    }

    /// Number of ranks within an expert that a word can hold.
    pub const fn max_ranks_in_expert(self) -> u64 {
        1 << (u32::BITS - self.expert_bits())
    }

    /// The word of an assignment. `expert` is a global expert id or [`NOT_ROUTED`], `rank_in_expert` below
    /// [`max_ranks_in_expert`](Self::max_ranks_in_expert); it does not travel if the assignment is not
    /// routed.
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
