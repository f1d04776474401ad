//! What must cross the wire, counted from the routing.

use ferry::{CombineMode, Shape};
use ferry_reference::Problem;

/// Bytes of the busiest rank: the larger of what one sends and what one receives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Payload of dispatch.
    pub dispatch_payload: u64,
    /// Dispatch with headers and scales.
    pub dispatch_wire: u64,
    /// Combine, which is payload alone.
    pub combine_wire: u64,
}

impl Traffic {
    /// Of the first `tokens` tokens of every rank.
    pub fn of(problem: &Problem, shape: &Shape, tokens: usize) -> Self {
        let (once, each) = pairs(problem, tokens);
        let rows = busiest(&once);
        let answers = match shape.mode() {
            CombineMode::Reduced => rows,
            CombineMode::Exact => busiest(&each),
        };
        Self {
            dispatch_payload: rows * u64::from(shape.payload_bytes()),
            dispatch_wire: rows * u64::from(shape.dispatch_row_bytes()),
            combine_wire: answers * u64::from(shape.combine_row_bytes()),
        }
    }
}

/// Counts by source and target rank, only where they differ.
type Counts = Vec<Vec<u64>>;

/// Tokens that go from rank to rank, and entries that do.
fn pairs(problem: &Problem, tokens: usize) -> (Counts, Counts) {
    let zeros = vec![vec![0; problem.ranks]; problem.ranks];
    let (mut once, mut each) = (zeros.clone(), zeros);
    for (source, input) in problem.inputs.iter().enumerate() {
        for ids in input.topk_ids.chunks(problem.top_k).take(tokens) {
            let mut here = vec![0; problem.ranks];
            for &id in ids {
                if let Ok(expert) = usize::try_from(id) {
                    here[expert / problem.local_experts()] += 1;
                }
            }
            for (target, entries) in here.into_iter().enumerate() {
                if target != source && entries > 0 {
                    once[source][target] += 1;
                    each[source][target] += entries;
                }
            }
        }
    }
    (once, each)
}

/// The most that any rank sends or receives.
fn busiest(counts: &Counts) -> u64 {
    let sent = counts.iter().map(|row| row.iter().sum());
    let received = (0..counts.len()).map(|target| counts.iter().map(|row| row[target]).sum());
    sent.chain(received).max().unwrap_or(0)
}

/// Probability that a token with uniform routing touches a given rank: one minus that of drawing
/// `top_k` of `experts` without any of that rank's.
pub fn touch_probability(ranks: usize, experts: usize, top_k: usize) -> f64 {
    let local = experts / ranks;
    let missed: f64 = (0..top_k)
        .map(|drawn| (experts - local).saturating_sub(drawn) as f64 / (experts - drawn) as f64)
        .product();
    1.0 - missed
}

#[cfg(test)]
mod tests {
    use ferry_reference::workload::{Routing, WorkloadSpec, generate};

    use super::*;

    fn problem(routing: Routing, tokens: usize) -> Problem {
        generate(WorkloadSpec {
            ranks: 4,
            experts: 256,
            top_k: 8,
            hidden: 1,
            tokens: vec![tokens; 4],
            routing,
            seed: 3,
        })
    }

    #[test]
    fn uniform_routing_touches_the_known_number_of_ranks() {
        assert!((4.0 * touch_probability(4, 256, 8) - 3.61).abs() < 0.01);
        assert!((7.0 * touch_probability(8, 256, 8) - 4.63).abs() < 0.02);
        assert_eq!(touch_probability(1, 8, 2), 1.0);
    }

    #[test]
    fn counting_agrees_with_the_formula() {
        let (once, each) = pairs(&problem(Routing::Uniform, 4000), 2000);
        let expected = 3.0 * touch_probability(4, 256, 8) * 2000.0;
        for row in &once {
            let sent = row.iter().sum::<u64>() as f64;
            assert!(
                (sent - expected).abs() < 0.03 * expected,
                "{sent} {expected}"
            );
        }
        let entries = each.iter().flatten().sum::<u64>() as f64;
        assert!((entries - 4.0 * 2000.0 * 6.0).abs() < 1000.0, "{entries}");
    }

    #[test]
    fn a_popular_rank_is_the_busiest() {
        let (once, _) = pairs(&problem(Routing::AllToOne { expert: 70 }, 10), 10);
        assert_eq!(busiest(&once), 30);
    }
}
