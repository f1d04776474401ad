//! Dispatch and combine on simulated ranks give what the oracle gives, bit for bit, whatever the
//! order of events. A failure prints the whole case; its seed reproduces it.

use ferry::{ScaleLayout, TokenFormat};
use ferry_reference::bf16;
use ferry_reference::workload::Routing;
use ferry_rig::formats::given::Given;
use ferry_rig::*;

#[test]
fn any_case_1() {
    run_all(0..350, any_case);
}

#[test]
fn any_case_2() {
    run_all(350..700, any_case);
}

#[test]
fn any_case_3() {
    run_all(700..1_050, any_case);
}

#[test]
fn any_case_4() {
    run_all(1_050..1_400, any_case);
}

/// Four ranks with these tokens, in two rounds; all else comes from the seed.
fn four_ranks(seed: u64, tokens: [usize; 4]) -> Case {
    let mut dice = Dice::new(seed);
    let mut other = tokens;
    other.rotate_right(dice.below(4));
    Case {
        ranks: 4,
        p2p_world_size: dice.pick(&[1, 2, 4]),
        experts: dice.pick(&[16, 32, 64]),
        top_k: dice.pick(&[1, 8, 16]),
        hidden: dice.pick(&[16, 32, 64]),
        format: TokenFormat::Bf16,
        tokens: vec![tokens.to_vec(), other.to_vec()],
        ..any_case(seed)
    }
}

#[test]
fn one_rank_has_all_tokens() {
    run_all(2_000..2_100, |seed| four_ranks(seed, [128, 0, 0, 0]));
}

#[test]
fn every_rank_has_half_as_many_tokens() {
    run_all(2_100..2_200, |seed| four_ranks(seed, [64, 32, 16, 8]));
}

#[test]
fn nobody_has_tokens() {
    run_all(2_200..2_400, |seed| four_ranks(seed, [0, 0, 0, 0]));
}

/// Rows as many as can come to a rank, all of them to be staged for other nodes: the shared expert's rows,
/// which stand before them, leave no more room there.
#[test]
fn rows_behind_the_shared_experts_are_staged_in_exact_mode() {
    run_all(2_700..2_740, |seed| Case {
        ranks: 3,
        p2p_world_size: 1,
        experts: 3,
        top_k: 1,
        tokens: vec![vec![5; 3]; 2],
        routing: Routing::AllToOne { expert: 0 },
        how: Return::Exact,
        shared_expert: true,
        counted: None,
        ..any_case(seed)
    });
}

/// Sums of several rows, rounded before the shared expert's is added, of ranks that are nodes of their own.
#[test]
fn a_shared_expert_on_several_nodes_in_exact_mode() {
    run_all(2_740..2_860, |seed| Case {
        p2p_world_size: 1,
        how: Return::Exact,
        shared_expert: true,
        ..any_case(seed)
    });
}

#[test]
fn all_tokens_go_to_one_expert() {
    run_all(2_400..2_600, |seed| {
        let case = any_case(seed);
        let expert = Dice::new(!seed).below(case.experts);
        Case {
            routing: Routing::AllToOne { expert },
            ..case
        }
    });
}

#[test]
fn many_experts() {
    run_all(2_600..2_616, |seed| {
        let mut dice = Dice::new(seed);
        let ranks = dice.pick(&[2, 4, 8]);
        let tokens = (0..2)
            .map(|_| (0..ranks).map(|_| dice.below(9)).collect())
            .collect();
        Case {
            ranks,
            p2p_world_size: dice.pick(&[1, 2, ranks]),
            experts: 896,
            top_k: dice.pick(&[1, 8, 16]),
            tokens,
            ..any_case(seed)
        }
    });
}

/// Few warps, few tokens and many rounds enqueued at once: whoever can run ahead of a warp that
/// stalls, does.
fn stragglers(seed: u64) -> Case {
    let case = any_case(seed);
    let mut dice = Dice::new(!seed);
    let ranks = dice.pick(&[2, 3]);
    let tokens = (0..8)
        .map(|_| (0..ranks).map(|_| dice.pick(&[0, 1, 2, 40])).collect())
        .collect();
    Case {
        ranks,
        p2p_world_size: dice.pick(&[1, ranks]),
        experts: ranks,
        top_k: dice.pick(&[1, 2]),
        tokens,
        routing: Routing::Holes { probability: 0.5 },
        warps: 2 + dice.below(3) as u32,
        stall_one_in: dice.pick(&[4, 8, 16]),
        synchronize: false,
        ..case
    }
}

#[test]
fn stragglers_are_not_overtaken_1() {
    run_all(3_000..3_300, stragglers);
}

#[test]
fn stragglers_are_not_overtaken_2() {
    run_all(3_300..3_600, stragglers);
}

