//! How much of a round is compared, and what it had.

use ferry_reference::{Problem, SharedRows, part_of, round_to_bf16};

use super::values::SHARED_FACTOR;
use crate::formats::INPUT_SCALE;

/// How much of a round is compared.
#[derive(Clone, Copy, Debug)]
pub struct Compared {
    /// The round has the first tokens of a problem, at most so many of each rank.
    pub tokens: usize,
    /// Of these, the values of every so manieth token are compared, and where all of them stand.
    pub step: usize,
    /// The global scale that NVFP4 is given.
    pub input_scale: f32,
    /// What the shared expert multiplies by, if there is one.
    pub shared: Option<f32>,
    /// Where nothing travels, which part of its own tokens goes to the shared expert on each rank,
    /// of how many; elsewhere all do. In reduced mode the sums are not rounded on the experts' rank
    /// then.
    pub part: Option<(usize, usize)>,
}

impl Compared {
    /// A whole problem, under [`INPUT_SCALE`].
    pub const ALL: Self = Self {
        tokens: usize::MAX,
        step: 1,
        input_scale: INPUT_SCALE,
        shared: None,
        part: None,
    };

    /// A whole problem with a shared expert, or without.
    pub fn with_shared(shared: bool) -> Self {
        Self {
            shared: shared.then_some(SHARED_FACTOR),
            ..Self::ALL
        }
    }

    /// The part of a rank's own tokens that goes to a shared expert, and of how many parts.
    pub fn shared_part(&self) -> (usize, usize) {
        self.part.unwrap_or((0, 1))
    }

    /// What the shared expert answers to the tokens of a rank that are compared, if there is one, for sums
    /// that are not rounded before it is added.
    pub fn shared_rows(&self, problem: &Problem, rank: usize) -> Option<SharedRows> {
        let (factor, input) = (self.shared?, &problem.inputs[rank]);
        let (index, of) = self.shared_part();
        let part = part_of(input.tokens.min(self.tokens), index, of);
        let start = part.start.div_ceil(self.step);
        let tokens = part.filter(|token| token.is_multiple_of(self.step));
        let x = tokens.flat_map(|token| &input.x[token * problem.hidden..][..problem.hidden]);
        Some(SharedRows {
            start,
            rows: x.map(|x| round_to_bf16(x.to_f32() * factor)).collect(),
            after_rounding: false,
        })
    }
}
