//! The inputs of a run, and the capacity that they need.

use ferry::{Capacity, TokenFormat};
use ferry_reference::Problem;

use super::options::BenchArgs;
use crate::{formats, rig};

/// Problems that the calls rotate through, so that each finds new data.
pub const SETS: usize = 4;

/// Problems with the most tokens. Fewer tokens are the first ones of these.
pub struct Inputs {
    /// Problems of the sets.
    pub problems: Vec<Problem>,
}

impl Inputs {
    /// Generates those of so many ranks.
    pub fn new(ranks: usize, args: &BenchArgs) -> Self {
        let most = args.tokens.last().copied().unwrap_or(0);
        let problem = |set| {
            rig::problem(
                vec![most; ranks],
                [args.experts, args.top_k, args.hidden],
                args.routing.routing(),
                args.seed.wrapping_mul(1000).wrapping_add(set as u64),
            )
        };
        Self {
            problems: (0..SETS).map(problem).collect(),
        }
    }

    /// Capacity of outputs, padding included, for any problem's first `tokens` tokens.
    pub fn capacity(&self, tokens: usize, format: TokenFormat) -> Capacity {
        let of = |problem: &Problem| {
            let mut rows = vec![0_usize; problem.experts];
            for input in &problem.inputs {
                for &id in input.topk_ids.iter().take(tokens * problem.top_k) {
                    if let Ok(expert) = usize::try_from(id) {
                        rows[expert] += 1;
                    }
                }
            }
            let alignment = format.sizes().row_alignment as usize;
            let ranks = rows.chunks(problem.local_experts()).map(|rank| Capacity {
                rows: rank
                    .iter()
                    .map(|rows| rows.next_multiple_of(alignment))
                    .sum(),
                scale_blocks: rank.iter().map(|rows| rows.div_ceil(128)).sum(),
            });
            ranks.fold(Capacity::default(), formats::larger)
        };
        let most = self.problems.iter().map(of);
        let most = most.fold(
            Capacity {
                rows: 1,
                scale_blocks: 1,
            },
            formats::larger,
        );
        // The transposed scales want rows of 16 bytes.
        Capacity {
            rows: most.rows.next_multiple_of(16),
            ..most
        }
    }
}