/// Warps as many as on a large GPU, and more whole rows than warps: some only send, others only put rows in
/// their places, and units go to whoever is done first.
fn as_large_as_on_a_gpu(seed: u64) -> Case {
    let mut dice = Dice::new(seed);
    let tokens = (0..2)
        .map(|_| vec![640 + dice.below(64), dice.pick(&[600, 40])])
        .collect();
    Case {
        experts: 16,
        top_k: 4,
        hidden: 128,
        format: dice.pick(&[TokenFormat::Bf16, TokenFormat::BlockwiseFp8]),
        tokens,
        warps: 1060,
        ..Case::small(seed)
    }
}

#[test]
fn launches_as_large_as_on_a_gpu() {
    run_all(5_000..5_003, as_large_as_on_a_gpu);
}

/// The same with at most a row for each of those that only send: they are numbered block by block,
/// and flag their rows each for itself.
fn a_row_for_each_sender(seed: u64) -> Case {
    let tokens = 513 + Dice::new(seed).below(15);
    Case {
        format: TokenFormat::BlockwiseFp8,
        tokens: vec![vec![tokens, tokens]],
        ..as_large_as_on_a_gpu(seed)
    }
}

#[test]
fn senders_with_a_row_each_flag_it_for_themselves() {
    run_all(5_010..5_012, a_row_for_each_sender);
}

/// Rows that no source has few enough of to send them bare, and a warp for each: combine flags
/// those of a block together.
fn a_warp_for_each_row(seed: u64) -> Case {
    let tokens = 1025 + Dice::new(seed).below(31);
    Case {
        tokens: vec![vec![tokens, 40]],
        warps: 2112,
        ..Case::small(seed)
    }
}

#[test]
fn rows_sent_back_by_a_warp_each_are_flagged_together() {
    run_all(5_020..5_022, a_warp_for_each_row);
}

/// Rows that no source has few enough of to send them bare, and more of them than warps: combine
/// deals the last ones in batches of a few.
fn in_batches(seed: u64) -> Case {
    let mut dice = Dice::new(seed);
    let mut tokens = vec![0; 16];
    tokens[dice.below(16)] = 133 + dice.below(20);
    tokens[dice.below(16)] = 140;
    Case {
        ranks: 16,
        p2p_world_size: 16,
        experts: 32,
        top_k: 4,
        hidden: 1024,
        format: TokenFormat::Bf16,
        tokens: vec![tokens; 2],
        warps: 12,
        ..Case::small(seed)
    }
}

#[test]
fn rows_sent_back_in_batches() {
    run_all(5_100..5_106, in_batches);
}

/// A small batch, which every block numbers for itself: less than a group of 32 assignments, whole groups and
/// others, more than two warps load at once, and the most that are few.
fn small_batch(seed: u64) -> Case {
    let mut dice = Dice::new(seed);
    let sizes = [1, 31, 32, 33, 255, 256, 257, 300, 2047, 2048];
    let assignments = sizes[seed as usize % sizes.len()];
    let experts = dice.pick(&[2, 8, 34, 512]);
    let top_k = match assignments % 4 {
        0 => dice.pick(&[1, 2, 4]).min(experts),
        _ => 1,
    };
    let tokens = assignments / top_k;
    Case {
        experts,
        top_k,
        tokens: vec![vec![tokens, dice.below(tokens + 1)]; 2],
        routing: match dice.below(3) {
            0 => Routing::Uniform,
            1 => Routing::AllToOne {
                expert: dice.below(experts),
            },
            _ => Routing::Holes { probability: 0.3 },
        },
        split: dice.below(4) as u64,
        // Blocks of one warp and of two.
        warps: dice.pick(&[1, 2, 3, 4, 6]),
        stall_one_in: dice.pick(&[0, 8]),
        ..Case::small(seed)
    }
}

#[test]
fn small_batches_of_every_size() {
    run_all(5_400..5_430, small_batch);
}

/// Tiled scales of few tokens: where an expert's begin differs from round to round.
fn tiled(seed: u64) -> Case {
    let mut dice = Dice::new(seed);
    let tokens = (0..8)
        .map(|_| (0..2).map(|_| dice.pick(&[0, 1, 2])).collect())
        .collect();
    Case {
        ranks: 2,
        p2p_world_size: 2,
        experts: 8,
        top_k: 2,
        hidden: 128,
        format: TokenFormat::Mxfp8(ScaleLayout::Tiled),
        tokens,
        warps: 3 + dice.below(6) as u32,
        stall_one_in: dice.pick(&[4, 8]),
        synchronize: false,
        ..Case::small(seed)
    }
}

#[test]
fn tiled_scales_wait_for_where_they_begin() {
    run_all(5_300..5_600, tiled);
}

/// Many tokens for few warps: where the halves are called apart, those that announced send
/// afterwards, and where combine's rows are not bare, as of 16 ranks, a warp sends several back
/// together.
fn for_few_warps(seed: u64) -> Case {
    let mut dice = Dice::new(seed);
    let (ranks, top_k) = match dice.below(2) {
        0 => (16, dice.pick(&[8, 16])),
        _ => (1 + dice.below(4), dice.pick(&[3, 8, 12, 24])),
    };
    let mut tokens = vec![dice.below(30); ranks];
    tokens[dice.below(ranks)] = 2048 / top_k + 1 + dice.below(60);
    Case {
        ranks,
        p2p_world_size: ranks,
        experts: 24 * ranks,
        top_k,
        hidden: 128,
        format: dice.pick(&[TokenFormat::Bf16, TokenFormat::BlockwiseFp8]),
        routing: match dice.below(2) {
            0 => Routing::Uniform,
            _ => Routing::Holes { probability: 0.4 },
        },
        how: dice.pick(&Return::ALL),
        split: dice.below(16) as u64,
        debug_checks: dice.below(2) == 0,
        tokens: vec![tokens; 2],
        warps: 4 + dice.below(5) as u32,
        ..Case::small(seed)
    }
}

