//! Padded blocks of experts: every table and row, sums with weights that are given to combine, and experts
//! that get more rows than their blocks hold, in the simulator.

use ferry::layout::Region;
use ferry_rig::{Case, Run, drawn, draws_all, padded_case};

fn all(seeds: std::ops::Range<u64>, case: impl Fn(u64) -> Case) -> usize {
    let mut told = 0;
    for seed in drawn(seeds) {
        let run = Run::of(&case(seed));
        let of_blocks = run.input_faults.iter();
        told += of_blocks
            .filter(|fault| fault.region == Region::ExpertBlock)
            .count();
        let above = run.expected.iter().flat_map(|round| &round.above_blocks);
        let lacks = above.flatten().count();
        assert!(lacks == 0 || !run.input_faults.is_empty(), "seed {seed}");
        run.expect_success();
    }
    told
}

#[test]
fn any_case_1() {
    let overflows = all(70_000..70_200, padded_case);
    assert!(overflows > 0 || !draws_all(), "no block overflows");
}

#[test]
fn any_case_2() {
    let overflows = all(70_200..70_400, padded_case);
    assert!(overflows > 0 || !draws_all(), "no block overflows");
}

/// Every slot of every token names one expert, whose block is not the last one of its rank.
#[test]
fn rows_beyond_a_block_are_written_nowhere() {
    for seed in drawn(70_500..70_560) {
        let drawn = padded_case(seed);
        let case = Case {
            experts: 3 * drawn.ranks,
            top_k: 3,
            tokens: vec![vec![4; drawn.ranks]; 2],
            counted: None,
            given_up: 0,
            ..drawn
        };
        let mut problems = case.problems();
        let expert = 3 * (seed as usize % case.ranks) + seed as usize % 2;
        for input in problems.iter_mut().flat_map(|of| &mut of.inputs) {
            input.topk_ids.fill(expert as i32);
        }
        let run = Run::with(&case, &problems, |_, _| {});
        assert!(!run.input_faults.is_empty(), "seed {seed}");
        run.expect_success();
    }
}
