//! Properties of the oracle and of the generators, over random shapes.

use std::collections::HashSet;

use ferry_reference::workload::{Routing, WorkloadSpec, generate};
use ferry_reference::{
    CombineMode, Finish, Problem, RowNumbers, apply_expert_scale, bf16, combine, combine_rows,
    combine_weights, dispatch, first_difference, receive_rows, round_to_bf16,
};
use proptest::prelude::*;

fn routings() -> impl Strategy<Value = Routing> {
    prop_oneof![
        Just(Routing::Uniform),
        (0.0..3.0).prop_map(|exponent| Routing::Zipf { exponent }),
        Just(Routing::AllToOne { expert: 0 }),
        (0.0..=1.0).prop_map(|probability| Routing::Holes { probability }),
        Just(Routing::Duplicates),
    ]
}

prop_compose! {
    fn specs()(
        tokens in prop::collection::vec(0usize..12, 1..6),
        local_experts in 1usize..9,
        top_k in 1usize..9,
        hidden in 1usize..6,
        routing in routings(),
        seed: u64,
    ) -> WorkloadSpec {
        WorkloadSpec {
            ranks: tokens.len(),
            experts: tokens.len() * local_experts,
            top_k,
            hidden,
            tokens,
            routing,
            seed,
        }
    }
}

/// Every routed entry: (source rank, token, slot, expert).
fn entries(problem: &Problem) -> Vec<(usize, usize, usize, usize)> {
    let mut entries = Vec::new();
    for (rank, input) in problem.inputs.iter().enumerate() {
        for (index, &id) in input.topk_ids.iter().enumerate() {
            if id >= 0 {
                let (token, slot) = (index / problem.top_k, index % problem.top_k);
                entries.push((rank, token, slot, id as usize));
            }
        }
    }
    entries
}

