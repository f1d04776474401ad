//! Exact mode: given the same rows of the experts, results are the same bits on 1, 2, 4 and 8
//! simulated ranks, and under any permutation of the experts' ids.

use std::ops::Range;

use ferry::simulator::Options;
use ferry::{Group, TokenFormat};
use ferry_reference::workload::{Routing, WorkloadSpec};
use ferry_rig::{Dice, Session, drawn};
use ferry_tests::gpu::exact::Spreadable;

/// One problem, on each number of ranks under another permutation.
fn anywhere(seed: u64) {
    let mut dice = Dice::new(seed);
    let experts = 8 * (1 + dice.below(3));
    let format = match dice.below(2) {
        0 => TokenFormat::Bf16,
        _ => TokenFormat::ALL[dice.below(TokenFormat::ALL.len())],
    };
    let spec = WorkloadSpec {
        ranks: 1,
        experts,
        top_k: 1 + dice.below(8),
        hidden: match format {
            TokenFormat::Bf16 => 8 * [1, 3, 40][dice.below(3)],
            _ => 128 * [1, 5][dice.below(2)],
        },
        tokens: vec![1 + dice.below(24)],
        routing: match dice.below(3) {
            0 => Routing::Uniform,
            1 => Routing::Zipf { exponent: 1.0 },
            _ => Routing::Holes { probability: 0.3 },
        },
        seed,
    };
    let problem = Spreadable::new(spec.clone(), format, dice.below(4) > 0);
    for ranks in [1, 2, 4, 8] {
        let near = [1, ranks][dice.below(2)];
        let settings = problem.settings(near, dice.below(2) == 0);
        let options = Options {
            warps: 1 + dice.below(8) as u32,
            ..Options::new(ranks as u32, seed)
        };
        let group = Group::simulated_with(options).unwrap();
        let mut session = Session::new(&group, &settings).unwrap();
        for place in 0..2 {
            problem
                .run(&mut session, ranks, seed * 16 + place)
                .unwrap_or_else(|error| panic!("{ranks} ranks, {format:?}, {spec:?}: {error:#}"));
        }
        session.close().unwrap();
    }
}

fn all(seeds: Range<u64>) {
    drawn(seeds).for_each(anywhere);
}

#[test]
fn bits_do_not_depend_on_where_experts_live_1() {
    all(0..150);
}

#[test]
fn bits_do_not_depend_on_where_experts_live_2() {
    all(150..300);
}
