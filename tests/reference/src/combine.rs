//! Results of a combine on every rank.

use std::ops::Range;

use half::bf16;

use crate::problem::{Problem, rows_of_ranks};
use crate::threads;

/// Way in which the rows of one token become its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CombineMode {
    /// Each rank sums its weighted rows of the token, in slot order, and
    /// rounds the sum to bf16; the source adds those partial sums in rank
    /// order, in f32, and rounds the total to bf16.
    Reduced,
    /// The source sums all weighted rows in slot order, in f32, and rounds
    /// once.
    Exact,
    /// No sum and no weights: the row of every slot, bit for bit.
    Unreduced,
}

/// Rounds to the nearest bf16, ties to even. Any NaN becomes `0x7FFF`.
pub fn round_to_bf16(value: f32) -> bf16 {
    if value.is_nan() {
        bf16::from_bits(0x7FFF)
    } else {
        bf16::from_f32(value)
    }
}

/// Tokens combined by one thread.
const TOKENS_OF_THREAD: usize = 256;

/// The row that answers one top-k slot.
#[derive(Clone, Copy)]
struct Place {
    rank: usize,
    row: usize,
}

/// Combines: the result of every source rank, in rank order.
///
/// `expert_rows` has one entry for each rank, `[rows, hidden]`, its rows in
/// the order of [`dispatch`](crate::dispatch())'s. A result is
/// `[tokens, hidden]`, or `[tokens, top_k, hidden]` if the mode is
/// [`CombineMode::Unreduced`]. Slots that are not routed add nothing; without
/// reduction their rows are zero. The result of a token with no routed slot is
/// zeros.
///
/// Every product and every sum is rounded to f32 by itself, never fused.
///
/// # Panics
///
/// If [`Problem::check`] finds a fault, or a rank's rows have the wrong length.
pub fn combine(problem: &Problem, expert_rows: &[Vec<bf16>], mode: CombineMode) -> Vec<Vec<bf16>> {
    let places = places(problem, expert_rows);
    let combine_some = |source: usize, tokens: Range<usize>| {
        let mut result = Vec::new();
        for token in tokens {
            let slots = token * problem.top_k..(token + 1) * problem.top_k;
            let token = Token {
                ranks: problem.ranks,
                hidden: problem.hidden,
                expert_rows,
                places: &places[source][slots.clone()],
                weights: &problem.inputs[source].topk_weights[slots],
            };
            result.extend(match mode {
                CombineMode::Reduced => token.reduced(),
                CombineMode::Exact => token.exact(),
                CombineMode::Unreduced => token.unreduced(),
            });
        }
        result
    };
    let combine_source = |source: usize| -> Vec<bf16> {
        let tokens = problem.inputs[source].tokens;
        let firsts = (0..tokens).step_by(TOKENS_OF_THREAD);
        let ranges = firsts.map(|first| first..tokens.min(first + TOKENS_OF_THREAD));
        let parts: Vec<_> = threads::each(ranges, problem.elements(), |tokens| {
            combine_some(source, tokens)
        });
        parts.concat()
    };
    threads::each(0..problem.ranks, problem.elements(), combine_source)
}

/// Finds the row of every slot of every source rank.
fn places(problem: &Problem, expert_rows: &[Vec<bf16>]) -> Vec<Vec<Option<Place>>> {
    problem.assert_valid();
    assert_eq!(
        expert_rows.len(),
        problem.ranks,
        "expert_rows: one per rank"
    );
    let mut places: Vec<Vec<Option<Place>>> = Vec::new();
    for input in &problem.inputs {
        places.push(vec![None; input.tokens * problem.top_k]);
    }
    for (rank, rows) in rows_of_ranks(problem).into_iter().enumerate() {
        assert_eq!(
            expert_rows[rank].len(),
            rows.len() * problem.hidden,
            "expert_rows of rank {rank}: elements"
        );
        for (row, source) in rows.into_iter().enumerate() {
            let slot = source.token * problem.top_k + source.slot;
            places[source.source][slot] = Some(Place { rank, row });
        }
    }
    places
}

