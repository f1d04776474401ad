//! Rows that stay as they came, on simulated ranks: each layout in each format gives what the oracle gives,
//! bit for bit, whatever the order of events, and says what was wrong with inputs and outputs.
//!
//! 300 cases of each layout and format take minutes: `cargo run --release -p ferry-tests -- rows`.

use std::ops::Range;
use std::process::Command;

use ferry::layout::Region;
use ferry::*;
use ferry_reference::workload::Routing;
use ferry_reference::{Finish, bf16, combine_rows, narrow_ids, receive_rows};
use ferry_rig::verify::{Contents, RowLayout, read_view};
use ferry_rig::*;
use ferry_tests::rows::{self, RowsArgs};

/// Runs one case for each seed.
fn all(seeds: Range<u64>, case: impl Fn(u64) -> Case) {
    for seed in drawn(seeds) {
        Run::of(&case(seed)).expect_success();
    }
}

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
    all(40_000..40_008, |seed| {
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
    all(40_100..40_140, |seed| {
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
    all(40_200..40_230, |seed| {
        let mut dice = Dice::new(seed);
        let ranks = dice.pick(&[2, 3]);
        let tokens = (0..ranks).map(|_| dice.pick(&[31, 32, 33, 64, 200, 0, 1]));
        sized(seed, ranks, tokens.collect())
    });
}

/// Warps as many as on a large GPU, and more whole rows than warps: some only send, others only receive.
#[test]
fn launches_as_large_as_on_a_gpu() {
    all(40_300..40_306, |seed| {
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
    all(40_400..40_406, |seed| {
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
    all(40_450..40_462, |seed| Case {
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
    all(40_500..40_550, |seed| {
        let ranks = 2 + seed as usize % 4;
        sized(seed, ranks, vec![0; ranks])
    });
}

/// Every row goes to one rank: all others receive none.
#[test]
fn all_tokens_go_to_one_expert() {
    all(40_600..40_660, |seed| {
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
    all(40_700..40_900, |seed| {
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

/// Runs a case with `id` in one slot of i64 ids, where the oracle has -1. Also returns its round, its rank
/// and its index.
fn run_with_id(case: &Case, id: i64, dice: &mut Dice) -> Option<(Run, [usize; 3])> {
    let (round, rank) = (dice.below(case.tokens.len()), dice.below(case.ranks));
    let slots = case.tokens[round][rank] * case.top_k;
    if slots == 0 {
        return None;
    }
    let slot = dice.below(slots);
    let mut problems = case.problems();
    let ids = &mut problems[round].inputs[rank].topk_ids;
    let mut given: Vec<i64> = ids.iter().copied().map(i64::from).collect();
    given[slot] = id;
    let (narrow, invalid) = narrow_ids(&given, case.experts);
    assert_eq!(invalid, [(slot, id)]);
    *ids = narrow;
    given.resize(given.len() + case.counted.unwrap_or(0) * case.top_k, 0);
    let run = Run::with(case, &problems, |tensors, ranks| {
        let device = ranks[rank].device();
        let at = device.upload_tensor([given.len()], &given).unwrap().at;
        tensors[round][rank].input.topk_ids.at = at;
    });
    Some((run, [round, rank, slot]))
}

/// All bits of an id count: 2^32 + 3 is not expert 3.
#[test]
fn an_id_of_64_bits_is_named_and_left_out() {
    let mut found = 0;
    for seed in drawn(42_000..42_120) {
        let (mut dice, case) = (Dice::new(!seed), any_rows_case(seed));
        let by_expert = Case {
            options: true,
            ..any_case(seed)
        };
        let case = Case {
            wide_ids: u64::MAX,
            debug_checks: false,
            short: false,
            ..if dice.below(3) == 0 { by_expert } else { case }
        };
        let experts = case.experts as i64;
        let valid = dice.below(case.experts) as i64;
        let id = dice.pick(&[
            (1 << 32) + valid,
            valid - (1 << 32),
            (1 << 32) - 1,
            i64::MIN,
            i64::MAX,
            -2,
            experts,
        ]);
        let Some((run, [round, rank, slot])) = run_with_id(&case, id, &mut dice) else {
            continue;
        };
        let [fault] = run.input_faults[..] else {
            panic!("{:?}\n{case:?}", run.input_faults)
        };
        let place = [
            fault.rank.0 as usize,
            fault.index as usize,
            fault.peer.0 as usize,
        ];
        assert_eq!(
            place,
            [rank, slot / case.top_k, slot % case.top_k],
            "{fault}\n{case:?}"
        );
        let what = (fault.kind, fault.saw as i64, case.round_of(fault.epoch));
        assert_eq!(
            what,
            (FaultKind::InvalidExpert, id, round),
            "{fault}\n{case:?}"
        );
        let text = format!("expert id {id} is not in -1 to {}; ", experts - 1);
        assert!(fault.to_string().contains(&text), "{fault}");
        assert!(run.outcomes.iter().all(|end| *end == Outcome::Finished));
        run.compare();
        run.close();
        found += 1;
    }
    assert!(found > 60 || !draws_all(), "{found}");
}

/// Outputs of compact rows that hold fewer than come: whoever lacks rows is told how many came.
#[test]
fn rows_that_have_no_room_are_told() {
    let mut told = 0;
    for seed in drawn(43_000..43_150) {
        let format = ROW_FORMATS[seed as usize % ROW_FORMATS.len()];
        let case = Case {
            short: true,
            debug_checks: false,
            synchronize: true,
            ..rows_case(seed, ReceiveLayout::Compact, format)
        };
        let run = Run::of(&case);
        for (round, expected) in run.expected.iter().enumerate() {
            for rank in 0..case.ranks {
                let mut faults = run.input_faults.iter().filter(|fault| {
                    case.round_of(fault.epoch) == round && fault.rank.0 as usize == rank
                });
                let lacks = expected.lacks(rank);
                let fault = faults.next().map(|fault| {
                    assert_eq!(fault.kind, FaultKind::OutputTooSmall, "{fault}\n{case:?}");
                    told += 1;
                    (fault.region, fault.saw as usize, fault.wanted as usize)
                });
                assert_eq!(fault, lacks, "rank {rank}, round {round}: {case:?}");
                assert!(faults.next().is_none(), "told twice: {case:?}");
                let is_of_rows = lacks.is_none_or(|(region, ..)| region == Region::Output);
                assert!(is_of_rows, "{lacks:?}");
            }
        }
        run.expect_success();
    }
    assert!(told > 300 || !draws_all(), "{told}");
}

/// A rank that never launches is named by all others.
#[test]
fn a_rank_that_never_launches_is_named() {
    for seed in drawn(46_000..46_060) {
        let case = any_rows_case(seed);
        let absent = Dice::new(!seed).below(case.ranks);
        let case = Case {
            absent: Some(absent),
            ..case
        };
        let run = Run::of(&case);
        for (r, outcome) in run.outcomes.iter().enumerate() {
            let Outcome::Fault(fault) = outcome else {
                assert_eq!(r, absent, "{case:?}");
                continue;
            };
            let wanted = (FaultKind::PeerTimeout, Rank(absent as u32), 1);
            assert_eq!((fault.kind, fault.peer, fault.epoch), wanted, "{case:?}");
        }
        run.compare();
        run.close();
    }
}

#[test]
fn an_expert_listed_twice_counts_twice_and_is_named_in_debug_checks() {
    let mut found = 0;
    for seed in drawn(44_000..44_080) {
        let case = Case {
            routing: Routing::Duplicates,
            debug_checks: true,
            short: false,
            ..any_rows_case(seed)
        };
        let run = Run::of(&case);
        for fault in &run.input_faults {
            assert_eq!(fault.kind, FaultKind::DuplicateExpert, "{fault}\n{case:?}");
            found += 1;
        }
        run.expect_success();
    }
    assert!(found > 100 || !draws_all(), "{found}");
}

#[test]
fn a_number_of_tokens_above_the_rows_is_told_and_all_rows_are_taken() {
    for seed in drawn(45_000..45_060) {
        let case = Case {
            counted: Some(0),
            debug_checks: false,
            short: false,
            ..any_rows_case(seed)
        };
        let run = Run::with(&case, &case.problems(), |tensors, ranks| {
            for (rank, tensors) in ranks.iter().zip(&tensors[0]) {
                let count = tensors.input.tokens_on_device.unwrap().at;
                rank.device().upload(count, &[0xff; 4]).unwrap();
            }
        });
        let kinds = run.input_faults.iter().map(|fault| fault.kind);
        let wanted = vec![FaultKind::TooManyOnDevice; case.ranks];
        assert_eq!(kinds.collect::<Vec<_>>(), wanted, "{case:?}");
        run.compare();
        run.close();
    }
}
