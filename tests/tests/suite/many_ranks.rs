//! Rounds of 8, 16 and 64 simulated ranks, more than any machine of the GPU tests has, on one node
//! and on several. A failure prints the whole case; its seed reproduces it.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::ops::Range;

use ferry::TokenFormat;
use ferry_reference::workload::Routing;
use ferry_rig::*;

/// Ranks, and how many of them a node has.
#[derive(Clone, Copy)]
struct Group {
    ranks: usize,
    p2p_world_size: usize,
}

/// Formats, ways back and split calls take turns from seed to seed; the rest is drawn.
fn case(group: Group, seed: u64) -> Case {
    let mut dice = Dice::new(seed);
    let turn = |every: u64, count: usize| (seed / every) as usize % count;
    let format = TokenFormat::ALL[turn(1, TokenFormat::ALL.len())];
    let Group {
        ranks,
        p2p_world_size,
    } = group;
    // What 64 ranks cost grows with everything: a few seconds each.
    let is_large = ranks > 16;
    let experts = ranks * if is_large { 1 } else { dice.pick(&[1, 2, 4]) };
    let most = 1 + dice.below(if is_large { 2 } else { 4 });
    let rounds = if is_large { 1 } else { 2 };
    Case {
        ranks,
        p2p_world_size,
        experts,
        top_k: dice.pick(&[1, 4, 8]).min(experts),
        hidden: match format {
            TokenFormat::Bf16 => dice.pick(&[8, 40]),
            TokenFormat::Nvfp4(_) | TokenFormat::Nvfp4RowScaled(_) => 64,
            _ => 128,
        },
        tokens: (0..rounds)
            .map(|_| (0..ranks).map(|_| dice.below(most + 1)).collect())
            .collect(),
        routing: match dice.below(3) {
            0 => Routing::Uniform,
            1 => Routing::Zipf { exponent: 1.0 },
            _ => Routing::Holes { probability: 0.4 },
        },
        format,
        how: Return::ALL[turn(1, 3)],
        split: [0, u64::MAX, 0x5a3c_96f0_0ff0_a5c3][turn(3, 3)],
        warps: 1 + dice.below(2) as u32,
        stall_one_in: dice.pick(&[0, 64]),
        synchronize: dice.below(4) == 0,
        spare_rows: dice.below(3),
        ..Case::small(seed)
    }
}

/// Runs cases that are the same every time, and one that never was.
fn rounds(ranks: usize, p2p_world_size: usize, seeds: Range<u64>) {
    let group = Group {
        ranks,
        p2p_world_size,
    };
    let new = RandomState::new().build_hasher().finish();
    for seed in drawn_and(seeds, Some(new)) {
        Run::of(&case(group, seed)).expect_success();
    }
}

#[test]
fn eight_ranks_of_one_node() {
    rounds(8, 8, 0..30);
}

#[test]
fn eight_ranks_of_four_nodes() {
    rounds(8, 2, 0..30);
}

#[test]
fn sixteen_ranks_of_one_node() {
    rounds(16, 16, 0..30);
}

#[test]
fn sixteen_ranks_of_two_nodes() {
    rounds(16, 8, 0..30);
}

#[test]
fn sixty_four_ranks_of_one_node() {
    rounds(64, 64, 0..5);
}

#[test]
fn sixty_four_ranks_of_eight_nodes() {
    rounds(64, 8, 5..10);
}
