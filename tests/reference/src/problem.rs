//! The input of one dispatch over all ranks.

use half::bf16;

/// One rank's input to dispatch. All tensors are dense and row-major.
#[derive(Clone, Debug, PartialEq)]
pub struct RankInput {
    /// Number of tokens on this rank; may be zero, and differs between ranks.
    pub tokens: usize,
    /// Token rows, `[tokens, hidden]`.
    pub x: Vec<bf16>,
    /// Global expert of every top-k slot, `[tokens, top_k]`. A negative id
    /// (by convention -1) means that the slot is not routed.
    pub topk_ids: Vec<i32>,
    /// Router weight of every top-k slot, `[tokens, top_k]`. The weight of a
    /// slot that is not routed has no effect.
    pub topk_weights: Vec<f32>,
}

/// One dispatch over all ranks.
///
/// The experts are split evenly and in order: with `L = experts / ranks`,
/// expert `e` lives on rank `e / L` and is local expert `e % L` there.
#[derive(Clone, Debug, PartialEq)]
pub struct Problem {
    /// Number of ranks, at least 1.
    pub ranks: usize,
    /// Number of experts over all ranks, a multiple of `ranks`.
    pub experts: usize,
    /// Top-k slots of a token, at least 1.
    pub top_k: usize,
    /// Elements of a token row, at least 1.
    pub hidden: usize,
    /// One input for each rank, `[ranks]`.
    pub inputs: Vec<RankInput>,
}

/// Reason why a [`Problem`] is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProblemError {
    /// A size that must be positive is zero.
    #[error("{field} is zero")]
    Zero {
        /// The field of [`Problem`].
        field: &'static str,
    },
    /// The experts cannot be split evenly over the ranks.
    #[error("{experts} experts cannot be split evenly over {ranks} ranks")]
    ExpertsNotDivisible {
        /// Number of experts.
        experts: usize,
        /// Number of ranks.
        ranks: usize,
    },
    /// The number of experts does not fit an id of type `i32`.
    #[error("{experts} experts cannot be numbered with i32 ids")]
    TooManyExperts {
        /// Number of experts.
        experts: usize,
    },
    /// There is not one input for each rank.
    #[error("{inputs} rank inputs for {ranks} ranks")]
    Inputs {
        /// Number of rank inputs.
        inputs: usize,
        /// Number of ranks.
        ranks: usize,
    },
    /// A tensor has the wrong number of elements.
    #[error("{tensor} of rank {rank} has {actual} elements, its shape asks for {expected}")]
    Length {
        /// The rank.
        rank: usize,
        /// The field of [`RankInput`].
        tensor: &'static str,
        /// Elements that the shape asks for.
        expected: usize,
        /// Elements that are there.
        actual: usize,
    },
    /// An expert id is not below the number of experts.
    #[error("rank {rank}, token {token}, slot {slot}: expert {expert} of {experts}")]
    ExpertOutOfRange {
        /// The source rank.
        rank: usize,
        /// The token on that rank.
        token: usize,
        /// The top-k slot of that token.
        slot: usize,
        /// The id found there.
        expert: i32,
        /// Number of experts.
        experts: usize,
    },
}

/// Checks the sizes that every problem has.
pub(crate) fn check_sizes(
    ranks: usize,
    experts: usize,
    top_k: usize,
    hidden: usize,
) -> Result<(), ProblemError> {
    let sizes = [
        ("ranks", ranks),
        ("experts", experts),
        ("top_k", top_k),
        ("hidden", hidden),
    ];
    for (field, size) in sizes {
        if size == 0 {
            return Err(ProblemError::Zero { field });
        }
    }
    if !experts.is_multiple_of(ranks) {
        return Err(ProblemError::ExpertsNotDivisible { experts, ranks });
    }
    if i32::try_from(experts).is_err() {
        return Err(ProblemError::TooManyExperts { experts });
    }
    Ok(())
}

impl Problem {
    /// Elements of all ranks' tokens.
    pub fn elements(&self) -> usize {
        self.inputs.iter().map(|input| input.x.len()).sum()
    }

    /// Number of experts on each rank.
    pub fn local_experts(&self) -> usize {
        self.experts / self.ranks
    }

