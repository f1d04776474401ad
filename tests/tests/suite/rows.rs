//! Rows that stay as they came, on simulated ranks: each layout in each format gives what the oracle gives,
//! bit for bit, whatever the order of events, and says what was wrong with inputs and outputs.
//!
//! 300 cases of each layout and format take minutes: `cargo run --release -p ferry-tests -- rows`.

use std::process::Command;

use ferry::*;
use ferry_reference::workload::Routing;
use ferry_reference::{Finish, bf16, combine_rows, receive_rows};
use ferry_rig::verify::{Contents, RowLayout, read_view};
use ferry_rig::*;
use ferry_tests::rows::{self, RowsArgs};

/// First 48 bits of the commit's number, so that each commit draws other cases; 1 without git.
fn seed_of_commit() -> u64 {
    let git = Command::new("git")
        .args(["rev-parse", "HEAD"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output();
    let text = git.map_or(String::new(), |git| {
        String::from_utf8_lossy(&git.stdout).into()
    });
    let first = text.get(..12).unwrap_or_default();
    u64::from_str_radix(first, 16).unwrap_or(1)
}

#[test]
fn every_layout_in_every_format() {
    let args = RowsArgs {
        each: if draws_all() { 40 } else { 5 },
        seed: seed_of_commit(),
        // A few cases of a commit's have not all pairs; they are printed.
        least: 0,
        // The machine may have other things to do.
        seconds: Some(50),
        only: None,
    };
    rows::run(&args).unwrap();
}

/// Rows of this layout, of a size that only few cases have; all else is drawn.
fn sized(seed: u64, ranks: usize, tokens: Vec<usize>) -> Case {
    let mut dice = Dice::new(!seed);
    let case = any_rows_case(seed);
    let hidden = match case.format {
        TokenFormat::Bf16 => 64,
        _ => 128,
    };
    Case {
        ranks,
        p2p_world_size: dice.pick(&[1, ranks, ranks]),
        experts: ranks * (1 + dice.below(3)),
        top_k: dice.pick(&[1, 2, 4]).min(ranks),
        hidden,
        tokens: vec![tokens; 2],
        ..case
    }
}

/// A warp looks at 32 words at a time: of ranks, and of 32 tokens each.
#[test]
fn more_ranks_than_lanes() {
    run_all(40_000..40_008, |seed| {
        let mut dice = Dice::new(seed);
        let ranks = 33 + dice.below(8);
        let tokens = (0..ranks).map(|_| dice.below(4)).collect();
        Case {
            warps: 2 + dice.below(3) as u32,
            ..sized(seed, ranks, tokens)
        }
    });
}

#[test]
fn more_experts_than_lanes() {
    run_all(40_100..40_140, |seed| {
        let mut dice = Dice::new(seed);
        let ranks = dice.pick(&[2, 4]);
        let tokens = (0..ranks).map(|_| dice.below(20)).collect();
        Case {
            experts: ranks * (33 + dice.below(200)),
            top_k: dice.pick(&[1, 8, 32]),
            ..sized(seed, ranks, tokens)
        }
    });
}

/// Several words of presence of each source, and tokens that end within one, or with it.
#[test]
fn tokens_of_several_words() {
    run_all(40_200..40_230, |seed| {
        let mut dice = Dice::new(seed);
        let ranks = dice.pick(&[2, 3]);
        let tokens = (0..ranks).map(|_| dice.pick(&[31, 32, 33, 64, 200, 0, 1]));
        sized(seed, ranks, tokens.collect())
    });
}

/// Warps as many as on a large GPU, and more whole rows than warps: some only send, others only receive.
#[test]
fn launches_as_large_as_on_a_gpu() {
    run_all(40_300..40_306, |seed| {
        let mut dice = Dice::new(seed);
        let tokens = vec![640 + dice.below(64), dice.pick(&[600, 40])];
        Case {
            p2p_world_size: 2,
            experts: 16,
            top_k: 4,
            warps: 1060,
            stall_one_in: 64,
            ..sized(seed, 2, tokens)
        }
    });
}

/// Many tokens of 16 ranks for few warps: combine's rows are flagged, and sent back in batches.
#[test]
fn rows_sent_back_in_batches() {
    run_all(40_400..40_406, |seed| {
        let mut dice = Dice::new(seed);
        let mut tokens = vec![0; 16];
        tokens[dice.below(16)] = 133 + dice.below(20);
        tokens[dice.below(16)] = 140;
        Case {
            p2p_world_size: 16,
            warps: 12,
            ..sized(seed, 16, tokens)
        }
    });
}

/// Rows of sixteen parts, of which each has more words of scales than a warp has lanes.
#[test]
fn rows_of_large_parts() {
    run_all(40_450..40_462, |seed| Case {
        p2p_world_size: 2,
        top_k: 2,
        experts: 4,
        hidden: 128 * 552,
        tokens: vec![vec![1, 1], vec![0, 2], vec![1, 0]],
        warps: 40,
        ..sized(seed, 2, Vec::new())
    });
}

/// The experts leave their answers where the rows came, in BF16; here they leave the rows.
#[test]
fn answers_may_be_in_the_memory_of_the_rows() {
    for seed in drawn(40_900..40_960) {
        let receive = ROW_LAYOUTS[1 + seed as usize % 2];
        let case = Case {
            finish: None,
            initial: [false; 2],
            specials: false,
            ..rows_case(seed, receive, TokenFormat::Bf16)
        };
        let mut run = Run::with(&case, &case.problems(), |tensors, _| {
            for tensors in tensors.iter_mut().flatten() {
                tensors.expert_rows.expert_rows = tensors.output.tokens.unwrap();
            }
        });
        for round in 0..run.tensors.len() {
            let problem = case.problem(round);
            let (mut received, mut answers) = (Vec::new(), Vec::new());
            for rank in 0..case.ranks {
                let Contents::Rows(rows) = run.contents(round, rank) else {
                    panic!("rows by expert")
                };
                received.push(receive_rows(&problem, rank, rows.layout.numbers()));
                let elements = rows.tokens.as_chunks().0.iter();
                answers.push(elements.map(|&x| bf16::from_ne_bytes(x)).collect());
            }
            let none = vec![[None, None]; case.ranks];
            let finish = vec![Finish::NONE; case.ranks];
            run.expected[round].wanted =
                combine_rows(&problem, &received, &answers, &none, &finish);
        }
        run.expect_success();
    }
}

#[test]
fn nobody_has_tokens() {
    run_all(40_500..40_550, |seed| {
        let ranks = 2 + seed as usize % 4;
        sized(seed, ranks, vec![0; ranks])
    });
}

/// Every row goes to one rank: all others receive none.
#[test]
fn all_tokens_go_to_one_expert() {
    run_all(40_600..40_660, |seed| {
        let case = any_rows_case(seed);
        let expert = Dice::new(!seed).below(case.experts);
        Case {
            routing: Routing::AllToOne { expert },
            ..case
        }
    });
}

/// Few warps, few tokens and many rounds enqueued at once: whoever can run ahead of a warp that stalls, does.
#[test]
fn stragglers_are_not_overtaken() {
    run_all(40_700..40_900, |seed| {
        let mut dice = Dice::new(!seed);
        let ranks = dice.pick(&[2, 3]);
        let tokens = (0..8).map(|_| (0..ranks).map(|_| dice.pick(&[0, 1, 2, 40])).collect());
        let tokens = tokens.collect();
        Case {
            tokens,
            routing: Routing::Holes { probability: 0.5 },
            warps: 2 + dice.below(3) as u32,
            stall_one_in: dice.pick(&[4, 8, 16]),
            synchronize: false,
            reads_views: dice.below(4) == 0,
            ..sized(seed, ranks, Vec::new())
        }
    });
}

/// A row that is in a view until combine, and gone after it.
#[test]
fn a_view_that_is_read_too_late_is_all_ones() {
    let mut rows = 0;
    for seed in drawn(41_000..41_060) {
        let format = ROW_FORMATS[seed as usize % ROW_FORMATS.len()];
        let case = Case {
            debug_checks: true,
            transposed_scales: false,
            synchronize: true,
            reads_views: true,
            ..rows_case(seed, ReceiveLayout::View, format)
        };
        let run = Run::of(&case);
        let last = run.tensors.len() - 1;
        for (r, rank) in run.ranks.iter().enumerate() {
            let Contents::Rows(seen) = run.contents(last, r) else {
                panic!("rows by expert")
            };
            let view = run.view(last, r).unwrap();
            let layout = RowLayout::of(rank.plan().config(), seen.layout.rows);
            let late = read_view(&**rank.device(), &view, &layout).unwrap();
            for (row, _, _) in seen.present() {
                let bytes = row * layout.row_bytes()..(row + 1) * layout.row_bytes();
                assert!(seen.tokens[bytes.clone()].iter().any(|&byte| byte != 0xff));
                assert!(
                    late.tokens[bytes].iter().all(|&byte| byte == 0xff),
                    "{case:?}"
                );
                rows += 1;
            }
        }
        run.expect_success();
    }
    assert!(rows > 300 || !draws_all(), "{rows}");
}
