//! Inputs of rounds.

use ferry::CombineMode;
use ferry_reference::Problem;
use ferry_reference::workload::{Routing, WorkloadSpec, generate};

/// Way back of a token's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Return {
    /// Summed on the experts' ranks, then at the source.
    Reduced,
    /// Summed at the source.
    Exact,
    /// Not summed.
    Apart,
}

impl Return {
    /// Every way.
    pub const ALL: [Self; 3] = [Self::Reduced, Self::Exact, Self::Apart];

    /// Mode of the plan.
    pub const fn mode(self) -> CombineMode {
        match self {
            Self::Reduced => CombineMode::Reduced,
            Self::Exact | Self::Apart => CombineMode::Exact,
        }
    }
}

/// Generates so many tokens of each rank, of `[experts, top_k, hidden]`.
pub fn problem(
    tokens: Vec<usize>,
    [experts, top_k, hidden]: [usize; 3],
    routing: Routing,
    seed: u64,
) -> Problem {
    generate(WorkloadSpec {
        ranks: tokens.len(),
        experts,
        top_k,
        hidden,
        tokens,
        routing,
        seed,
    })
}

/// Factors that experts multiply by in a round.
pub fn factors(experts: usize, round: usize) -> Vec<f32> {
    let factor = |expert| 0.75 + (expert % 13) as f32 / 8.0 + round as f32;
    (0..experts).map(factor).collect()
}