    /// Finds the first reason why this problem is invalid: an empty or uneven
    /// size, a tensor of the wrong length, an expert id too large.
    pub fn check(&self) -> Result<(), ProblemError> {
        check_sizes(self.ranks, self.experts, self.top_k, self.hidden)?;
        if self.inputs.len() != self.ranks {
            return Err(ProblemError::Inputs {
                inputs: self.inputs.len(),
                ranks: self.ranks,
            });
        }
        for (rank, input) in self.inputs.iter().enumerate() {
            let slots = input.tokens * self.top_k;
            let lengths = [
                ("x", input.tokens * self.hidden, input.x.len()),
                ("topk_ids", slots, input.topk_ids.len()),
                ("topk_weights", slots, input.topk_weights.len()),
            ];
            for (tensor, expected, actual) in lengths {
                if expected != actual {
                    return Err(ProblemError::Length {
                        rank,
                        tensor,
                        expected,
                        actual,
                    });
                }
            }
            for (index, &expert) in input.topk_ids.iter().enumerate() {
                if usize::try_from(expert).is_ok_and(|expert| expert >= self.experts) {
                    return Err(ProblemError::ExpertOutOfRange {
                        rank,
                        token: index / self.top_k,
                        slot: index % self.top_k,
                        expert,
                        experts: self.experts,
                    });
                }
            }
        }
        Ok(())
    }

    /// Panics with the reason if [`check`](Self::check) finds one.
    pub(crate) fn assert_valid(&self) {
        if let Err(error) = self.check() {
            panic!("not a valid problem: {error}");
        }
    }

    /// The global expert of one top-k slot, or `None` if it is not routed.
    pub fn expert(&self, rank: usize, token: usize, slot: usize) -> Option<usize> {
        usize::try_from(self.inputs[rank].topk_ids[token * self.top_k + slot]).ok()
    }
}

/// One routed top-k slot, as a row of the rank that holds its expert.
///
/// The order of the fields is the order of the rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Row {
    pub local_expert: usize,
    pub source: usize,
    pub token: usize,
    pub slot: usize,
}

/// The output rows of every rank, in order.
pub(crate) fn rows_of_ranks(problem: &Problem) -> Vec<Vec<Row>> {
    let local_experts = problem.local_experts();
    let mut rows_of_ranks = vec![Vec::new(); problem.ranks];
    for source in 0..problem.ranks {
        for token in 0..problem.inputs[source].tokens {
            for slot in 0..problem.top_k {
                if let Some(expert) = problem.expert(source, token, slot) {
                    rows_of_ranks[expert / local_experts].push(Row {
                        local_expert: expert % local_experts,
                        source,
                        token,
                        slot,
                    });
                }
            }
        }
    }
    for rows in &mut rows_of_ranks {
        rows.sort();
    }
    rows_of_ranks
}

#[cfg(test)]
mod tests {
    use super::*;

    fn valid() -> Problem {
        Problem {
            ranks: 2,
            experts: 4,
            top_k: 2,
            hidden: 1,
            inputs: vec![
                RankInput {
                    tokens: 1,
                    x: vec![bf16::ONE],
                    topk_ids: vec![3, -1],
                    topk_weights: vec![1.0, 0.0],
                },
                RankInput {
                    tokens: 0,
                    x: vec![],
                    topk_ids: vec![],
                    topk_weights: vec![],
                },
            ],
        }
    }

    fn message(change: impl FnOnce(&mut Problem)) -> String {
        let mut problem = valid();
        change(&mut problem);
        problem.check().unwrap_err().to_string()
    }

    #[test]
    fn every_fault_is_named() {
        assert_eq!(valid().check(), Ok(()));
        assert_eq!(message(|p| p.ranks = 0), "ranks is zero");
        assert_eq!(message(|p| p.top_k = 0), "top_k is zero");
        assert_eq!(
            message(|p| p.experts = 5),
            "5 experts cannot be split evenly over 2 ranks"
        );
        assert_eq!(
            message(|p| p.experts = 1 << 31),
            "2147483648 experts cannot be numbered with i32 ids"
        );
        assert_eq!(
            message(|p| p.inputs.truncate(1)),
            "1 rank inputs for 2 ranks"
        );
        assert_eq!(
            message(|p| p.hidden = 2),
            "x of rank 0 has 1 elements, its shape asks for 2"
        );
        assert_eq!(
            message(|p| p.inputs[0].topk_ids[1] = 4),
            "rank 0, token 0, slot 1: expert 4 of 4"
        );
    }
}