/// The sums of every source rank before the last rounding, `[tokens, hidden]`. In reduced mode the rows are
/// weighted with `row_weights`, if given: for each rank one weight per row.
///
/// # Panics
///
/// In the cases of [`combine`], and if the mode is [`CombineMode::Unreduced`].
pub(crate) fn sums(
    problem: &Problem,
    expert_rows: &[Vec<bf16>],
    row_weights: Option<&[Vec<f32>]>,
    mode: CombineMode,
) -> Vec<Vec<f32>> {
    let places = places(problem, expert_rows);
    let sum = |source: usize, token: usize| {
        let slots = token * problem.top_k..(token + 1) * problem.top_k;
        let places = &places[source][slots.clone()];
        let mut weights = problem.inputs[source].topk_weights[slots].to_vec();
        if let Some(row_weights) = row_weights {
            for (weight, place) in weights.iter_mut().zip(places) {
                if let Some(place) = place {
                    *weight = row_weights[place.rank][place.row];
                }
            }
        }
        let token = Token {
            ranks: problem.ranks,
            hidden: problem.hidden,
            expert_rows,
            places,
            weights: &weights,
        };
        match mode {
            CombineMode::Reduced => token.reduced_sum(),
            CombineMode::Exact => token.exact_sum(),
            CombineMode::Unreduced => panic!("rows are not summed"),
        }
    };
    threads::each(0..problem.ranks, problem.elements(), |source| {
        let tokens = 0..problem.inputs[source].tokens;
        tokens
            .flat_map(|token| sum(source, token))
            .collect::<Vec<_>>()
    })
}

/// One token, with the places and weights of its slots, `[top_k]` each.
struct Token<'a> {
    ranks: usize,
    hidden: usize,
    expert_rows: &'a [Vec<bf16>],
    places: &'a [Option<Place>],
    weights: &'a [f32],
}

