//! Cases whose every parameter comes from a seed.

use ferry::{ReceiveLayout, ScaleLayout, TokenFormat};
use ferry_reference::workload::Routing;

use super::case::Case;
use super::dice::Dice;
use super::inputs::Return;
use super::options::Options;
use crate::formats::given::{Given, Strides};
use crate::verify::Groups;

/// A case whose every parameter comes from its seed: 2 to 8 ranks of 1, 2 or all a node, two or
/// three rounds.
pub fn any_case(seed: u64) -> Case {
    let mut dice = Dice::new(seed);
    let ranks = 2 + dice.below(7);
    let nodes: Vec<usize> = [1, 2, ranks]
        .into_iter()
        .filter(|&size| ranks.is_multiple_of(size))
        .collect();
    let p2p_world_size = dice.pick(&nodes);
    let experts = ranks * (1 + dice.below(4));
    let top_k = (1 + dice.below(8)).min(experts);
    let rounds = 2 + dice.below(2);
    let most = 1 + dice.below(12);
    let tokens = (0..rounds)
        .map(|_| (0..ranks).map(|_| dice.below(most + 1)).collect())
        .collect();
    let routing = any_routing(&mut dice);
    let format = match dice.below(3) {
        0 => TokenFormat::Bf16,
        _ => dice.pick(&TokenFormat::ALL),
    };
    // Rows of more than 512 bytes travel in parts.
    let hidden = match format {
        TokenFormat::Bf16 => 8 * dice.pick(&[1, 2, 3, 4, 5, 6, 7, 8, 40, 100, 161]),
        TokenFormat::Nvfp4(_) | TokenFormat::Nvfp4RowScaled(_) => 64 * dice.pick(&[1, 2, 3, 9, 33]),
        _ => 128 * dice.pick(&[1, 2, 3, 5, 9, 17]),
    };
    let how = dice.pick(&Return::ALL);
    Case {
        ranks,
        p2p_world_size,
        experts,
        top_k,
        hidden,
        format,
        tokens,
        routing,
        how,
        split: dice.pick(&[0, u64::MAX, dice.state()]),
        warps: 1 + dice.below(8) as u32,
        stall_one_in: dice.pick(&[0, 8, 64]),
        synchronize: dice.below(4) == 0,
        spare_rows: dice.below(3),
        // Rows that stay apart are not added to.
        shared_expert: dice.below(3) == 0 && how != Return::Apart,
        counted: dice.pick(&[None, None, Some(0), Some(3)]),
        wide_ids: wide_ids(seed),
        counts: counts(seed),
        given_up: given_up(seed),
        given: given(seed),
        strides: strides(seed),
        groups: groups(seed),
        ..Case::small(seed)
    }
}

/// Draws which ranks' expert ids are i64, apart from all else.
fn wide_ids(seed: u64) -> u64 {
    let mut dice = Dice::new(seed ^ 0x6936_3469);
    let bits = dice.bits();
    dice.pick(&[0, u64::MAX, bits])
}

/// Draws whether the host waits for counts, apart from all else.
pub(super) fn counts(seed: u64) -> bool {
    Dice::new(seed ^ 0x636f_756e).below(3) == 0
}

/// Draws which rounds are given up, apart from all else: none in half of the cases.
pub(super) fn given_up(seed: u64) -> u64 {
    let mut dice = Dice::new(seed ^ 0x7570_7570);
    let bits = dice.bits();
    dice.pick(&[0, 0, bits, bits | 1])
}

/// Draws how tokens are given, apart from all else: encoded in half of the cases.
pub(super) fn given(seed: u64) -> Given {
    let forms = [Given::Encoded, Given::AnyBits, Given::Packed];
    let mut dice = Dice::new(seed ^ 0x7061_7373);
    match dice.below(2) {
        0 => Given::Bf16,
        _ => dice.pick(&forms),
    }
}

/// Draws the places of the scales of tokens that are given encoded, apart from all else.
pub(super) fn strides(seed: u64) -> Strides {
    let all = [Strides::RowMajor, Strides::Gaps, Strides::Transposed];
    Dice::new(seed ^ 0x7374_7269).pick(&all)
}

/// A case of padded blocks: [`any_case`] without what they exclude, with weights that are given to combine.
pub fn padded_case(seed: u64) -> Case {
    let case = any_case(seed);
    let mut dice = Dice::new(seed ^ 0x7061_6464);
    let how = dice.pick(&[Return::Reduced, Return::Reduced, Return::Exact]);
    let options = Options {
        row_weights: how == Return::Reduced,
        ..Options::any(seed)
    };
    let expert = dice.below(case.experts);
    Case {
        receive: ReceiveLayout::Padded,
        transposed_scales: case.format == TokenFormat::BlockwiseFp8 && dice.below(2) == 0,
        routing: match dice.below(4) {
            // More rows for an expert than its block holds.
            0 => Routing::AllToOne { expert },
            _ => case.routing.clone(),
        },
        // Between nodes, exact mode stages rows by their number.
        p2p_world_size: match how {
            Return::Reduced => case.p2p_world_size,
            _ => case.ranks,
        },
        finish: (how == Return::Reduced || dice.below(2) == 0).then_some(options),
        options: true,
        shared_expert: false,
        how,
        ..case
    }
}

