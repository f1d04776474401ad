//! Shapes that plans accept, drawn.

use ferry_layout::{MAX_EXPERTS, Shape, TokenFormat};
use proptest::prelude::*;

/// Any shape that a plan accepts, with all numbers so small that all places can be listed.
pub fn small_shape() -> impl Strategy<Value = Shape> {
    shape(1..=6, 1..=4, 1..=6, 1..=5, 0..=70)
}

/// Any shape that a plan accepts: at most 2^31 rows arrive at a rank, of 2^20 elements.
pub fn any_shape() -> impl Strategy<Value = Shape> {
    let shape = shape(1..=64, 1..=65_535, 1..=32, 1..=131_072, 0..=u32::MAX / 2);
    shape.prop_map(|mut shape| {
        shape.experts = (shape.experts / shape.ranks).clamp(1, MAX_EXPERTS / shape.ranks);
        shape.experts *= shape.ranks;
        let most = (u32::MAX / 2) / (shape.ranks * shape.top_k);
        shape.max_tokens_per_rank = shape.max_tokens_per_rank.min(most);
        shape
    })
}

fn shape(
    ranks: std::ops::RangeInclusive<u32>,
    local_experts: std::ops::RangeInclusive<u32>,
    top_k: std::ops::RangeInclusive<u32>,
    eighths: std::ops::RangeInclusive<u32>,
    tokens: std::ops::RangeInclusive<u32>,
) -> impl Strategy<Value = Shape> {
    (
        ranks,
        any::<u32>(),
        local_experts,
        top_k,
        eighths,
        tokens,
        0..2_u32,
        0..TokenFormat::ALL.len(),
    )
        .prop_map(
            |(ranks, node, local, top_k, eighths, max_tokens_per_rank, combine_mode, format)| {
                let format = TokenFormat::ALL[format];
                let sizes: Vec<u32> = (1..=ranks).filter(|size| ranks % size == 0).collect();
                Shape {
                    ranks,
                    p2p_world_size: sizes[node as usize % sizes.len()],
                    experts: local * ranks,
                    top_k,
                    // Scales fill whole words only.
                    hidden: match format.sizes().elements_of_word() {
                        0 => 8 * eighths,
                        word => word * (8 * eighths).div_ceil(word),
                    },
                    max_tokens_per_rank,
                    combine_mode,
                    token_format: format.number(),
                }
            },
        )
}