impl Token<'_> {
    fn row(&self, place: Place) -> &[bf16] {
        let start = place.row * self.hidden;
        &self.expert_rows[place.rank][start..start + self.hidden]
    }

    /// Adds a row times `weight` to `sum`. Each product is rounded to f32 before it is added.
    fn add_weighted(&self, sum: &mut [f32], weight: f32, place: Place) {
        for (sum, value) in sum.iter_mut().zip(self.row(place)) {
            let product = weight * value.to_f32();
            *sum += product;
        }
    }

    fn exact(&self) -> Vec<bf16> {
        self.exact_sum().into_iter().map(round_to_bf16).collect()
    }

    fn reduced(&self) -> Vec<bf16> {
        self.reduced_sum().into_iter().map(round_to_bf16).collect()
    }

    fn exact_sum(&self) -> Vec<f32> {
        let mut sum = vec![0f32; self.hidden];
        for (place, weight) in self.places.iter().zip(self.weights) {
            if let Some(place) = *place {
                self.add_weighted(&mut sum, *weight, place);
            }
        }
        sum
    }

    fn reduced_sum(&self) -> Vec<f32> {
        let mut sum = vec![0f32; self.hidden];
        for rank in 0..self.ranks {
            let mut any = false;
            let mut partial = vec![0f32; self.hidden];
            for (place, weight) in self.places.iter().zip(self.weights) {
                if let Some(place) = *place
                    && place.rank == rank
                {
                    any = true;
                    self.add_weighted(&mut partial, *weight, place);
                }
            }
            if any {
                for (sum, partial) in sum.iter_mut().zip(partial) {
                    *sum += round_to_bf16(partial).to_f32();
                }
            }
        }
        sum
    }

    fn unreduced(&self) -> Vec<bf16> {
        let mut rows = Vec::with_capacity(self.places.len() * self.hidden);
        for place in self.places {
            match *place {
                Some(place) => rows.extend_from_slice(self.row(place)),
                None => rows.extend(std::iter::repeat_n(bf16::ZERO, self.hidden)),
            }
        }
        rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::RankInput;

    /// Combines on 2 ranks: experts 0 and 1 on rank 0, experts 2 and 3 on rank 1.
    fn combine_one(slots: &[(i32, f32, u16)], mode: CombineMode) -> Vec<u16> {
        combine_over(2, slots, mode)
    }

    /// Combines one token on rank 0 with 4 experts, hidden 1; `slots` are
    /// (expert, weight, bits of the expert's row).
    fn combine_over(ranks: usize, slots: &[(i32, f32, u16)], mode: CombineMode) -> Vec<u16> {
        let input = RankInput {
            tokens: 1,
            x: vec![bf16::ONE],
            topk_ids: slots.iter().map(|slot| slot.0).collect(),
            topk_weights: slots.iter().map(|slot| slot.1).collect(),
        };
        let nothing = RankInput {
            tokens: 0,
            x: vec![],
            topk_ids: vec![],
            topk_weights: vec![],
        };
        let problem = Problem {
            ranks,
            experts: 4,
            top_k: slots.len(),
            hidden: 1,
            inputs: [vec![input], vec![nothing; ranks - 1]].concat(),
        };
        let mut rows = vec![Vec::new(); ranks];
        for expert in 0..4 {
            for slot in slots.iter().filter(|slot| slot.0 == expert) {
                rows[expert as usize / (4 / ranks)].push(bf16::from_bits(slot.2));
            }
        }
        let results = combine(&problem, &rows, mode);
        assert_eq!(results.len(), ranks);
        assert!(results[1..].iter().all(Vec::is_empty));
        results[0].iter().map(|value| value.to_bits()).collect()
    }

    #[test]
    fn rounding() {
        let cases = [
            (0x3F80_0000, 0x3F80), // 1
            (0x3F80_8000, 0x3F80), // 1 + 2^-8: tie, 1 is even
            (0x3F80_8001, 0x3F81), // just above the tie
            (0x3F81_8000, 0x3F82), // 1 + 2^-7 + 2^-8: tie, up to even
            (0x3F81_7FFF, 0x3F81), // just below the tie
            (0xBF81_8000, 0xBF82), // the same, negative
            (0x8000_0000, 0x8000), // -0
            (0x0000_8001, 0x0001), // to the smallest subnormal
            (0x7F7F_FFFF, 0x7F80), // the largest f32, to infinity
            (0xFF80_0000, 0xFF80), // -infinity
            (0x7FC0_0000, 0x7FFF), // NaN
            (0xFF80_0001, 0x7FFF), // signalling NaN, negative
        ];
        for (value, expected) in cases {
            let actual = round_to_bf16(f32::from_bits(value)).to_bits();
            assert_eq!(actual, expected, "{value:#010X}: {actual:#06X}");
        }
    }

    #[test]
    fn weighted_sum() {
        // 0.5 * 2 + 0.25 * 4 + (not routed) + 2 * -3 = -4, in both modes.
        let slots = [
            (0, 0.5, 0x4000),
            (3, 0.25, 0x4080),
            (-1, 8.0, 0),
            (1, 2.0, 0xC040),
        ];
        assert_eq!(combine_one(&slots, CombineMode::Exact), [0xC080]);
        assert_eq!(combine_one(&slots, CombineMode::Reduced), [0xC080]);
        assert_eq!(
            combine_one(&slots, CombineMode::Unreduced),
            [0x4000, 0x4080, 0x0000, 0xC040]
        );
    }

    #[test]
    fn sums_begin_at_plus_0() {
        let modes = [CombineMode::Exact, CombineMode::Reduced];
        for slots in [
            &[(0, 1.0, 0x8000)][..],
            &[(0, 1.0, 0x8000), (2, 2.0, 0x8000)],
            &[(-1, 1.0, 0)],
        ] {
            for mode in modes {
                assert_eq!(combine_one(slots, mode), [0], "{mode:?} {slots:?}");
            }
        }
        assert_eq!(
            combine_one(&[(0, 1.0, 0x8000)], CombineMode::Unreduced),
            [0x8000]
        );
    }

    #[test]
    fn the_same_expert_twice_counts_twice() {
        // 0.5 * 2 + 0.25 * 4 = 2; the rows come in slot order.
        let slots = [(2, 0.5, 0x4000), (2, 0.25, 0x4080)];
        assert_eq!(combine_one(&slots, CombineMode::Exact), [0x4000]);
        assert_eq!(combine_one(&slots, CombineMode::Reduced), [0x4000]);
        assert_eq!(
            combine_one(&slots, CombineMode::Unreduced),
            [0x4000, 0x4080]
        );
    }

    #[test]
    fn partial_sums_are_rounded() {
        // Rows are 1, weights 1 + 2^-8 and 2^-8, on two ranks.
        // Exact: 1 + 2^-7, a bf16. Reduced: 1 + 2^-8 is a tie and becomes 1;
        // 1 + 2^-8 is once more a tie and becomes 1.
        let tiny = 1.0 / 256.0;
        let slots = [(0, 1.0 + tiny, 0x3F80), (2, tiny, 0x3F80)];
        assert_eq!(combine_one(&slots, CombineMode::Exact), [0x3F81]);
        assert_eq!(combine_one(&slots, CombineMode::Reduced), [0x3F80]);
        // On one rank there is one rounding.
        let slots = [(0, 1.0 + tiny, 0x3F80), (1, tiny, 0x3F80)];
        assert_eq!(combine_one(&slots, CombineMode::Reduced), [0x3F81]);
    }

    #[test]
    fn slots_are_added_in_order() {
        // 2^24 + 1 is a tie in f32 and becomes 2^24; minus 2^24 is 0. By rank
        // it is 1 (rank 0) and 2^24 - 2^24 (rank 1).
        let big = 16_777_216.0;
        let slots = [(3, big, 0x3F80), (0, 1.0, 0x3F80), (2, -big, 0x3F80)];
        assert_eq!(combine_one(&slots, CombineMode::Exact), [0x0000]);
        assert_eq!(combine_one(&slots, CombineMode::Reduced), [0x3F80]);
        // All on rank 0, the experts descending: still by slot, so 0, not 1.
        let slots = [(1, big, 0x3F80), (1, 1.0, 0x3F80), (0, -big, 0x3F80)];
        assert_eq!(combine_one(&slots, CombineMode::Reduced), [0x0000]);
    }

    #[test]
    fn ranks_are_added_in_order() {
        // On 4 ranks, by rank: 2^24 + 1 becomes 2^24, minus 2^24 is 0. By slot
        // it is -2^24 + 2^24 + 1 = 1.
        let big = 16_777_216.0;
        let slots = [(2, -big, 0x3F80), (0, big, 0x3F80), (1, 1.0, 0x3F80)];
        assert_eq!(combine_over(4, &slots, CombineMode::Reduced), [0x0000]);
        assert_eq!(combine_over(4, &slots, CombineMode::Exact), [0x3F80]);
    }

    #[test]
    fn products_are_rounded_before_the_sum() {
        // (1 + 2^-23) * (1 + 2^-7) = 1 + 2^-7 + 2^-23 + 2^-30, in f32 without
        // the last term. Minus that f32 is 0; fused it would be 2^-30.
        let product = f32::from_bits(0x3F81_0001);
        let weight = f32::from_bits(0x3F80_0001);
        let slots = [(0, -product, 0x3F80), (1, weight, 0x3F81)];
        assert_eq!(combine_one(&slots, CombineMode::Exact), [0x0000]);
        assert_eq!(combine_one(&slots, CombineMode::Reduced), [0x0000]);
    }

    #[test]
    fn nan_is_canonical_unless_copied() {
        let slots = [(0, 1.0, 0xFFC1), (2, 1.0, 0x3F80)];
        assert_eq!(combine_one(&slots, CombineMode::Exact), [0x7FFF]);
        assert_eq!(combine_one(&slots, CombineMode::Reduced), [0x7FFF]);
        assert_eq!(
            combine_one(&slots, CombineMode::Unreduced),
            [0xFFC1, 0x3F80]
        );
    }

    #[test]
    fn a_token_that_goes_nowhere_gives_zeros() {
        let slots = [(-1, f32::NAN, 0), (-1, f32::NAN, 0)];
        assert_eq!(combine_one(&slots, CombineMode::Exact), [0]);
        assert_eq!(combine_one(&slots, CombineMode::Reduced), [0]);
        assert_eq!(combine_one(&slots, CombineMode::Unreduced), [0, 0]);
    }
}
