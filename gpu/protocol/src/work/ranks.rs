//! The ranks of a token's experts, as sender, receiver and combine compute them.

use ferry_layout::{Common, NOT_ROUTED, Rank, Shape, Window};

use crate::machine::rows::Bits;
use crate::machine::{LANES, Machine};

/// The result of `read` on the lanes of a token's top-k slots; `NOT_ROUTED` on all others.
#[inline(always)]
pub fn lane_or_none(lane: u32, top_k: u32, read: impl FnOnce() -> u32) -> u32 {
    if lane < top_k { read() } else { NOT_ROUTED }
}

/// The bit of the rank that holds `expert`, or no bit.
#[inline(always)]
pub fn rank_bit(shape: &Shape, expert: u32) -> u64 {
    if expert < shape.experts {
        1 << shape.rank_of(expert).0
    } else {
        0
    }
}

/// The ranks of a token's experts, as bits.
#[inline(always)]
pub fn ranks_of<M: Machine>(machine: &M, shape: &Shape, experts: M::Lanes<u32>) -> u64 {
    machine.union(machine.lanes(|lane| rank_bit(shape, machine.own(experts, lane))))
}

/// Ranks among `ranks` that are on this rank's node: all of them if there is no other node.
#[inline(always)]
pub fn p2p_ranks<M: Machine>(machine: &M, common: &Common, ranks: u64) -> u64 {
    match machine.spans_nodes() {
        true => ranks & node_of(&common.shape, common.rank()),
        false => ranks,
    }
}

/// Whether `rank` is on this rank's node.
#[inline(always)]
pub fn is_p2p<M: Machine>(machine: &M, common: &Common, rank: Rank) -> bool {
    !machine.spans_nodes() || common.shape.same_node(common.rank(), rank)
}

/// The ranks of `rank`'s node, as bits.
#[inline(always)]
pub fn node_of(shape: &Shape, rank: Rank) -> u64 {
    let size = shape.p2p_world_size;
    let first = rank.0 / size * size;
    (u64::MAX >> (64 - size)) << first
}

/// The slot of `rank`'s reduced row among those of a token that goes to `ranks`, in rank order. `ranks` came
/// over the wire: even if `rank` is not among them, the slot is one of the token's.
#[inline(always)]
pub fn reduced_slot(window: &Window, ranks: u64, rank: Rank) -> u32 {
    let before = (ranks & ((1 << rank.0) - 1)).count();
    before.min(window.last_combine_slot())
}

/// Calls `each` for every set bit, lowest first.
#[inline(always)]
pub fn for_each_bit(mut bits: impl Bits, mut each: impl FnMut(u32)) {
    while let Some(lowest) = bits.take_lowest() {
        each(lowest);
    }
}

/// Calls `each(rank)` on one lane for every rank of the group.
#[inline(always)]
pub fn on_each_rank<M: Machine>(machine: &M, ranks: u32, each: impl Fn(Rank)) {
    for first in (0..ranks).step_by(LANES as usize) {
        machine.lanes(|lane| {
            if first + lane < ranks {
                each(Rank(first + lane));
            }
        });
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
                    let slot = reduced_slot(&window, lowest, Rank(me));
                    assert!(
                        slot < shape.combine_slots(),
                        "{named} of {ranks} ranks named, not {me}"
                    );
                    let named_too = lowest | 1 << me;
                    if named_too.count() <= top_k {
                        let before = lowest & ((1 << me) - 1);
                        assert_eq!(reduced_slot(&window, named_too, Rank(me)), before.count());
                    }
                }
            }
        }
    }
}
