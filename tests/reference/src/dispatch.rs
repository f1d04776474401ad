//! Results of a dispatch on every rank.

use std::ops::Range;

use half::bf16;

use crate::combine::round_to_bf16;
use crate::problem::{Problem, Row, rows_of_ranks};
use crate::threads;

/// One rank's outputs of a dispatch. `rows` is the number of top-k slots of
/// all ranks that name one of its experts.
#[derive(Clone, Debug, PartialEq)]
pub struct Dispatched {
    /// The rows that arrived, `[rows, hidden]`: by local expert, then source
    /// rank, then token, then top-k slot.
    pub tokens: Vec<bf16>,
    /// First row of every local expert, and the end of the last one, `[local_experts + 1]`:
    /// expert `l` has rows `row_offsets[l]..row_offsets[l + 1]`.
    pub row_offsets: Vec<u32>,
    /// The local expert of every group of rows, `[local_experts]`: 0, 1, 2, ...
    pub expert_ids: Vec<i32>,
    /// Token index and top-k slot of every row on its source rank, `[rows]`.
    pub src_info: Vec<[i32; 2]>,
    /// The source rank of every row, `[rows]`.
    pub src_rank: Vec<usize>,
}

/// Dispatches: one [`Dispatched`] for each rank, in rank order.
///
/// A token that lists an expert twice has two rows.
///
/// # Panics
///
/// If [`Problem::check`] finds a fault.
pub fn dispatch(problem: &Problem) -> Vec<Dispatched> {
    problem.assert_valid();
    let rows_of_ranks = rows_of_ranks(problem);
    threads::each(&rows_of_ranks, problem.elements(), |rows| {
        dispatch_to_one(problem, rows)
    })
}

/// Dispatches like [`dispatch`], with a shared expert, of which each rank has a copy.
///
/// Each rank's own tokens, in order, are the rows of group 0; local expert `l` is group `l + 1`.
/// `row_offsets` and `expert_ids` have one more entry. The source of a row of group 0 is this rank; its
/// `src_info` is the token and -1, because it belongs to no slot.
///
/// # Panics
///
/// In the cases of [`dispatch`].
pub fn dispatch_with_shared(problem: &Problem) -> Vec<Dispatched> {
    dispatch_with_shared_part(problem, 0, 1)
}

/// Dispatches like [`dispatch_with_shared`], with [part](part_of) `index` of `of` of each rank's own tokens
/// in group 0.
///
/// # Panics
///
/// In the cases of [`dispatch`].
pub fn dispatch_with_shared_part(problem: &Problem, index: usize, of: usize) -> Vec<Dispatched> {
    let mut all = dispatch(problem);
    for (rank, dispatched) in all.iter_mut().enumerate() {
        let own = &problem.inputs[rank];
        let part = part_of(own.tokens, index, of);
        let count = u32::try_from(part.len()).expect("a number of tokens fits a u32");
        let x = &own.x[part.start * problem.hidden..part.end * problem.hidden];
        dispatched.tokens = [x, &dispatched.tokens].concat();
        for offset in &mut dispatched.row_offsets {
            *offset += count;
        }
        dispatched.row_offsets.insert(0, 0);
        let groups = problem.local_experts() + 1;
        dispatched.expert_ids = (0..to_i32(groups)).collect();
        let mut src_rank = vec![rank; part.len()];
        let mut src_info: Vec<[i32; 2]> = part.map(|token| [to_i32(token), -1]).collect();
        src_info.append(&mut dispatched.src_info);
        dispatched.src_info = src_info;
        src_rank.append(&mut dispatched.src_rank);
        dispatched.src_rank = src_rank;
    }
    all
}

/// Part `index` of `of` of so many tokens. The parts follow each other; if they cannot all be equally long,
/// the first ones are a token longer.
pub fn part_of(tokens: usize, index: usize, of: usize) -> Range<usize> {
    let length = |part: usize| tokens / of + usize::from(part < tokens % of);
    let start = (0..index).map(length).sum();
    start..start + length(index)
}

fn dispatch_to_one(problem: &Problem, rows: &[Row]) -> Dispatched {
    let hidden = problem.hidden;
    let mut dispatched = Dispatched {
        tokens: Vec::with_capacity(rows.len() * hidden),
        row_offsets: Vec::new(),
        expert_ids: (0..to_i32(problem.local_experts())).collect(),
        src_info: Vec::new(),
        src_rank: Vec::new(),
    };
    let mut rows_of_expert = vec![0u32; problem.local_experts()];
    for row in rows {
        let start = row.token * hidden;
        let x = &problem.inputs[row.source].x[start..start + hidden];
        dispatched.tokens.extend_from_slice(x);
        dispatched
            .src_info
            .push([to_i32(row.token), to_i32(row.slot)]);
        dispatched.src_rank.push(row.source);
        rows_of_expert[row.local_expert] += 1;
    }
    let mut offset = 0;
    dispatched.row_offsets.push(offset);
    for count in rows_of_expert {
        offset += count;
        dispatched.row_offsets.push(offset);
    }
    dispatched
}

fn to_i32(value: usize) -> i32 {
    i32::try_from(value).expect("an index fits an i32")
}

