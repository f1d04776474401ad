//! Places of one-byte scales: by hand, all apart, and experts one after the other.

use ferry_layout::scale_placement::{
    blocks, bytes, first_block, first_blocks, max_blocks, offset, offset_in_block, scales_offset,
};
use ferry_layout::{ScaleLayout, Shape, TokenFormat};
use proptest::prelude::*;

#[test]
fn places_by_hand() {
    let cases = [
        (0, 0, 0),
        (0, 3, 3),
        (0, 4, 512),
        (1, 0, 16),
        (31, 0, 496),
        (32, 0, 4),
        (127, 3, 511),
        (128, 0, 1024), // five groups are two tiles
        (129, 4, 1024 + 512 + 16),
    ];
    for (row, group, at) in cases {
        assert_eq!(offset(0, row, group, 5), at, "({row}, {group})");
    }
    assert_eq!(offset(3, 128, 0, 5), 4 * 1024);
    assert_eq!((bytes(3, 4), bytes(3, 5), bytes(0, 5)), (1536, 3072, 0));
}

#[test]
fn words_of_as_many_scales_as_are_allowed_are_numbered_in_32_bits() {
    let formats = [TokenFormat::Mxfp8, TokenFormat::Mxfp4, TokenFormat::Nvfp4];
    for hidden in [128, 256, 7168, 1 << 20] {
        for (format, layout) in formats
            .into_iter()
            .flat_map(|f| [(f, ScaleLayout::Tiled), (f, ScaleLayout::RowMajor)])
        {
            let shape = Shape {
                hidden,
                token_format: format(layout).number(),
                ..SHAPE
            };
            let words = u64::from(shape.scale_words());
            // Word numbers of the last scales, by the tensors' definition.
            let last = |count: u64| match layout {
                ScaleLayout::RowMajor => count * words - 1,
                ScaleLayout::Tiled => {
                    let (block, groups) = ((count - 1) as u32, 4 * words as u32);
                    offset(block, 127, groups - 1, groups) / 4
                }
            };
            let most = match layout {
                ScaleLayout::RowMajor => shape.most_scaled_rows(),
                ScaleLayout::Tiled => shape.most_scale_blocks(),
            };
            assert!(u32::try_from(last(most)).is_ok(), "{shape:?}");
            assert!(u32::try_from(last(most + 1)).is_err(), "{shape:?}");
        }
    }
    assert_eq!(SHAPE.most_scaled_rows(), u64::MAX);
    assert_eq!(SHAPE.most_scale_blocks(), u64::MAX);
}

const SHAPE: Shape = Shape {
    ranks: 2,
    p2p_world_size: 2,
    experts: 4,
    top_k: 2,
    hidden: 128,
    max_tokens_per_rank: 3,
    combine_mode: 0,
    token_format: 0,
};

#[test]
fn every_place_of_a_tensor_is_used_once() {
    let mut used = vec![false; bytes(3, 12) as usize];
    for row in 0..3 * 128 {
        for group in 0..12 {
            let at = offset(0, row, group, 12) as usize;
            assert!(!std::mem::replace(&mut used[at], true), "({row}, {group})");
        }
    }
    assert!(used.iter().all(|used| *used));
}

#[test]
fn four_groups_are_a_word() {
    for row in 0..128 {
        for group in (0..12).step_by(4) {
            let at = offset_in_block(row, group);
            assert!(at.is_multiple_of(4));
            assert!((1..4).all(|next| offset_in_block(row, group + next) == at + next));
        }
    }
}

#[test]
fn large_tensors_count_in_64_bits() {
    assert_eq!(offset(1 << 25, 0, 0, 448), (1 << 25) * 112 * 512);
    assert_eq!(blocks(u32::MAX), 1 << 25);
}

#[test]
fn experts_by_hand() {
    let row_offsets = [0, 100, 300, 400];
    let firsts: Vec<u32> = first_blocks(&row_offsets).collect();
    assert_eq!(firsts, [0, 1, 3, 4]);
    let offsets = [0, 1, 2].map(|expert| scales_offset(firsts[expert], row_offsets[expert]));
    assert_eq!(offsets, [0, 1, 1]);
    assert_eq!(first_blocks(&[0]).collect::<Vec<_>>(), [0], "no experts");
    // With rows padded more than blocks are, the difference is negative and wraps.
    let offset = scales_offset(1, 300);
    assert_eq!((offset, first_block(300, offset)), (u32::MAX, 1));
}

#[test]
fn the_bound_by_hand() {
    let cases = [
        (0, 8, 0),
        (1, 8, 1),
        (8, 8, 8),
        (128, 1, 1),
        (129, 1, 2),
        (8 + 127, 8, 8),
        (8 + 128, 8, 9),
    ];
    for (rows, experts, blocks) in cases {
        assert_eq!(max_blocks(rows, experts), blocks, "{rows} {experts}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn experts_do_not_overlap(counts in prop::collection::vec(0u32..700, 1..20)) {
        let mut row_offsets = vec![0];
        for count in &counts {
            row_offsets.push(row_offsets[row_offsets.len() - 1] + count);
        }
        let firsts: Vec<u32> = first_blocks(&row_offsets).collect();
        prop_assert_eq!(firsts.len(), counts.len() + 1);
        for (expert, count) in counts.iter().enumerate() {
            let offset = scales_offset(firsts[expert], row_offsets[expert]);
            prop_assert_eq!(first_block(row_offsets[expert], offset), firsts[expert]);
            prop_assert!(offset <= counts.len() as u32, "it does not wrap");
            let end = firsts[expert] + count.div_ceil(128);
            prop_assert_eq!(end, firsts[expert + 1]);
        }
        let rows = u64::from(row_offsets[counts.len()]);
        prop_assert!(u64::from(firsts[counts.len()]) <= max_blocks(rows, counts.len() as u32));
    }

    #[test]
    fn the_bound_is_reached(rows in 1u64..5000, experts in 1u32..20) {
        // A row for each expert that can have one, and all others for the first.
        let begun = rows.min(u64::from(experts));
        let reached = begun - 1 + (rows - begun + 1).div_ceil(128);
        prop_assert_eq!(max_blocks(rows, experts), reached);
    }
}
