//! Sets of ranks, as sender, receiver and combine compute them from a token's experts.

use ferry_layout::{Rank, Shape, Window};

use crate::machine::Machine;
use crate::machine::rows::Bits;

/// Ranks of a group, which has at most 64: one word, with a bit for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankSet(u64);

impl RankSet {
    /// No rank.
    pub const NONE: Self = Self(0);

    /// The rank that holds `expert`, or none.
    #[inline(always)]
    pub fn of_expert(shape: &Shape, expert: u32) -> Self {
        match expert < shape.experts {
            true => Self(1 << shape.rank_of(expert).0),
            false => Self::NONE,
        }
    }

    /// The ranks of a token's experts, one expert a lane.
    #[inline(always)]
    pub fn of_experts<M: Machine>(machine: &M, shape: &Shape, experts: M::Lanes<u32>) -> Self {
        let of_lane = |lane| Self::of_expert(shape, machine.own(experts, lane)).0;
        Self(machine.union(machine.lanes(of_lane)))
    }

    /// The ranks of `rank`'s node.
    #[inline(always)]
    pub fn of_node(shape: &Shape, rank: Rank) -> Self {
        let size = shape.p2p_world_size;
        let first = rank.0 / size * size;
        Self((u64::MAX >> (64 - size)) << first)
    }

    /// The set as a word, with bit `r` for rank `r`.
    #[inline(always)]
    pub const fn word(self) -> u64 {
        self.0
    }

    /// The set of a [`word`](Self::word).
    #[inline(always)]
    pub const fn of_word(word: u64) -> Self {
        Self(word)
    }

    /// The ranks of both sets together.
    #[inline(always)]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// The ranks that are in both sets.
    #[inline(always)]
    pub const fn among(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// The ranks that are not in `other`.
    #[inline(always)]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Whether a rank is in the set.
    #[inline(always)]
    pub const fn contains(self, rank: Rank) -> bool {
        self.0 >> rank.0 & 1 != 0
    }

    /// Number of ranks.
    #[inline(always)]
    pub fn count(self) -> u32 {
        self.0.count()
    }

    /// The lowest rank. The set is not empty.
    #[inline(always)]
    pub fn lowest(self) -> Rank {
        Rank(self.0.lowest())
    }

    /// The rank with `before` ranks of the set before it.
    #[inline(always)]
    pub fn nth(self, before: u32) -> Rank {
        debug_assert!(before < self.count(), "{before} of {self:?}");
        let mut left = self.0;
        for _ in 0..before {
            left &= left - 1;
        }
        Self(left).lowest()
    }

    /// Removes and returns the lowest rank, if there is any.
    #[inline(always)]
    pub fn take_lowest(&mut self) -> Option<Rank> {
        self.0.take_lowest().map(Rank)
    }

    /// Calls `each` for every rank, lowest first.
    #[inline(always)]
    pub fn for_each(self, mut each: impl FnMut(Rank)) {
        let mut left = self;
        while let Some(lowest) = left.take_lowest() {
            each(lowest);
        }
    }

    /// The slot of `rank`'s reduced row among those of a token that goes to these ranks, in rank order. The
    /// set came over the wire: even if `rank` is not in it, the slot is one of the token's.
    #[inline(always)]
    pub fn reduced_slot(self, window: &Window, rank: Rank) -> u32 {
        let before = (self.0 & ((1 << rank.0) - 1)).count();
        before.min(window.last_combine_slot())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A header that does not name this rank may name as many others as a token has slots, all of them before
    /// it.
    #[test]
    fn a_reduced_slot_is_one_of_the_tokens_whatever_the_header_names() {
        let mut shape = Shape {
            ranks: 1,
            p2p_world_size: 1,
            experts: 64,
            top_k: 1,
            hidden: 8,
            max_tokens_per_rank: 1,
            combine_mode: 0,
            token_format: 0,
        };
        for (ranks, top_k) in [(2, 1), (8, 2), (64, 8), (64, 32), (4, 32)] {
            (shape.ranks, shape.top_k) = (ranks, top_k);
            let window = Window::of(&shape);
            for me in 0..ranks {
                for named in 0..=top_k.min(ranks) {
                    let lowest = ((1u128 << named) - 1) as u64;
                    let slot = RankSet(lowest).reduced_slot(&window, Rank(me));
                    assert!(
                        slot < shape.combine_slots(),
                        "{named} of {ranks} ranks named, not {me}"
                    );
                    let named_too = RankSet(lowest | 1 << me);
                    if named_too.count() <= top_k {
                        let before = lowest & ((1 << me) - 1);
                        assert_eq!(named_too.reduced_slot(&window, Rank(me)), before.count());
                    }
                }
            }
        }
    }

    #[test]
    fn ranks_are_counted_and_numbered_in_their_order() {
        let set = RankSet::of_word(1 << 63 | 1 << 40 | 1 << 3);
        let mut ranks = std::vec::Vec::new();
        set.for_each(|rank| ranks.push(rank));
        assert_eq!(ranks, [Rank(3), Rank(40), Rank(63)]);
        assert_eq!(set.count(), 3);
        assert_eq!([0, 1, 2].map(|before| set.nth(before)), ranks[..]);
        assert!(set.contains(Rank(40)) && !set.contains(Rank(41)));
        let upper = RankSet::of_word(u64::MAX << 32);
        assert_eq!(set.among(upper).lowest(), Rank(40));
        assert_eq!(set.without(upper), RankSet::of_word(1 << 3));
        assert_eq!(set.without(upper).with(set.among(upper)), set);
    }
}