proptest! {
    // A failure prints its specification; no file is written.
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_routed_entry_appears_once_and_in_order(spec in specs()) {
        let problem = generate(spec);
        let hidden = problem.hidden;
        let mut found = Vec::new();
        for (rank, dispatched) in dispatch(&problem).into_iter().enumerate() {
            let local_experts = problem.local_experts();
            prop_assert_eq!(dispatched.row_offsets.len(), local_experts + 1);
            prop_assert_eq!(dispatched.row_offsets[0], 0);
            prop_assert_eq!(dispatched.row_offsets[local_experts] as usize, dispatched.src_info.len());
            prop_assert_eq!(dispatched.tokens.len(), dispatched.src_info.len() * hidden);
            for local in 0..local_experts {
                prop_assert_eq!(dispatched.expert_ids[local], local as i32);
                let mut previous = None;
                let rows = dispatched.row_offsets[local]..dispatched.row_offsets[local + 1];
                for row in rows.start as usize..rows.end as usize {
                    let source = dispatched.src_rank[row];
                    let [token, slot] = dispatched.src_info[row].map(|index| index as usize);
                    prop_assert!(previous < Some((source, token, slot)));
                    previous = Some((source, token, slot));
                    found.push((source, token, slot, rank * local_experts + local));
                    prop_assert_eq!(
                        &dispatched.tokens[row * hidden..(row + 1) * hidden],
                        &problem.inputs[source].x[token * hidden..(token + 1) * hidden]
                    );
                }
            }
        }
        found.sort_unstable();
        prop_assert_eq!(found, entries(&problem));
    }

    #[test]
    fn one_slot_of_weight_one_returns_the_input(mut spec in specs()) {
        spec.top_k = 1;
        spec.routing = Routing::Uniform;
        let mut problem = generate(spec);
        for input in &mut problem.inputs {
            input.topk_weights.fill(1.0);
            // 0 + -0 is 0: the sum does not keep a minus zero.
            for value in &mut input.x {
                *value += bf16::ZERO;
            }
        }
        let rows: Vec<_> = dispatch(&problem).into_iter().map(|rank| rank.tokens).collect();
        for mode in [CombineMode::Exact, CombineMode::Reduced, CombineMode::Unreduced] {
            let combined = combine(&problem, &rows, mode);
            for (input, combined) in problem.inputs.iter().zip(&combined) {
                prop_assert_eq!(first_difference(&input.x, combined, problem.hidden), None);
            }
        }
    }

    #[test]
    fn unreduced_rows_are_those_of_their_slot(spec in specs()) {
        let problem = generate(spec);
        let hidden = problem.hidden;
        // A power of two for each expert: exact, and tells experts apart.
        let scale: Vec<f32> = (0..problem.experts).map(|e| 2f32.powi(e as i32 - 20)).collect();
        let rows = apply_expert_scale(&problem, &dispatch(&problem), &scale);
        let combined = combine(&problem, &rows, CombineMode::Unreduced);
        let mut expected: Vec<_> = problem
            .inputs
            .iter()
            .map(|input| vec![bf16::ZERO; input.tokens * problem.top_k * hidden])
            .collect();
        for (rank, token, slot, expert) in entries(&problem) {
            for column in 0..hidden {
                let x = problem.inputs[rank].x[token * hidden + column];
                expected[rank][(token * problem.top_k + slot) * hidden + column] =
                    bf16::from_f32(x.to_f32() * scale[expert]);
            }
        }
        prop_assert_eq!(combined, expected);
    }

    #[test]
    fn both_sums_are_close_to_the_true_one(spec in specs()) {
        let problem = generate(spec);
        let hidden = problem.hidden;
        let scale: Vec<f32> = (0..problem.experts).map(|e| 1.0 + e as f32 / 8.0).collect();
        let rows = apply_expert_scale(&problem, &dispatch(&problem), &scale);
        let mut sums: Vec<_> =
            problem.inputs.iter().map(|input| vec![(0f64, 0f64); input.x.len()]).collect();
        for (rank, token, slot, expert) in entries(&problem) {
            let input = &problem.inputs[rank];
            let weight = f64::from(input.topk_weights[token * problem.top_k + slot]);
            for column in token * hidden..(token + 1) * hidden {
                let term = weight * input.x[column].to_f64() * f64::from(scale[expert]);
                sums[rank][column].0 += term;
                sums[rank][column].1 += term.abs();
            }
        }
        for mode in [CombineMode::Exact, CombineMode::Reduced] {
            let combined = combine(&problem, &rows, mode);
            for (combined, sums) in combined.iter().zip(&sums) {
                for (value, (sum, magnitude)) in combined.iter().zip(sums) {
                    // Three roundings to bf16 at most, of 2^-8 each.
                    prop_assert!((value.to_f64() - sum).abs() <= magnitude * 3.02 / 256.0);
                }
            }
        }
    }

    #[test]
    fn problems_are_valid_and_reproducible(spec in specs()) {
        let problem = generate(spec.clone());
        prop_assert_eq!(problem.check(), Ok(()));
        prop_assert_eq!(&problem, &generate(spec.clone()));
        for input in &problem.inputs {
            for ids in input.topk_ids.chunks(problem.top_k) {
                let routed: Vec<_> = ids.iter().filter(|&&id| id >= 0).collect();
                let distinct: HashSet<_> = routed.iter().collect();
                let duplicates = spec.routing == Routing::Duplicates && problem.top_k > 1;
                prop_assert_eq!(distinct.len() < routed.len(), duplicates);
            }
            for weights in input.topk_weights.chunks(problem.top_k) {
                prop_assert!(weights.iter().all(|&weight| weight > 0.0));
                prop_assert!((weights.iter().sum::<f32>() - 1.0).abs() < 1e-5);
            }
        }
    }
}

#[test]
fn the_largest_shape() {
    for routing in [Routing::Uniform, Routing::Zipf { exponent: 1.1 }] {
        let problem = generate(WorkloadSpec {
            ranks: 5,
            experts: 65_535,
            top_k: 32,
            hidden: 8,
            tokens: vec![1_000, 0, 17, 1, 64],
            routing,
            seed: 11,
        });
        let rows: Vec<_> = dispatch(&problem)
            .into_iter()
            .map(|rank| rank.tokens)
            .collect();
        assert_eq!(rows.iter().map(Vec::len).sum::<usize>(), 1_082 * 32 * 8);
        for mode in [CombineMode::Reduced, CombineMode::Exact] {
            assert_eq!(combine(&problem, &rows, mode)[0].len(), 8_000);
        }
    }
}

#[test]
fn prefill_at_full_width() {
    let problem = generate(WorkloadSpec {
        ranks: 4,
        experts: 256,
        top_k: 8,
        hidden: 7_168,
        tokens: vec![128; 4],
        routing: Routing::Zipf { exponent: 1.0 },
        seed: 5,
    });
    let rows: Vec<_> = dispatch(&problem)
        .into_iter()
        .map(|rank| rank.tokens)
        .collect();
    assert_eq!(
        rows.iter().map(Vec::len).sum::<usize>(),
        4 * 128 * 8 * 7_168
    );
    for mode in [CombineMode::Reduced, CombineMode::Exact] {
        let combined = combine(&problem, &rows, mode);
        assert!(combined.iter().all(|rows| rows.len() == 128 * 7_168));
    }
}

