//! One rank's part of tokens that every rank has.

use crate::problem::{Problem, RankInput};

/// The problem of rank `rank` of `ranks` if every rank has the tokens of `all`, which has one input: a single
/// rank with this rank's experts, numbered from 0. Slots of other ranks' experts are not routed.
///
/// Its [`dispatch`](crate::dispatch()) returns this rank's rows. Its [`combine`](crate::combine()) in
/// [`CombineMode::Exact`](crate::CombineMode::Exact) or
/// [`CombineMode::Unreduced`](crate::CombineMode::Unreduced) returns this rank's contribution to the tokens:
/// zeros for tokens that name none of its experts.
///
/// # Panics
///
/// If `all` has not one input, [`Problem::check`] finds a fault, or the ranks do not divide the experts.
pub fn share_of(all: &Problem, ranks: usize, rank: usize) -> Problem {
    all.assert_valid();
    assert_eq!(all.ranks, 1, "all: ranks");
    assert!(rank < ranks, "rank {rank} of {ranks}");
    assert_eq!(
        all.experts % ranks,
        0,
        "{} experts of {ranks} ranks",
        all.experts
    );
    let here = all.experts / ranks;
    let share = |input: &RankInput| {
        let mut topk_ids = Vec::with_capacity(input.topk_ids.len());
        for &id in &input.topk_ids {
            let mut own = -1;
            for local in 0..here {
                if usize::try_from(id) == Ok(rank * here + local) {
                    own = i32::try_from(local).expect("an expert fits an i32");
                }
            }
            topk_ids.push(own);
        }
        RankInput {
            topk_ids,
            ..input.clone()
        }
    };
    Problem {
        experts: here,
        inputs: all.inputs.iter().map(share).collect(),
        ..*all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::{Routing, WorkloadSpec, generate};
    use crate::{CombineMode, apply_expert_scale, combine, dispatch};

    /// Tokens that every rank has, and the same tokens on rank 0 of as many ranks alone.
    fn both(seed: u64, ranks: usize, routing: Routing) -> (Problem, Problem) {
        let of = |ranks: usize, tokens| {
            generate(WorkloadSpec {
                ranks,
                experts: 12,
                top_k: 5,
                hidden: 3,
                tokens,
                routing: routing.clone(),
                seed,
            })
        };
        let mut tokens = vec![0; ranks];
        tokens[0] = 17;
        (of(1, vec![17]), of(ranks, tokens))
    }

    #[test]
    fn a_share_is_what_travels_to_the_rank() {
        for seed in 0..40 {
            for ranks in [1, 2, 3, 4, 6] {
                let routing = [Routing::Duplicates, Routing::Holes { probability: 0.4 }];
                let (all, apart) = both(seed, ranks, routing[seed as usize % 2].clone());
                assert_eq!(all.inputs[0], apart.inputs[0], "the same tokens");
                let scale: Vec<f32> = (0..12).map(|expert| 1.0 + expert as f32).collect();
                let sent = dispatch(&apart);
                let rows = apply_expert_scale(&apart, &sent, &scale);
                let whole = combine(&apart, &rows, CombineMode::Unreduced);
                let mut summed = vec![0f32; whole[0].len()];
                for rank in 0..ranks {
                    let share = share_of(&all, ranks, rank);
                    let kept = dispatch(&share);
                    assert_eq!(kept[0], sent[rank], "rank {rank} of {ranks}, seed {seed}");
                    let here = 12 / ranks;
                    let rows = apply_expert_scale(&share, &kept, &scale[rank * here..][..here]);
                    let part = combine(&share, &rows, CombineMode::Unreduced);
                    for (sum, part) in summed.iter_mut().zip(&part[0]) {
                        *sum += part.to_f32();
                    }
                }
                let whole: Vec<f32> = whole[0].iter().map(|value| value.to_f32()).collect();
                assert_eq!(summed, whole, "{ranks} ranks, seed {seed}");
            }
        }
    }
}
