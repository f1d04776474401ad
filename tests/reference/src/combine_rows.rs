//! Combine of rows that stayed as they came.

use half::bf16;

use crate::combine::round_to_bf16;
use crate::finish::Finish;
use crate::problem::Problem;
use crate::rows::{ReceivedRows, as_it_travels};

/// Combines rows that stayed as they came. Returns the bytes of the result of every source rank,
/// `[tokens, hidden]`, in the byte order of this machine.
///
/// `received` and `expert_rows` have one entry for each rank; expert rows are `[rows, hidden]`, weighted and
/// summed over the rank's experts. A token's sum is +0, plus its rows of `initial`, plus a row of each rank
/// with an expert of the token, in rank order; all in f32. A row that the rank's outputs did not hold is
/// zeros. Then come the steps of `finish`.
///
/// # Panics
///
/// If [`Problem::check`] finds a fault, or a list or a tensor has the wrong length.
pub fn combine_rows(
    problem: &Problem,
    received: &[ReceivedRows],
    expert_rows: &[Vec<bf16>],
    initial: &[[Option<Vec<bf16>>; 2]],
    finish: &[Finish],
) -> Vec<Vec<u8>> {
    problem.assert_valid();
    let hidden = problem.hidden;
    let lengths = [
        received.len(),
        expert_rows.len(),
        initial.len(),
        finish.len(),
    ];
    assert_eq!(lengths, [problem.ranks; 4], "an entry for each rank");
    for (received, rows) in received.iter().zip(expert_rows) {
        assert_eq!(rows.len(), received.tokens.len() * hidden, "expert_rows");
    }
    let places = places(problem, received);
    let mut results = Vec::new();
    for (source, input) in problem.inputs.iter().enumerate() {
        let mut sums = vec![0f32; input.tokens * hidden];
        for rows in initial[source].iter().flatten() {
            add(&mut sums, rows);
        }
        for (token, places) in places[source].iter().enumerate() {
            let sum = &mut sums[token * hidden..(token + 1) * hidden];
            for (rank, place) in places.iter().enumerate() {
                if let Some(row) = *place {
                    let row = &expert_rows[rank][row * hidden..(row + 1) * hidden];
                    add(sum, &returned(row));
                }
            }
        }
        results.push(finish[source].bytes(hidden, sums));
    }
    results
}

/// Adds one value after the other, each sum rounded to f32.
fn add(sums: &mut [f32], values: &[bf16]) {
    assert_eq!(sums.len(), values.len(), "values to add");
    for (sum, value) in sums.iter_mut().zip(values) {
        *sum += value.to_f32();
    }
}

/// A row as it travels back: a sum of one row of weight 1, so that a NaN is `0x7FFF` and -0 is 0.
fn returned(row: &[bf16]) -> Vec<bf16> {
    row.iter()
        .map(|x| round_to_bf16(0.0 + 1.0 * x.to_f32()))
        .collect()
}

/// Returns the weights that come back with the rows: of every source rank, `[tokens, top_k]`.
///
/// `weights` has one entry for each rank, `[rows, top_k]`. A slot's weight is that of its token's row on the
/// rank of its expert; 0 if the slot is not routed, or the rank's outputs did not hold the row.
///
/// # Panics
///
/// If [`Problem::check`] finds a fault, or a list is too short.
pub fn combine_weights(
    problem: &Problem,
    received: &[ReceivedRows],
    weights: &[Vec<f32>],
) -> Vec<Vec<f32>> {
    problem.assert_valid();
    let places = places(problem, received);
    let mut results = Vec::new();
    for (source, places) in places.iter().enumerate() {
        let mut result = Vec::new();
        for (token, places) in places.iter().enumerate() {
            for slot in 0..problem.top_k {
                let expert = problem.expert(source, token, slot);
                let rank = expert.map(|expert| expert / problem.local_experts());
                let weight = rank.and_then(|rank| {
                    let row = places[rank]?;
                    Some(weights[rank][row * problem.top_k + slot])
                });
                result.push(weight.map_or(0.0, as_it_travels));
            }
        }
        results.push(result);
    }
    results
}

