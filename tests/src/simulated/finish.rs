//! What combines with options are given, drawn from a seed, and what the oracle says of it.

use ferry::*;
use ferry_own_epilogue::LimitedWithOffsets;
use ferry_reference::{
    Element, Finish, Problem, SharedRows, apply_expert_scale, bf16, combine_with, dispatch,
};

use super::{Case, Dice, POISON, Return, Run, Tensors, download, poisoned, scale_of};
use crate::verify::{Compared, PlacedRow, Placement};

/// Bytes behind a result, where nothing may write.
const BEYOND: usize = 64;

/// Which of the options of a combine there are.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Row scales.
    pub row_scales: bool,
    /// The biases.
    pub biases: [bool; 2],
    /// The residual.
    pub residual: bool,
    /// Row weights, in reduced mode.
    pub row_weights: bool,
    /// What results are made of.
    pub element: OutputElement,
}

/// What a rank's combine is given in a round.
struct Given {
    finish: Finish,
    /// In the order of the oracle's rows.
    row_weights: Option<Vec<f32>>,
}

impl Options {
    /// Any, by a seed.
    pub fn any(seed: u64) -> Self {
        let mut dice = Dice::new(seed ^ 0x0e91_1090);
        let mut coin = || dice.below(2) == 0;
        Self {
            row_scales: coin(),
            biases: [coin(), coin()],
            residual: coin(),
            row_weights: coin(),
            element: OutputElement::ALL[dice.below(3)],
        }
    }

    fn draw(&self, case: &Case, problem: &Problem, round: usize, rank: usize) -> Given {
        let mut dice = Dice::new(case.seed ^ (round * 64 + rank) as u64 ^ 0xf1_4154);
        let (tokens, hidden) = (problem.inputs[rank].tokens, case.hidden);
        let mut number = || (dice.below(4001) as f32 - 2000.0) / 97.0;
        let row_scales = self
            .row_scales
            .then(|| (0..tokens).map(|_| number()).collect());
        let mut row = |is_given: bool, elements: usize| -> Option<Vec<bf16>> {
            is_given.then(|| (0..elements).map(|_| bf16::from_f32(number())).collect())
        };
        let biases = self.biases.map(|is_given| row(is_given, hidden));
        let residual = row(self.residual, tokens * hidden);
        let is_reduced = case.how == Return::Reduced;
        let compared = Compared::with_shared(case.shared_expert);
        let rows = routed_rows(case, problem, rank);
        let row_weights =
            (self.row_weights && is_reduced).then(|| rows.iter().map(|_| number()).collect());
        Given {
            finish: Finish {
                shared: compared.shared_rows(problem, rank).map(|rows| SharedRows {
                    after_rounding: !is_reduced,
                    ..rows
                }),
                row_scales,
                biases,
                residual,
                element: match self.element {
                    OutputElement::Bf16 => Element::Bf16,
                    OutputElement::F16 => Element::F16,
                    OutputElement::F32 => Element::F32,
                },
            },
            row_weights,
        }
    }

    /// Gives a rank's combine what it is to be given.
    fn give(
        &self,
        case: &Case,
        problem: &Problem,
        place: (usize, &ExpertParallel),
        t: &mut Tensors,
    ) {
        let (round, ep) = place;
        let rank = ep.rank().0 as usize;
        let given = self.draw(case, problem, round, rank);
        let (device, hidden) = (ep.device(), case.hidden);
        let tokens = problem.inputs[rank].tokens;
        let finish = &given.finish;
        let bias = |bias: &Option<Vec<bf16>>| {
            let bias = bias.as_ref();
            bias.map(|bias| device.upload_tensor([hidden], bias).unwrap())
        };
        let scales = finish.row_scales.as_ref();
        let residual = finish.residual.as_ref();
        let steps = CombineSteps {
            row_scales: scales.map(|scales| device.upload_tensor([tokens], scales).unwrap()),
            biases: [bias(&finish.biases[0]), bias(&finish.biases[1])],
            residual: residual.map(|rows| device.upload_tensor([tokens, hidden], rows).unwrap()),
        };
        if steps != CombineSteps::default() {
            t.expert_rows.epilogue = CombineEpilogue::Steps(steps);
        }
        t.expert_rows.row_weights = given.row_weights.map(|weights| {
            let capacity = t.output.tokens.dims[0];
            let mut placed = vec![f32::NAN; capacity];
            let rows = routed_rows(case, problem, rank);
            for (position, weight) in rows.into_iter().zip(weights) {
                placed[position] = weight;
            }
            device.upload_tensor([capacity], &placed).unwrap()
        });
        let bytes = tokens * hidden * self.element.bits() as usize / 8;
        let at = poisoned(ep, bytes + BEYOND);
        t.combined =
            CombineOutput::summed(Tensor::contiguous(at, [tokens, hidden])).of(self.element);
    }

    /// Runs a case with these options and compares every result with the oracle's.
    pub fn run(&self, group: &Group, case: &Case, config: Config) {
        let problems = case.problems();
        let run = Run::on(group, config, case, &problems, |tensors, ranks| {
            for (round, tensors) in tensors.iter_mut().enumerate() {
                for (t, ep) in tensors.iter_mut().zip(ranks) {
                    self.give(case, &problems[round], (round, ep), t);
                }
            }
        });
        for outcome in &run.outcomes {
            assert_eq!(*outcome, super::Outcome::Finished, "{self:?}: {case:?}");
        }
        for (round, problem) in problems.iter().enumerate() {
            self.compare(&run, problem, round);
        }
        run.close();
    }