#[test]
fn many_tokens_for_few_warps() {
    run_all(5_200..5_216, for_few_warps);
}

#[test]
fn bare_rows_are_what_was_sent() {
    run_all(4_000..4_300, inline_case);
}

/// Rows of sixteen parts of 4,608 bytes and more, with 36 words of scales if they have any.
fn large_parts(seed: u64) -> Case {
    Case {
        ranks: 2,
        p2p_world_size: 2,
        experts: 4,
        top_k: 2,
        hidden: 128 * 552,
        tokens: vec![vec![1, 1]; 3],
        ..inline_case(seed)
    }
}

/// A part of a row has more words of scales than a warp has lanes.
#[test]
fn bare_rows_with_many_scales() {
    run_all(4_300..4_304, |seed| Case {
        format: match seed % 2 {
            0 => TokenFormat::BlockwiseFp8,
            _ => TokenFormat::Mxfp8(ScaleLayout::Tiled),
        },
        ..large_parts(seed)
    });
}

/// Each warp has a large part at most: those that send them sit on one half of the blocks, if there
/// is room. Headers go first.
#[test]
fn large_bare_parts() {
    run_all(4_304..4_308, |seed| Case {
        format: match seed % 2 {
            0 => TokenFormat::BlockwiseFp8,
            _ => TokenFormat::Bf16,
        },
        // Room for the parts of one token, not of two.
        warps: 40,
        tokens: vec![vec![1, 1], vec![1, 2], vec![0, 1]],
        ..large_parts(seed)
    });
}

/// Whatever a word of a row may be in the end, on the wire it is not that of a row that has not come: two
/// NaNs `0xffff` of BF16, four e8m0 NaNs, a weight of only ones, an expert that there is not.
#[test]
fn no_word_of_a_row_is_taken_for_absent() {
    for seed in drawn(4_400..4_500) {
        let case = Case {
            given: Given::Bf16,
            ..inline_case(seed)
        };
        let mut problems = case.problems();
        let mut given = Vec::new();
        for problem in &mut problems {
            for input in &mut problem.inputs {
                for row in input.x.chunks_mut(case.hidden) {
                    // An infinity for each of the first four scales, and pairs of NaNs.
                    for group in row[..256].chunks_mut(32) {
                        group[0] = bf16::INFINITY;
                        group[6..8].fill(bf16::from_bits(0xffff));
                    }
                }
                input.topk_weights.iter_mut().step_by(3).for_each(|weight| {
                    *weight = f32::from_bits(u32::MAX);
                });
                given.push(input.x.clone());
                // What goes to the experts.
                for pair in input.x.chunks_mut(2) {
                    if pair.iter().all(|x| x.to_bits() == 0xffff) {
                        pair[0] = bf16::from_bits(0xfffe);
                    }
                }
            }
        }
        let run = Run::with(&case, &problems, |tensors, ranks| {
            for (input, (tensors, rank)) in given.iter().zip(
                tensors
                    .iter_mut()
                    .flat_map(|round| round.iter_mut().zip(ranks)),
            ) {
                let dims = tensors.input.x.dims;
                // Behind the tokens that are counted.
                let mut x = input.clone();
                x.resize(dims[0] * dims[1], bf16::NAN);
                tensors.input.x = rank.device().upload_tensor(dims, &x).unwrap();
            }
        });
        run.expect_success();
    }
}

/// Sums begin at +0, and so end there; rows that are kept apart stay as they are.
#[test]
fn rows_of_minus_zero_sum_to_zero() {
    for seed in drawn(4_600..4_640) {
        let case = any_case(seed);
        let mut problems = case.problems();
        for input in problems.iter_mut().flat_map(|problem| &mut problem.inputs) {
            input.x.fill(bf16::NEG_ZERO);
        }
        Run::with(&case, &problems, |_, _| {}).expect_success();
    }
}

/// A router that gives no weights: all are 1.
#[test]
fn without_weights_all_are_one() {
    for seed in drawn(4_500..4_600) {
        let case = match seed % 2 {
            0 => inline_case(seed),
            _ => any_case(seed),
        };
        let mut problems = case.problems();
        for input in problems.iter_mut().flat_map(|problem| &mut problem.inputs) {
            input.topk_weights.fill(1.0);
        }
        let run = Run::with(&case, &problems, |tensors, _| {
            for tensors in tensors.iter_mut().flatten() {
                tensors.input.topk_weights = None;
            }
        });
        run.expect_success();
    }
}
