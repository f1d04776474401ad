//! What combines with options are given, drawn from a seed, and what the oracle says of it.

use ferry::layout::OutputElement;
use ferry::*;
use ferry_own_epilogue::LimitedWithOffsets;
use ferry_reference::{
    Element, Finish, Problem, SharedRows, apply_expert_scale, bf16, combine_with, dispatch,
};

use super::{Case, Dice, POISON, Return, Run, download, poisoned, scale_of};
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

/// A rank in a round.
pub(crate) struct Subject<'a> {
    pub(crate) seed: u64,
    pub(crate) problem: &'a Problem,
    /// Of the problem's ranks.
    pub(crate) rank: usize,
    pub(crate) compared: Compared,
    pub(crate) format: TokenFormat,
    pub(crate) mode: CombineMode,
    /// Rows that its tensors have, of which tokens are the first.
    pub(crate) rows: usize,
}

impl Subject<'_> {
    /// Where the rows of its experts stand, without those of a shared expert, in the order of the oracle.
    fn routed_rows(&self) -> Vec<usize> {
        let placement = &Placement::of(self.problem, self.format, self.compared)[self.rank];
        let routed = placement.rows.iter().filter(|row| row.is_routed());
        routed.map(PlacedRow::position).collect()
    }
}

/// What a rank's combine is given in a round.
pub(crate) struct Given {
    pub(crate) finish: Finish,
    /// In the order of the oracle's rows.
    pub(crate) row_weights: Option<Vec<f32>>,
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

    /// What a rank's combine is given, and what the oracle makes of the sums then.
    pub(crate) fn draw(&self, subject: &Subject<'_>) -> Given {
        let mut dice = Dice::new(subject.seed ^ 0xf1_4154);
        let (tokens, hidden) = (subject.rows, subject.problem.hidden);
        let mut number = || (dice.below(4001) as f32 - 2000.0) / 97.0;
        let row_scales = self
            .row_scales
            .then(|| (0..tokens).map(|_| number()).collect());
        let mut row = |is_given: bool, elements: usize| -> Option<Vec<bf16>> {
            is_given.then(|| (0..elements).map(|_| bf16::from_f32(number())).collect())
        };
        let biases = self.biases.map(|is_given| row(is_given, hidden));
        let residual = row(self.residual, tokens * hidden);
        let is_reduced = subject.mode == CombineMode::Reduced;
        let shared = subject.compared.shared_rows(subject.problem, subject.rank);
        let rows = subject.routed_rows();
        let row_weights =
            (self.row_weights && is_reduced).then(|| rows.iter().map(|_| number()).collect());
        Given {
            finish: Finish {
                shared: shared.map(|rows| SharedRows {
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
    pub(crate) fn give(
        &self,
        subject: &Subject<'_>,
        ep: &Communicator,
        input: &mut CombineInput,
        output: &mut CombineOutput,
    ) {
        let given = self.draw(subject);
        let (device, hidden) = (ep.device(), subject.problem.hidden);
        let tokens = subject.rows;
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
            input.epilogue = CombineEpilogue::Steps(steps);
        }
        input.row_weights = given.row_weights.map(|weights| {
            let capacity = input.expert_rows.dims[0];
            let mut placed = vec![f32::NAN; capacity];
            let rows = subject.routed_rows();
            for (position, weight) in rows.into_iter().zip(weights) {
                placed[position] = weight;
            }
            device.upload_tensor([capacity], &placed).unwrap()
        });
        let bytes = tokens * hidden * self.element.bits() as usize / 8;
        let at = poisoned(ep, bytes + BEYOND);
        *output = CombineOutput::Summed(Tensor::contiguous(
            at,
            self.element.into(),
            [tokens, hidden],
        ));
    }

    /// Runs a case with these options and compares every result with the oracle's.
    pub fn run(&self, group: &Group, case: &Case, config: Config) {
        let problems = case.problems();
        let run = Run::on(group, config, case, &problems, |tensors, ranks| {
            for (round, tensors) in tensors.iter_mut().enumerate() {
                for (t, ep) in tensors.iter_mut().zip(ranks) {
                    let subject = subject(case, round, &problems[round], ep.rank());
                    self.give(&subject, ep, &mut t.expert_rows, &mut t.combined);
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
                let given = self.draw(&subject(case, round, problem, Rank(rank as u32)));
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
            let at = t.combined.rows().at;
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

/// A rank of a case in a round.
fn subject<'a>(case: &Case, round: usize, problem: &'a Problem, rank: Rank) -> Subject<'a> {
    let rank = rank.0 as usize;
    Subject {
        seed: case.seed ^ (round * 64 + rank) as u64,
        problem,
        rank,
        compared: Compared::with_shared(case.shared_expert),
        format: case.format,
        mode: case.how.mode(),
        rows: problem.inputs[rank].tokens,
    }
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
            let rows = Tensor::contiguous(at, DataType::F32, [tokens, hidden]);
            t.combined = CombineOutput::Summed(rows);
        }
    });
    for (round, problem) in problems.iter().enumerate() {
        let rows = apply_expert_scale(problem, &dispatch(problem), &scale_of(case, round));
        let mode = match case.how {
            Return::Reduced => ferry_reference::CombineMode::Reduced,
            _ => ferry_reference::CombineMode::Exact,
        };
        let compared = Compared::with_shared(case.shared_expert);
        let of_rank = |rank| Finish {
            shared: compared.shared_rows(problem, rank).map(|rows| SharedRows {
                after_rounding: case.how != Return::Reduced,
                ..rows
            }),
            element: Element::F32,
            ..Finish::NONE
        };
        let finish: Vec<_> = (0..case.ranks).map(of_rank).collect();
        let sums = combine_with(problem, &rows, None, mode, &finish);
        for (ep, t) in run.ranks.iter().zip(&run.tensors[round]) {
            let sums = &sums[ep.rank().0 as usize];
            let at = t.combined.rows().at;
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
                let subject = subject(&case, 0, &problems[0], ep.rank());
                options.give(&subject, ep, &mut t.expert_rows, &mut t.combined);
            }
        });
        run.ranks.remove(0).close().unwrap();
        run.tensors[0].remove(0);
        options.compare(&run, &problems[0], 0);
        run.close();
    }
}
