//! Fingerprints that ranks compare when they meet: sizes, layout and protocol version.

use ferry_layout::{Common, PROTOCOL_VERSION, Shape};

const SHAPE: Shape = Shape {
    ranks: 4,
    p2p_world_size: 4,
    experts: 64,
    top_k: 4,
    hidden: 1024,
    max_tokens_per_rank: 128,
    combine_mode: 0,
    token_format: 1,
};

fn of(common: &Common) -> u64 {
    common.fingerprint(PROTOCOL_VERSION, false, false)
}

#[test]
fn each_field_of_a_shape_counts() {
    let shapes = [
        SHAPE,
        Shape { ranks: 8, ..SHAPE },
        Shape {
            p2p_world_size: 2,
            ..SHAPE
        },
        Shape {
            experts: 128,
            ..SHAPE
        },
        Shape { top_k: 8, ..SHAPE },
        Shape {
            hidden: 2048,
            ..SHAPE
        },
        Shape {
            max_tokens_per_rank: 129,
            ..SHAPE
        },
        Shape {
            combine_mode: 1,
            ..SHAPE
        },
        Shape {
            token_format: 2,
            ..SHAPE
        },
    ];
    let mut all = shapes.map(|shape| of(&Common::of(&shape))).to_vec();
    assert_eq!(all[0], of(&Common::of(&SHAPE)));
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), shapes.len());
}

#[test]
fn layout_and_version_count() {
    let ours = Common::of(&SHAPE);
    let mut moved = ours;
    moved.window.inline_start += 16;
    let mut cut = ours;
    cut.row.header += 16;
    let mut kept = ours;
    kept.tables.row_map += 16;
    for other in [moved, cut, kept] {
        assert_ne!(of(&other), of(&ours));
    }
    let later = PROTOCOL_VERSION + 1;
    assert_ne!(ours.fingerprint(later, false, false), of(&ours));
    // Weights may fit in the stride of a row, so that the window is the same.
    for (keeps_rows, combine_weights) in [(true, false), (false, true), (true, true)] {
        let other = ours.fingerprint(PROTOCOL_VERSION, keeps_rows, combine_weights);
        assert_ne!(other, of(&ours));
    }
}
