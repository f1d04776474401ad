//! Cases whose rows stay as they came, drawn from a seed.

use ferry::ReceiveLayout;
use ferry::{ScaleLayout, TokenFormat};

use super::case::Case;
use super::dice::Dice;
use super::draw::{any_routing, counts, given, given_up, strides};
use super::inputs::Return;
use super::options::Options;

/// Formats of rows that stay as they came.
pub const ROW_FORMATS: [TokenFormat; 6] = [
    TokenFormat::Bf16,
    TokenFormat::BlockwiseFp8,
    TokenFormat::Mxfp8(ScaleLayout::RowMajor),
    TokenFormat::Mxfp4(ScaleLayout::RowMajor),
    TokenFormat::Nvfp4(ScaleLayout::RowMajor),
    TokenFormat::Nvfp4RowScaled(ScaleLayout::RowMajor),
];

/// Layouts whose rows stay as they came.
pub const ROW_LAYOUTS: [ReceiveLayout; 3] = [
    ReceiveLayout::View,
    ReceiveLayout::Strided,
    ReceiveLayout::Compact,
];

/// A case whose rows stay as they came: every parameter comes from its seed.
pub fn any_rows_case(seed: u64) -> Case {
    let mut dice = Dice::new(seed ^ 0x6c61_796f);
    let (receive, format) = (dice.pick(&ROW_LAYOUTS), dice.pick(&ROW_FORMATS));
    rows_case(seed, receive, format)
}

/// Size of the rounds of a case whose rows stay as they came.
enum Size {
    /// A few small tokens.
    Small,
    /// Few tokens of several parts each.
    Parts,
    /// Many tokens of one rank, more than there are warps.
    Many,
}

/// A case whose rows stay as they came, in this layout and format: every other parameter comes from its seed.
pub fn rows_case(seed: u64, receive: ReceiveLayout, format: TokenFormat) -> Case {
    let mut dice = Dice::new(seed ^ 0x726f_7773);
    let size = match dice.below(5) {
        0..2 => Size::Small,
        2..4 => Size::Parts,
        _ => Size::Many,
    };
    let most_ranks: &[usize] = match size {
        Size::Many => &[2, 3, 4, 6],
        _ => &[2, 3, 4, 4, 6, 8],
    };
    let ranks = dice.pick(most_ranks);
    let nodes: Vec<usize> = [1, 2, ranks]
        .into_iter()
        .filter(|&size| ranks.is_multiple_of(size))
        .collect();
    let experts = ranks * (1 + dice.below(5));
    let bits = dice.bits();
    let is_compact = receive == ReceiveLayout::Compact;
    let has_steps = dice.below(2) == 0;
    let steps = Options {
        row_weights: false,
        ..Options::any(bits)
    };
    Case {
        ranks,
        p2p_world_size: dice.pick(&nodes),
        experts,
        top_k: dice.pick(&[1, 1, 2, 3, 4, 8]).min(experts),
        hidden: row_length(&size, format, &mut dice),
        tokens: row_tokens(&size, ranks, &mut dice),
        most_tokens: dice.pick(&[0, 0, 17]),
        routing: any_routing(&mut dice),
        format,
        split: dice.pick(&[0, u64::MAX, bits]),
        warps: match size {
            Size::Many => 4 + dice.below(5) as u32,
            _ => 1 + dice.below(8) as u32,
        },
        stall_one_in: dice.pick(&[0, 8, 64]),
        synchronize: dice.below(4) == 0,
        spare_rows: dice.below(3),
        debug_checks: dice.below(2) == 0,
        counted: dice.pick(&[None, None, Some(0), Some(3)]),
        finish: has_steps.then_some(steps),
        short: is_compact && dice.below(2) == 0,
        receive,
        transposed_scales: format == TokenFormat::BlockwiseFp8 && dice.below(2) == 0,
        clear_absent: receive == ReceiveLayout::Strided && dice.below(2) == 0,
        combine_weights: dice.below(2) == 0,
        initial: [dice.below(2) == 0, dice.below(2) == 0],
        wide_ids: dice.pick(&[0, u64::MAX, bits >> 8]),
        unweighted: dice.pick(&[0, u64::MAX, bits >> 16]),
        specials: dice.below(2) == 0,
        reads_views: dice.below(4) > 0,
        limits: dice.below(2) == 0,
        counts: counts(seed),
        given_up: given_up(seed),
        given: given(seed),
        strides: strides(seed),
        ..Case::small(seed)
    }
}

/// Makes a case one whose rows stay as they came, one in three times, by its seed.
#[must_use]
pub fn some_keep_rows(case: Case) -> Case {
    let mut dice = Dice::new(case.seed ^ 0x6b65_6570);
    if dice.below(3) > 0 {
        return case;
    }
    let (receive, bits) = (dice.pick(&ROW_LAYOUTS), dice.bits());
    let format = case.format.with_scale_layout(ScaleLayout::RowMajor);
    Case {
        format,
        receive,
        how: Return::Reduced,
        shared_expert: false,
        transposed_scales: format == TokenFormat::BlockwiseFp8 && dice.below(2) == 0,
        clear_absent: receive == ReceiveLayout::Strided && dice.below(2) == 0,
        combine_weights: dice.below(2) == 0,
        wide_ids: dice.pick(&[0, u64::MAX, bits]),
        ..case
    }
}

/// Elements of a token.
fn row_length(size: &Size, format: TokenFormat, dice: &mut Dice) -> usize {
    match (size, format) {
        (Size::Small, TokenFormat::Bf16) => 8 * dice.pick(&[1, 2, 3, 5, 8, 40]),
        (Size::Small, TokenFormat::Nvfp4(_) | TokenFormat::Nvfp4RowScaled(_)) => {
            64 * dice.pick(&[1, 2, 3, 9])
        }
        (Size::Small, _) => 128 * dice.pick(&[1, 2, 3, 5]),
        // More than 512 bytes.
        (Size::Parts, TokenFormat::Bf16) => 8 * dice.pick(&[33, 65, 161]),
        (Size::Parts, TokenFormat::BlockwiseFp8 | TokenFormat::Mxfp8(_)) => {
            128 * dice.pick(&[5, 9, 17])
        }
        (Size::Parts, _) => 128 * dice.pick(&[9, 17]),
        (Size::Many, TokenFormat::Bf16) => 64,
        (Size::Many, _) => 128,
    }
}

/// Tokens of each rank in each round.
fn row_tokens(size: &Size, ranks: usize, dice: &mut Dice) -> Vec<Vec<usize>> {
    let most = 1 + dice.below(12);
    let rounds = match size {
        Size::Small => 2 + dice.below(2),
        Size::Parts => 4,
        Size::Many => 2,
    };
    let mut tokens = |_| -> Vec<usize> {
        let ranks = 0..ranks;
        match size {
            Size::Small => ranks.map(|_| dice.below(most + 1)).collect(),
            Size::Parts => ranks.map(|_| dice.pick(&[0, 1, 1, 2, 5])).collect(),
            Size::Many => {
                let busiest = dice.below(ranks.end);
                let tokens = |rank| match rank == busiest {
                    true => 90 + dice.below(90),
                    false => dice.below(40),
                };
                ranks.map(tokens).collect()
            }
        }
    };
    (0..rounds).map(&mut tokens).collect()
}
