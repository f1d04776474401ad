//! Rounds of disjoint pairs in which every two ranks meet once: the circle method of tournaments.
//!
//! All but the last of an even number of places sit on a circle, numbered modulo their odd count. In round
//! `r` those whose numbers add up to `r` meet; the one that would meet itself meets the last place. With an
//! odd number of ranks, the last place is empty, and who would meet it pauses.

use ferry_layout::Rank;

/// Rounds in which every two of `ranks` ranks meet.
pub(super) const fn rounds(ranks: u32) -> u32 {
    places(ranks) - 1
}

/// An even number of places for the ranks, at least 2.
const fn places(ranks: u32) -> u32 {
    ranks.next_multiple_of(2)
}

/// The rank that `rank` meets in `round`, if any.
pub(super) fn partner(ranks: u32, round: u32, rank: Rank) -> Option<Rank> {
    let (last, Rank(rank)) = (places(ranks) - 1, rank);
    let meets = match rank == last {
        // Half of the round's number, modulo the odd count.
        true => round * last.div_ceil(2) % last,
        false => match (round + last - rank) % last {
            itself if itself == rank => last,
            other => other,
        },
    };
    (meets < ranks).then_some(Rank(meets))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_two_ranks_meet_once_in_rounds_of_disjoint_pairs() {
        for ranks in 1..=64 {
            let mut met = BTreeSet::new();
            for round in 0..rounds(ranks) {
                for rank in 0..ranks {
                    let Some(Rank(other)) = partner(ranks, round, Rank(rank)) else {
                        continue;
                    };
                    let back = partner(ranks, round, Rank(other));
                    assert_eq!(back, Some(Rank(rank)), "{ranks} ranks, round {round}");
                    assert!(
                        met.insert((rank, other)),
                        "{ranks} ranks: {rank} and {other}"
                    );
                }
            }
            let all = (0..ranks).flat_map(|a| (0..ranks).map(move |b| (a, b)));
            let wanted: BTreeSet<_> = all.filter(|(a, b)| a != b).collect();
            assert_eq!(met, wanted, "{ranks} ranks");
        }
    }

    #[test]
    fn an_odd_number_of_ranks_has_one_pause_a_round() {
        for ranks in [1, 3, 5, 63] {
            assert_eq!(rounds(ranks), ranks, "{ranks} ranks");
            for round in 0..rounds(ranks) {
                let pauses = (0..ranks).filter(|&rank| partner(ranks, round, Rank(rank)).is_none());
                assert_eq!(pauses.count(), 1, "{ranks} ranks, round {round}");
            }
        }
    }
}