    fn compare(&self, run: &Run, problem: &Problem, round: usize) {
        let case = &run.case;
        let expert_rows = apply_expert_scale(problem, &dispatch(problem), &scale_of(case, round));
        // Those of other processes' ranks, too: the sums of one rank are made of all ranks' rows.
        let (finish, weights): (Vec<_>, Vec<_>) = (0..case.ranks)
            .map(|rank| {
                let given = self.draw(case, problem, round, rank);
                (given.finish, given.row_weights)
            })
            .unzip();
        let weights: Option<Vec<_>> = weights.into_iter().collect();
        let mode = match case.how {
            Return::Reduced => ferry_reference::CombineMode::Reduced,
            _ => ferry_reference::CombineMode::Exact,
        };
        let wanted = combine_with(problem, &expert_rows, weights.as_deref(), mode, &finish);
        let width = self.element.bits() as usize / 8;
        for (ep, t) in run.ranks.iter().zip(&run.tensors[round]) {
            let wanted = &wanted[ep.rank().0 as usize];
            let at = t.combined.combined.rows().at;
            let found: Vec<u8> = download(&**ep.device(), at, wanted.len() + BEYOND).unwrap();
            let differs = wanted
                .iter()
                .zip(&found)
                .position(|(wanted, found)| wanted != found);
            if let Some(at) = differs {
                let (token, column) = (at / width / case.hidden, at / width % case.hidden);
                let at = at / width * width..(at / width + 1) * width;
                panic!(
                    "rank {}, token {token}, column {column}: {:x?} instead of {:x?}: round {round}, \
                     {self:?}: {case:?}",
                    ep.rank().0,
                    &found[at.clone()],
                    &wanted[at]
                );
            }
            let beyond = &found[wanted.len()..];
            assert!(
                beyond.iter().all(|&byte| byte == POISON),
                "written beyond the end: {case:?}"
            );
        }
    }
}

/// Where a rank's rows stand, without those of a shared expert, in the order of the oracle.
fn routed_rows(case: &Case, problem: &Problem, rank: usize) -> Vec<usize> {
    let compared = Compared::with_shared(case.shared_expert);
    let placement = &Placement::of(problem, case.format, compared)[rank];
    let routed = placement.rows.iter().filter(|row| row.is_routed());
    routed.map(PlacedRow::position).collect()
}

/// Runs a case with the epilogue of a crate of a user's on a group whose kernels have it: f32
/// results, of which each is what the epilogue makes of the sum.
pub fn run_own(group: &Group, case: &Case, config: Config) {
    let (problems, hidden) = (case.problems(), case.hidden);
    let offsets: Vec<f32> = (0..hidden).map(|column| column as f32 / 7.0).collect();
    let limit = 1.5;
    let run = Run::on(group, config, case, &problems, |tensors, ranks| {
        for (t, ep) in tensors
            .iter_mut()
            .flat_map(|round| round.iter_mut().zip(ranks))
        {
            let tokens = t.input.x.dims[0];
            let value = LimitedWithOffsets {
                offsets: ep
                    .device()
                    .upload_tensor([hidden], &offsets)
                    .unwrap()
                    .at
                    .address(),
                limit,
                reserved: 0,
            };
            // SAFETY: the tensor is kept.
            let own = unsafe { OwnEpilogue::new(&value) }.unwrap();
            t.expert_rows.epilogue = CombineEpilogue::Own(own);
            let at = poisoned(ep, 4 * tokens * hidden);
            let rows = Tensor::contiguous(at, [tokens, hidden]);
            t.combined = CombineOutput::summed(rows).of(OutputElement::F32);
        }
    });
    for (round, problem) in problems.iter().enumerate() {
        let rows = apply_expert_scale(problem, &dispatch(problem), &scale_of(case, round));
        let mode = match case.how {
            Return::Reduced => ferry_reference::CombineMode::Reduced,
            _ => ferry_reference::CombineMode::Exact,
        };
        let finish = Finish {
            element: Element::F32,
            ..Finish::NONE
        };
        let sums = combine_with(problem, &rows, None, mode, &vec![finish; case.ranks]);
        for (ep, t) in run.ranks.iter().zip(&run.tensors[round]) {
            let sums = &sums[ep.rank().0 as usize];
            let at = t.combined.combined.rows().at;
            let found: Vec<f32> = download(&**ep.device(), at, sums.len() / 4).unwrap();
            for (index, (found, sum)) in found.iter().zip(sums.as_chunks().0).enumerate() {
                let (token, column) = (index / hidden, index % hidden);
                let limited = f32::from_ne_bytes(*sum).clamp(-limit, limit);
                let wanted = limited + offsets[column] * token as f32;
                assert_eq!(
                    found.to_bits(),
                    wanted.to_bits(),
                    "{token}, {column}: {case:?}"
                );
            }
        }
    }
    run.close();
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As in a process that drives one rank of many.
    #[test]
    fn one_rank_of_a_group_is_compared() {
        let case = Case {
            options: true,
            ..Case::small(3)
        };
        let options = Options::any(3);
        let group = Group::simulated_with(case.machine()).unwrap();
        let problems = case.problems();
        let mut run = Run::on(&group, case.config(), &case, &problems, |tensors, ranks| {
            for (t, ep) in tensors[0].iter_mut().zip(ranks) {
                options.give(&case, &problems[0], (0, ep), t);
            }
        });
        run.ranks.remove(0).close().unwrap();
        run.tensors[0].remove(0);
        options.compare(&run, &problems[0], 0);
        run.close();
    }
}