/// Acts as the experts: multiplies each row by its expert's factor, in f32,
/// and rounds it with [`round_to_bf16`].
///
/// `dispatched` has one entry for each rank; `scale` is `[experts]`, by global
/// expert. Returns the rows of every rank, `[rows, hidden]` each, in the order
/// that [`combine`](crate::combine()) takes.
///
/// # Panics
///
/// If the lengths do not match the problem.
pub fn apply_expert_scale(
    problem: &Problem,
    dispatched: &[Dispatched],
    scale: &[f32],
) -> Vec<Vec<bf16>> {
    assert_eq!(dispatched.len(), problem.ranks, "dispatched: one per rank");
    assert_eq!(scale.len(), problem.experts, "scale: one per expert");
    let local_experts = problem.local_experts();
    let scale_one = |rank: usize| {
        let dispatched = &dispatched[rank];
        let mut scaled = Vec::with_capacity(dispatched.tokens.len());
        for local_expert in 0..local_experts {
            let factor = scale[rank * local_experts + local_expert];
            let first = dispatched.row_offsets[local_expert] as usize * problem.hidden;
            let last = dispatched.row_offsets[local_expert + 1] as usize * problem.hidden;
            for value in &dispatched.tokens[first..last] {
                scaled.push(round_to_bf16(value.to_f32() * factor));
            }
        }
        scaled
    };
    threads::each(0..problem.ranks, problem.elements(), scale_one)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::RankInput;

    fn values(values: &[f32]) -> Vec<bf16> {
        values.iter().copied().map(bf16::from_f32).collect()
    }

    /// Two ranks, experts 0 and 1 on rank 0, experts 2 and 3 on rank 1. Rank 0
    /// has tokens 10, 11, 12, rank 1 has tokens 20, 21.
    fn problem() -> Problem {
        Problem {
            ranks: 2,
            experts: 4,
            top_k: 2,
            hidden: 2,
            inputs: vec![
                RankInput {
                    tokens: 3,
                    x: values(&[10.0, -10.0, 11.0, -11.0, 12.0, -12.0]),
                    topk_ids: vec![1, 0, 3, 1, -1, 0],
                    topk_weights: vec![0.5; 6],
                },
                RankInput {
                    tokens: 2,
                    x: values(&[20.0, -20.0, 21.0, -21.0]),
                    // Token 20 lists expert 1 twice; token 21 goes nowhere.
                    topk_ids: vec![1, 1, -1, -1],
                    topk_weights: vec![0.5; 4],
                },
            ],
        }
    }

    #[test]
    fn rows_are_by_expert_source_token_slot() {
        let dispatched = dispatch(&problem());
        let rank = &dispatched[0];
        assert_eq!(
            rank.tokens,
            values(&[
                10.0, -10.0, 12.0, -12.0, // expert 0
                10.0, -10.0, 11.0, -11.0, 20.0, -20.0, 20.0, -20.0, // expert 1
            ])
        );
        assert_eq!(rank.row_offsets, [0, 2, 6]);
        assert_eq!(rank.expert_ids, [0, 1]);
        assert_eq!(
            rank.src_info,
            [[0, 1], [2, 1], [0, 0], [1, 1], [0, 0], [0, 1]]
        );
        assert_eq!(rank.src_rank, [0, 0, 0, 0, 1, 1]);

        let rank = &dispatched[1];
        assert_eq!(rank.tokens, values(&[11.0, -11.0]));
        assert_eq!(rank.row_offsets, [0, 0, 1]);
        assert_eq!(rank.expert_ids, [0, 1]);
        assert_eq!(rank.src_info, [[1, 0]]);
        assert_eq!(rank.src_rank, [0]);
    }

    #[test]
    fn own_tokens_are_the_first_group_where_there_is_a_shared_expert() {
        let dispatched = dispatch_with_shared(&problem());
        let rank = &dispatched[0];
        assert_eq!(
            rank.tokens[..6],
            values(&[10.0, -10.0, 11.0, -11.0, 12.0, -12.0])
        );
        assert_eq!(rank.row_offsets, [0, 3, 5, 9]);
        assert_eq!(rank.expert_ids, [0, 1, 2]);
        assert_eq!(rank.src_info[..4], [[0, -1], [1, -1], [2, -1], [0, 1]]);
        assert_eq!(rank.src_rank, [0, 0, 0, 0, 0, 0, 0, 1, 1]);

        let rank = &dispatched[1];
        assert_eq!(
            rank.tokens,
            values(&[20.0, -20.0, 21.0, -21.0, 11.0, -11.0])
        );
        assert_eq!(rank.row_offsets, [0, 2, 2, 3]);
        assert_eq!(rank.expert_ids, [0, 1, 2]);
        assert_eq!(rank.src_info, [[0, -1], [1, -1], [1, 0]]);
        assert_eq!(rank.src_rank, [1, 1, 0]);
    }

    #[test]
    fn the_scale_is_indexed_by_global_expert() {
        let problem = problem();
        let scaled = apply_expert_scale(&problem, &dispatch(&problem), &[1.0, 2.0, 64.0, -1.0]);
        assert_eq!(
            scaled[0],
            values(&[
                10.0, -10.0, 12.0, -12.0, 20.0, -20.0, 22.0, -22.0, 40.0, -40.0, 40.0, -40.0
            ])
        );
        assert_eq!(scaled[1], values(&[-11.0, 11.0]));
    }

    #[test]
    fn no_tokens_anywhere() {
        let nothing = RankInput {
            tokens: 0,
            x: vec![],
            topk_ids: vec![],
            topk_weights: vec![],
        };
        let problem = Problem {
            ranks: 3,
            experts: 6,
            top_k: 4,
            hidden: 8,
            inputs: vec![nothing; 3],
        };
        for rank in dispatch(&problem) {
            assert!(rank.tokens.is_empty() && rank.src_info.is_empty() && rank.src_rank.is_empty());
            assert_eq!(rank.row_offsets, [0, 0, 0]);
            assert_eq!(rank.expert_ids, [0, 1]);
        }
    }

    #[test]
    #[should_panic(expected = "rank 0, token 1, slot 0: expert 4 of 4")]
    fn an_expert_that_does_not_exist_is_refused() {
        let mut problem = problem();
        problem.inputs[0].topk_ids[2] = 4;
        dispatch(&problem);
    }
}
