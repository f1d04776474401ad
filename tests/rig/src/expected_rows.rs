//! Oracle's outcome of a round whose rows stay as they came.

use ferry_reference::{
    Finish, Problem, ReceivedRows, bf16, combine_rows, combine_weights, receive_rows,
};

use super::case::Case;
use super::dice::Dice;
use super::settings::rows_for;
use super::specials;
use crate::verify::{RowLayout, Rows};

/// Inputs of the ranks' combines after a dispatch whose rows stay as they came, and the results.
pub struct ExpectedRows {
    received: Vec<ReceivedRows>,
    /// Rows that the outputs of each rank hold.
    pub capacities: Vec<usize>,
    /// Answers of each rank's experts, `[rows, hidden]`.
    pub answers: Vec<Vec<bf16>>,
    /// BF16 `[tensor rows, hidden]` that each rank's sums begin with.
    pub initial: Vec<[Option<Vec<bf16>>; 2]>,
    /// Weights that each rank returns, `[rows, top_k]`.
    pub weights: Vec<Vec<f32>>,
    combined_weights: Vec<Vec<u32>>,
}

impl ExpectedRows {
    /// Works out a round with these inputs as they arrive. `finish` has an entry for each rank. Also returns
    /// the bytes of the results of each rank.
    pub fn of(
        case: &Case,
        problem: &Problem,
        round: usize,
        scale: &[f32],
        finish: &[Finish],
    ) -> (Self, Vec<Vec<u8>>) {
        let config = case.config();
        let mut dice = Dice::new(case.seed ^ 0x726f_7773 ^ (round as u64) << 32);
        let mut received = Vec::new();
        for rank in 0..case.ranks {
            let rows = case.received_rows(rows_for(problem, rank, &config), &mut dice);
            let numbers = RowLayout::of(&config, rows).numbers();
            received.push(receive_rows(problem, rank, numbers));
        }
        let answers = received.iter().enumerate().map(|(rank, rows)| {
            let layout = RowLayout::of(&config, rows.tokens.len());
            answers(
                case,
                problem,
                &Rows::described(layout, rows),
                rank,
                scale,
                &mut dice,
            )
        });
        let answers: Vec<_> = answers.collect();
        let weights = received.iter().map(|rows| weights(rows, &mut dice));
        let weights: Vec<_> = weights.collect();
        let initial = problem.inputs.iter().map(|input| {
            let elements = case.rows(input.tokens) * case.hidden;
            case.initial
                .map(|is_given| is_given.then(|| numbers(case, elements, &mut dice)))
        });
        let initial: Vec<_> = initial.collect();
        let of_tokens = problem.inputs.iter().zip(&initial).map(|(input, given)| {
            let elements = input.tokens * case.hidden;
            given
                .each_ref()
                .map(|rows| rows.as_ref().map(|rows| rows[..elements].to_vec()))
        });
        let of_tokens: Vec<_> = of_tokens.collect();
        let back = combine_weights(problem, &received, &weights);
        let bits = |weights: &Vec<f32>| weights.iter().map(|weight| weight.to_bits()).collect();
        let combined = combine_rows(problem, &received, &answers, &of_tokens, finish);
        let expected = Self {
            capacities: received.iter().map(|rows| rows.tokens.len()).collect(),
            combined_weights: match case.combine_weights {
                true => back.iter().map(bits).collect(),
                false => vec![Vec::new(); case.ranks],
            },
            received,
            answers,
            initial,
            weights,
        };
        (expected, combined)
    }

    /// Weights that come back to a rank, f32 bits, `[tokens, top_k]`; empty if none do.
    pub fn combined_weights(&self, rank: usize) -> &[u32] {
        &self.combined_weights[rank]
    }

    /// Rows that come to a rank, and rows that its outputs hold, if these are fewer.
    pub fn lacks(&self, rank: usize) -> Option<(usize, usize)> {
        let (sent, held) = (self.received[rank].sent, self.capacities[rank]);
        (sent > held).then_some((sent, held))
    }
}

/// Answers of a rank's experts; if the case has specials, with any bits in between.
fn answers(
    case: &Case,
    problem: &Problem,
    rows: &Rows,
    rank: usize,
    scale: &[f32],
    dice: &mut Dice,
) -> Vec<bf16> {
    let hidden = problem.hidden;
    let mut answers = rows.answers(scale, rank, |_, source, token| {
        &problem.inputs[source].x[token * hidden..][..hidden]
    });
    if case.specials {
        for (row, _, _) in rows.present() {
            specials::put_bits(dice, &mut answers[row * hidden..][..hidden]);
        }
    }
    answers
}

/// Weights that return with a rank's rows: any number, any bits, and NaN in slots whose weights nobody reads.
fn weights(rows: &ReceivedRows, dice: &mut Dice) -> Vec<f32> {
    let slots = rows.ids.iter();
    let mut weights: Vec<f32> = slots.map(|_| dice.below(1000) as f32 / 7.0).collect();
    specials::put_weights(dice, &mut weights);
    for (weight, &id) in weights.iter_mut().zip(&rows.ids) {
        if id < 0 {
            *weight = f32::NAN;
        }
    }
    weights
}

/// Numbers to begin sums with; if the case has specials, with any bits in between.
fn numbers(case: &Case, count: usize, dice: &mut Dice) -> Vec<bf16> {
    let mut number = || bf16::from_f32((dice.below(4001) as f32 - 2000.0) / 97.0);
    let mut numbers: Vec<bf16> = (0..count).map(|_| number()).collect();
    if case.specials {
        specials::put_bits(dice, &mut numbers);
    }
    numbers
}
