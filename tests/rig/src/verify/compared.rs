//! Extent of a comparison, and the settings of the compared round.

use ferry::Config;
use ferry_reference::{Problem, SharedRows, part_of, round_to_bf16};

use super::groups::Groups;
use super::values::SHARED_FACTOR;
use crate::formats::INPUT_SCALE;
use crate::formats::given::Given;

/// Extent of a comparison, and the settings of the compared round.
#[derive(Clone, Copy, Debug)]
pub struct Compared {
    /// Maximum number of tokens of a rank; a round has the first ones of the problem.
    pub tokens: usize,
    /// Step between the tokens whose values are compared; the places of all tokens are.
    pub step: usize,
    /// Global scale of NVFP4.
    pub input_scale: f32,
    /// Form of the tokens that dispatch is given.
    pub given: Given,
    /// Factor of the shared expert, if there is one.
    pub shared: Option<f32>,
    /// Part of the tokens that goes to the shared expert on each rank if nothing travels (index, number of
    /// parts); otherwise all do. In reduced mode, the experts' rank then does not round the sums.
    pub part: Option<(usize, usize)>,
    /// Padding and tables of rows by expert.
    pub groups: Groups,
    /// Whether dispatch is given no weights although the problem has some, as exact mode sums with these.
    pub is_unweighted: bool,
}

impl Compared {
    /// A whole problem, under [`INPUT_SCALE`].
    pub const ALL: Self = Self {
        tokens: usize::MAX,
        step: 1,
        input_scale: INPUT_SCALE,
        given: Given::Bf16,
        shared: None,
        part: None,
        groups: Groups::NONE,
        is_unweighted: false,
    };

    /// A whole problem, in rounds of a plan with this configuration.
    pub fn of(config: &Config) -> Self {
        Self {
            shared: config.shared_expert.then_some(SHARED_FACTOR),
            groups: Groups::of(config),
            ..Self::ALL
        }
    }

    /// Part of a rank's own tokens that goes to a shared expert: its index, and the number of parts.
    pub fn shared_part(&self) -> (usize, usize) {
        self.part.unwrap_or((0, 1))
    }

    /// Rows of the shared expert, if there is one, for the compared tokens of a rank, to be added to sums
    /// before they are rounded.
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