/// The row of each token on each rank that holds it: `[source][token][rank]`.
fn places(problem: &Problem, received: &[ReceivedRows]) -> Vec<Vec<Vec<Option<usize>>>> {
    let inputs = problem.inputs.iter();
    let mut places: Vec<_> = inputs
        .map(|input| vec![vec![None; problem.ranks]; input.tokens])
        .collect();
    for (rank, received) in received.iter().enumerate() {
        for (row, token) in received.tokens.iter().enumerate() {
            if let Some((source, token)) = *token {
                places[source][token][rank] = Some(row);
            }
        }
    }
    places
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finish::Element;
    use crate::rows::tests::{bits, problem, values};
    use crate::rows::{RowNumbers, receive_rows};

    /// Combines rows of these bits, one list for each rank, and returns the f32 results of rank 0.
    fn combine_bits(
        rows: [&[u16]; 2],
        initial: [Option<&[f32]>; 2],
        numbers: [RowNumbers; 2],
    ) -> Vec<f32> {
        let problem = problem();
        let received: Vec<_> = (0..2)
            .map(|rank| receive_rows(&problem, rank, numbers[rank]))
            .collect();
        let rows = rows.map(|rows| rows.iter().map(|&bits| bf16::from_bits(bits)).collect());
        let finish = Finish {
            element: Element::F32,
            ..Finish::NONE
        };
        let results = combine_rows(
            &problem,
            &received,
            &rows,
            &[initial.map(|rows| rows.map(values)), [None, None]],
            &[finish.clone(), finish],
        );
        let elements = results[0].as_chunks().0.iter();
        elements.map(|&bytes| f32::from_ne_bytes(bytes)).collect()
    }

    const THREE: RowNumbers = RowNumbers::Compact { capacity: 3 };
    const TWO: RowNumbers = RowNumbers::Compact { capacity: 2 };
    /// A row that nobody may read.
    const NAN: u16 = 0xffff;

    #[test]
    fn sums_are_of_initial_rows_then_of_ranks_in_order() {
        // Rank 0's rows are 1, 2, 3; rank 1's 4, 5 for tokens 1 and 2.
        let rows: [&[u16]; 2] = [&[0x3f80, 0x4000, 0x4040], &[0x4080, 0x40a0]];
        assert_eq!(combine_bits(rows, [None; 2], [THREE, TWO]), [1.0, 6.0, 5.0]);
        // 2^24 + 1 is a tie and becomes 2^24; then -2^24 is 0, and not 1.
        let (big, one) = (16_777_216.0, 1.0);
        let initial: [Option<&[f32]>; 2] = [Some(&[big; 3]), Some(&[one; 3])];
        let rows: [&[u16]; 2] = [&[0xcb80, 0xcb80, NAN], &[0x3f80, 0xcb80]];
        assert_eq!(combine_bits(rows, initial, [THREE, TWO]), [0.0, 1.0, 0.0]);
        let initial: [Option<&[f32]>; 2] = [None, Some(&[0.5; 3])];
        let rows: [&[u16]; 2] = [&[0, 0, NAN], &[0, 0x3f80]];
        assert_eq!(combine_bits(rows, initial, [THREE, TWO]), [0.5, 0.5, 1.5]);
    }

    #[test]
    fn only_rows_with_a_token_are_read() {
        let strided = RowNumbers::Strided { max_tokens: 3 };
        let first: &[u16] = &[0x3f80, 0x4000, NAN, NAN, 0x4040, NAN];
        let second: &[u16] = &[NAN, 0x4080, 0x40a0, NAN, NAN, NAN];
        let sums = combine_bits([first, second], [None; 2], [strided; 2]);
        assert_eq!(sums, [1.0, 6.0, 5.0]);
    }

    #[test]
    fn a_row_that_outputs_did_not_hold_is_zeros() {
        let one = RowNumbers::Compact { capacity: 1 };
        let rows: [&[u16]; 2] = [&[0x3f80], &[0x4080]];
        assert_eq!(combine_bits(rows, [None; 2], [one; 2]), [1.0, 4.0, 0.0]);
        let problem = problem();
        let received: Vec<_> = (0..2)
            .map(|rank| receive_rows(&problem, rank, one))
            .collect();
        let weights = combine_weights(&problem, &received, &[vec![5.0, 6.0], vec![7.0, 8.0]]);
        assert_eq!(weights[0], [5.0, 6.0, 7.0, 0.0, 0.0, 0.0]);
        assert_eq!(weights[1], [0.0; 4]);
    }

    #[test]
    fn minus_zero_and_nan_travel_as_sums() {
        assert_eq!(returned(&[bf16::NEG_ZERO])[0].to_bits(), 0);
        assert_eq!(returned(&[bf16::from_bits(0xffc1)])[0].to_bits(), 0x7fff);
        let rows: [&[u16]; 2] = [&[0x8000, 0x8000, NAN], &[0x8000, NAN]];
        let initial: [Option<&[f32]>; 2] = [Some(&[-0.0; 3]), None];
        let sums = combine_bits(rows, initial, [THREE, TWO]);
        assert_eq!(bits(&sums), [0, 0, 0x7fff_ffff]);
    }

    #[test]
    fn weights_come_from_the_rank_of_their_expert() {
        let problem = problem();
        let received: Vec<_> = (0..2)
            .map(|rank| receive_rows(&problem, rank, THREE))
            .collect();
        let ones = f32::from_bits(u32::MAX);
        let first = vec![1.0, 2.0, 3.0, 4.0, 5.0, ones];
        let second = vec![6.0, 7.0, 8.0, 9.0, f32::NAN, f32::NAN];
        let weights = combine_weights(&problem, &received, &[first, second]);
        assert_eq!(weights[0], [1.0, 2.0, 6.0, 4.0, 0.0, 9.0]);
        let wanted = [0.0, 0.0, 5.0, f32::from_bits(0xffff_fffe)];
        assert_eq!(bits(&weights[1]), bits(&wanted));
    }
}
