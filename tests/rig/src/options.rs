//! Arguments of combines with options, drawn from a seed.

use ferry::layout::OutputElement;
use ferry::*;
use ferry_reference::{Element, Finish, Problem, SharedRows, bf16};

use super::dice::Dice;
use crate::verify::{Compared, PlacedRow, Placement};

/// Options of a combine that there are.
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
    /// Elements of the results.
    pub element: OutputElement,
}

/// A rank in a round.
pub(super) struct Subject<'a> {
    pub(super) seed: u64,
    pub(super) problem: &'a Problem,
    /// Number among the problem's ranks.
    pub(super) rank: usize,
    pub(super) compared: Compared,
    pub(super) format: TokenFormat,
    pub(super) mode: CombineMode,
    /// Rows that its tensors have, of which tokens are the first.
    pub(super) rows: usize,
}

impl Subject<'_> {
    /// Positions of the rows of its experts, without those of a shared expert, in the order of the oracle.
    fn routed_rows(&self) -> Vec<usize> {
        let placement = &Placement::of(self.problem, self.format, self.compared)[self.rank];
        let routed = placement.rows.iter().filter(|row| row.is_routed());
        routed.map(PlacedRow::position).collect()
    }
}

/// Arguments of a rank's combine in a round.
pub(super) struct Given {
    pub(super) finish: Finish,
    /// Weights in the order of the oracle's rows.
    pub(super) row_weights: Option<Vec<f32>>,
}

impl Options {
    /// None, and BF16.
    pub const NONE: Self = Self {
        row_scales: false,
        biases: [false; 2],
        residual: false,
        row_weights: false,
        element: OutputElement::Bf16,
    };

    /// Each option alone, with a name.
    #[rustfmt::skip]
    pub const ALONE: [(&str, Self); 7] = [
        ("row scales", Self { row_scales: true, ..Self::NONE }),
        ("bias 1", Self { biases: [true, false], ..Self::NONE }),
        ("bias 2", Self { biases: [false, true], ..Self::NONE }),
        ("residual", Self { residual: true, ..Self::NONE }),
        ("row weights", Self { row_weights: true, ..Self::NONE }),
        ("f16", Self { element: OutputElement::F16, ..Self::NONE }),
        ("f32", Self { element: OutputElement::F32, ..Self::NONE }),
    ];

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

    /// Draws what a rank's combine is given, and what the oracle makes of the sums then.
    pub(super) fn draw(&self, subject: &Subject<'_>) -> Given {
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

    /// Adds this set's inputs to a rank's combine: the steps of the epilogue and the row weights that
    /// [`draw`](Self::draw) draws.
    pub(super) fn give(&self, subject: &Subject<'_>, ep: &Communicator, input: &mut CombineInput) {
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
    }
}
