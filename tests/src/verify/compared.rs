//! How much of a round is compared, and what it had.

use super::SHARED_FACTOR;
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
    /// Which part of its own tokens goes to the shared expert on each rank, of how many.
    pub part: (usize, usize),
}

impl Compared {
    /// A whole problem, under [`INPUT_SCALE`].
    pub const ALL: Self = Self {
        tokens: usize::MAX,
        step: 1,
        input_scale: INPUT_SCALE,
        shared: None,
        part: (0, 1),
    };

    /// A whole problem with a shared expert, or without.
    pub fn with_shared(shared: bool) -> Self {
        Self {
            shared: shared.then_some(SHARED_FACTOR),
            ..Self::ALL
        }
    }
}