/// Numbers of rows of ranks with fewer than 12 tokens.
fn row_numbers(is_compact: bool, capacity: usize) -> RowNumbers {
    if is_compact {
        RowNumbers::Compact { capacity }
    } else {
        RowNumbers::Strided { max_tokens: 12 }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// A row's ids, weights and source are those of its token's rows in expert order.
    #[test]
    fn received_rows_have_every_entry_once(spec in specs(), is_compact: bool) {
        let problem = generate(spec);
        let (top_k, here) = (problem.top_k, problem.local_experts());
        let mut found = Vec::new();
        for rank in 0..problem.ranks {
            let rows = receive_rows(&problem, rank, row_numbers(is_compact, 99));
            let mut previous = None;
            for (row, token) in rows.tokens.iter().enumerate() {
                let ids = &rows.ids[row * top_k..(row + 1) * top_k];
                prop_assert_eq!(token.is_some(), ids.iter().any(|&id| id >= 0));
                prop_assert_eq!(token.is_some(), rows.src_info[row] != [-1, -1]);
                let Some((source, token)) = *token else { continue };
                prop_assert!(previous < Some((source, token)));
                previous = Some((source, token));
                for (slot, &id) in ids.iter().enumerate() {
                    let weight = rows.weights[row * top_k + slot];
                    prop_assert_eq!(id >= 0, weight > 0.0);
                    if id >= 0 {
                        prop_assert!(weight == problem.inputs[source].topk_weights[token * top_k + slot]);
                        found.push((source, token, slot, rank * here + id as usize));
                    }
                }
            }
            for local in 0..here {
                let slots = rows.ids.iter().filter(|&&id| id == local as i64).count();
                prop_assert_eq!(rows.expert_counts[local], slots as i32);
            }
            for source in 0..problem.ranks {
                let tokens = rows.tokens.iter().flatten();
                let own = tokens.filter(|token| token.0 == source).count();
                prop_assert_eq!(rows.source_counts[source], own as i32);
            }
        }
        found.sort_unstable();
        prop_assert_eq!(found, entries(&problem));
    }

    /// Rows that the experts' rank has weighted, summed and rounded come back as those that this library
    /// weights, sums and rounds.
    #[test]
    fn rows_summed_by_their_rank_are_combined_as_reduced_ones(spec in specs(), is_compact: bool) {
        let problem = generate(spec);
        let (top_k, hidden, here) = (problem.top_k, problem.hidden, problem.local_experts());
        let scale: Vec<f32> = (0..problem.experts).map(|e| 0.5 + e as f32 / 8.0).collect();
        let by_expert = apply_expert_scale(&problem, &dispatch(&problem), &scale);
        let wanted = combine(&problem, &by_expert, CombineMode::Reduced);
        let ranks = 0..problem.ranks;
        let received: Vec<_> = ranks
            .map(|rank| receive_rows(&problem, rank, row_numbers(is_compact, 99)))
            .collect();
        let answers = received.iter().enumerate().map(|(rank, rows)| {
            let mut answers = vec![bf16::NAN; rows.tokens.len() * hidden];
            for (row, token) in rows.tokens.iter().enumerate() {
                let Some((source, token)) = *token else { continue };
                for column in 0..hidden {
                    let x = problem.inputs[source].x[token * hidden + column].to_f32();
                    let mut sum = 0.0;
                    for slot in row * top_k..(row + 1) * top_k {
                        if rows.ids[slot] >= 0 {
                            let factor = scale[rank * here + rows.ids[slot] as usize];
                            sum += rows.weights[slot] * round_to_bf16(x * factor).to_f32();
                        }
                    }
                    answers[row * hidden + column] = round_to_bf16(sum);
                }
            }
            answers
        });
        let answers: Vec<_> = answers.collect();
        let none = vec![[None, None]; problem.ranks];
        let finish = vec![Finish::NONE; problem.ranks];
        let combined = combine_rows(&problem, &received, &answers, &none, &finish);
        for (wanted, combined) in wanted.iter().zip(&combined) {
            let bits: Vec<u8> = wanted.iter().flat_map(|x| x.to_bits().to_ne_bytes()).collect();
            prop_assert_eq!(&bits, combined);
        }
        let sent: Vec<_> = received.iter().map(|rows| rows.weights.clone()).collect();
        let weights = combine_weights(&problem, &received, &sent);
        for (input, weights) in problem.inputs.iter().zip(&weights) {
            for slot in 0..input.topk_ids.len() {
                let is_routed = input.topk_ids[slot] >= 0;
                prop_assert_eq!(weights[slot], if is_routed { input.topk_weights[slot] } else { 0.0 });
            }
        }
    }
}