/// Draws padding and tables of rows by expert, apart from all else: none in half of the cases.
pub(super) fn groups(seed: u64) -> Groups {
    let mut dice = Dice::new(seed ^ 0x6772_6f75);
    if dice.below(2) == 0 {
        return Groups::NONE;
    }
    Groups {
        alignment: dice.pick(&[1, 2, 4, 8, 16, 64, 128, 256]),
        clears_padding: dice.below(2) == 0,
        row_sources: dice.below(2) == 0,
        m_indices: dice.below(2) == 0,
        padded: 0,
    }
}

/// A case of rounds in which every rank has the same tokens and nothing travels: 1 to 8 ranks, three rounds.
pub fn local_case(seed: u64) -> Case {
    let (mut dice, mut machine) = (Dice::new(seed), Dice::new(!seed));
    let ranks = dice.pick(&[1, 2, 3, 4, 8]);
    let experts = ranks * (1 + dice.below(40));
    // Fewer tokens than blocks, which then share a token, and more.
    let most_tokens = dice.pick(&[1, 3, 12, 40, 300]);
    let format = dice.pick(&TokenFormat::ALL);
    let how = dice.pick(&Return::ALL);
    let tokens = (0..3).map(|_| vec![dice.below(most_tokens + 1); ranks]);
    Case {
        ranks,
        experts,
        most_tokens,
        format,
        how,
        tokens: tokens.collect(),
        top_k: (1 + dice.below(10)).min(experts),
        hidden: match format {
            TokenFormat::Bf16 => 8 * dice.pick(&[1, 3, 16, 40, 161]),
            TokenFormat::Nvfp4(_) | TokenFormat::Nvfp4RowScaled(_) => 64 * dice.pick(&[1, 3, 9]),
            _ => 128 * dice.pick(&[1, 3, 9]),
        },
        routing: any_routing(&mut dice),
        spare_rows: dice.below(3),
        shared_expert: dice.below(3) == 0 && how != Return::Apart,
        skip_a2a: true,
        wide_ids: wide_ids(seed),
        given_up: given_up(seed),
        given: given(seed),
        strides: strides(seed),
        groups: groups(seed),
        warps: 1 + machine.below(8) as u32,
        stall_one_in: machine.pick(&[0, 8, 64]),
        ..Case::small(seed)
    }
}

pub(super) fn any_routing(dice: &mut Dice) -> Routing {
    match dice.below(4) {
        0 => Routing::Uniform,
        1 => Routing::Zipf { exponent: 1.0 },
        2 => Routing::Duplicates,
        _ => Routing::Holes { probability: 0.4 },
    }
}

/// A case for GPUs, `node` to a node: [`any_case`] with larger sizes, and eight rounds' tokens.
pub fn gpu_case(seed: u64, ranks: usize, node: usize) -> Case {
    let case = any_case(seed);
    let mut dice = Dice::new(!seed);
    let experts = ranks * dice.pick(&[1, 2, 4, 8, 16, 32]);
    let most = dice.pick(&[1, 1, 2, 4, 8, 16, 32, 128]);
    let tokens = (0..8)
        .map(|_| (0..ranks).map(|_| dice.below(most + 1)).collect())
        .collect();
    Case {
        ranks,
        p2p_world_size: node,
        experts,
        top_k: (1 + dice.below(9)).min(experts),
        hidden: case.hidden * dice.pick(&[1, 1, 2, 3]),
        tokens,
        ..case
    }
}

/// Few tokens in rows of several parts, on one node, in formats whose rows then go bare; many rounds.
pub fn inline_case(seed: u64) -> Case {
    let case = any_case(seed);
    let mut dice = Dice::new(!seed);
    let ranks = dice.pick(&[2, 3, 4]);
    let experts = ranks * (1 + dice.below(3));
    let tokens = (0..6)
        .map(|_| (0..ranks).map(|_| dice.pick(&[0, 1, 1, 2, 5])).collect())
        .collect();
    let format = dice.pick(&[
        TokenFormat::Bf16,
        TokenFormat::BlockwiseFp8,
        TokenFormat::Mxfp8(ScaleLayout::Tiled),
        TokenFormat::Mxfp8(ScaleLayout::RowMajor),
    ]);
    Case {
        ranks,
        p2p_world_size: ranks,
        experts,
        top_k: (1 + dice.below(4)).min(experts),
        // More than 512 bytes.
        hidden: match format {
            TokenFormat::Bf16 => 8 * dice.pick(&[33, 65, 161]),
            _ => 128 * dice.pick(&[5, 9, 17]),
        },
        format,
        tokens,
        synchronize: false,
        ..case
    }
}
