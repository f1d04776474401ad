//! Alignment of experts, and tables of rows by expert: refused configurations, sizes, tensors.

use ferry_layout::{CombineMode, ReceiveLayout, ScaleLayout, TokenFormat};

use super::*;
use crate::plan::capacity::Capacity;
use crate::plan::receive::{ByExpert, Padded, Receive};
use crate::tensor::data_type::DataType;

const ALIGNED: ByExpert = ByExpert {
    alignment: 128,
    ..ByExpert::PLAIN
};
const GOOD: Config = Config {
    receive: Receive::ByExpert(ALIGNED),
    ..Config::new(256, 8, 7168, 128)
};

const fn aligned_to(alignment: usize) -> Receive {
    Receive::ByExpert(ByExpert {
        alignment,
        ..ByExpert::PLAIN
    })
}

/// Problems of a configuration on four ranks, as texts.
fn problems(config: Config) -> Vec<String> {
    match Plan::check(4, true, config) {
        Ok(_) => Vec::new(),
        Err(error) => error.problems.iter().map(ToString::to_string).collect(),
    }
}

fn refused(config: Config, wanted: &[&str]) {
    let found = problems(config);
    assert_eq!(found.len(), 1, "{found:?}");
    for text in wanted {
        assert!(found[0].contains(text), "{found:?}, wanted {text}");
    }
}

#[test]
fn an_alignment_is_a_power_of_two_up_to_256() {
    for expert_alignment in [1, 2, 4, 8, 16, 32, 64, 128, 256] {
        let config = Config {
            receive: aligned_to(expert_alignment),
            ..GOOD
        };
        let plan = Plan::check(4, true, config).unwrap();
        assert_eq!(plan.row_alignment() as usize, expert_alignment);
        assert_eq!(plan.common().row.alignment() as usize, expert_alignment);
        let fp8 = Config {
            format: TokenFormat::BlockwiseFp8,
            ..config
        };
        let plan = Plan::check(4, true, fp8).unwrap();
        assert_eq!(plan.row_alignment() as usize, expert_alignment.max(4));
    }
    for (expert_alignment, given) in [(0, "is 0"), (3, "is 3"), (96, "is 96"), (512, "is 512")] {
        let config = Config {
            receive: aligned_to(expert_alignment),
            ..GOOD
        };
        let rule = "it must be a power of two, 1 to 256";
        refused(config, &["expert_alignment", given, rule]);
    }
}

#[test]
fn padding_is_cleared_only_if_there_is_any() {
    let config = Config {
        receive: Receive::ByExpert(ByExpert {
            clear_padding: true,
            ..ByExpert::PLAIN
        }),
        ..GOOD
    };
    refused(config, &["clear_padding is true", "expert_alignment is 1"]);
    let fp8 = Config {
        format: TokenFormat::BlockwiseFp8,
        ..config
    };
    assert!(problems(fp8).is_empty());
}

#[test]
fn exact_mode_between_nodes_takes_the_formats_alignment_alone() {
    let exact = Config {
        combine: CombineMode::Exact,
        p2p_world_size: Some(2),
        ..GOOD
    };
    refused(exact, &["expert_alignment is 128", "combine is exact"]);
    for fine in [
        Config {
            p2p_world_size: Some(4),
            ..exact
        },
        Config {
            combine: CombineMode::Reduced,
            ..exact
        },
        Config {
            skip_a2a: true,
            ..exact
        },
        Config {
            receive: aligned_to(4),
            format: TokenFormat::BlockwiseFp8,
            ..exact
        },
    ] {
        assert!(problems(fine).is_empty(), "{fine:?}");
    }
}

#[test]
fn rows_that_cannot_be_counted_with_their_padding_are_refused() {
    let config = Config::new(4, 1, 8, 536_870_911);
    assert!(problems(config).is_empty());
    let aligned = Config {
        receive: aligned_to(256),
        ..config
    };
    refused(
        aligned,
        &["max_tokens_per_rank", "with padding", "can be counted"],
    );
}

/// Most rows and blocks of `experts` experts that get `rows` rows, by trying all ways to divide these.
fn most(rows: u32, experts: u32, alignment: u32) -> (u32, u32) {
    if experts == 0 {
        return (0, 0);
    }
    let of = |here: u32| {
        let (others, blocks) = most(rows - here, experts - 1, alignment);
        let padded = here.next_multiple_of(alignment);
        (padded + others, padded.div_ceil(128) + blocks)
    };
    let first = if experts == 1 { rows } else { 0 };
    (first..=rows).map(of).fold((0, 0), |one, other| {
        (one.0.max(other.0), one.1.max(other.1))
    })
}

#[test]
fn no_rows_take_more_room_than_the_plan_says() {
    let format = TokenFormat::Mxfp8(ScaleLayout::Tiled);
    for (experts, tokens) in [(1, 1), (2, 1), (2, 3), (3, 3), (2, 130), (2, 257), (3, 20)] {
        for expert_alignment in [1, 2, 8, 64, 128, 256] {
            let config = Config {
                format,
                receive: aligned_to(expert_alignment),
                ..Config::new(experts, 1, 128, tokens)
            };
            let plan = Plan::check(1, false, config).unwrap();
            let (rows, blocks) = most(tokens as u32, experts as u32, expert_alignment as u32);
            assert!(rows as usize <= plan.max_rows(), "{plan:?}: {rows}");
            assert!(plan.max_rows().is_multiple_of(expert_alignment), "{plan:?}");
            assert_eq!(blocks as usize, plan.max_scale_blocks(), "{plan:?}");
            let spare = plan.max_rows() - rows as usize;
            // An expert without rows has no padding.
            assert!(spare < (experts + 1) * expert_alignment, "{plan:?}: {rows}");
        }
    }
}

#[test]
fn a_plan_has_the_tables_that_it_asks_for() {
    let names = |config: Config| -> Vec<(&'static str, DataType, Vec<usize>)> {
        let plan = Plan::check(4, false, config).unwrap();
        let layout = plan.output_layout(Capacity::of_rows(&plan, 256)).unwrap();
        let all = layout.iter();
        let all = all.map(|of| (of.name, of.data_type, of.dims.clone()));
        all.filter(|(name, ..)| !["tokens", "row_offsets", "expert_ids"].contains(name))
            .collect()
    };
    let (i32, u32, f32) = (DataType::I32, DataType::U32, DataType::F32);
    let plain = Config {
        receive: Receive::BY_EXPERT,
        ..GOOD
    };
    assert_eq!(names(plain), [("src_info", i32, vec![256, 2])]);
    let counts = ("expert_counts", i32, vec![65]);
    let ends = ("row_ends", u32, vec![65]);
    let shared = Config {
        shared_expert: true,
        ..GOOD
    };
    assert_eq!(
        names(shared),
        [
            ("src_info", i32, vec![256, 2]),
            counts.clone(),
            ends.clone()
        ]
    );
    let all = Config {
        receive: Receive::ByExpert(ByExpert {
            row_sources: true,
            m_indices: true,
            ..ALIGNED
        }),
        ..shared
    };
    let wanted = [
        ("src_info", i32, vec![256, 3]),
        ("weights", f32, vec![256, 1]),
        counts,
        ends,
        ("m_indices", i32, vec![256]),
    ];
    assert_eq!(names(all), wanted);
    assert!(Plan::check(4, false, all).unwrap().takes_options());
    assert!(!Plan::check(4, false, plain).unwrap().takes_options());
}

#[test]
fn a_capacity_is_a_multiple_of_the_alignment() {
    let plan = Plan::check(4, false, GOOD).unwrap();
    let told = plan
        .output_layout(Capacity::of_rows(&plan, 100))
        .unwrap_err();
    let told = told.to_string();
    for text in [
        "rows",
        "100",
        "a multiple of 128",
        "expert_alignment is 128",
    ] {
        assert!(told.contains(text), "{told}");
    }
}

const PADDED: Config = Config {
    receive: Receive::of(ReceiveLayout::Padded),
    ..Config::new(256, 8, 7168, 128)
};

#[test]
fn padded_blocks_have_room_for_every_token() {
    let plan = Plan::check(4, true, PADDED).unwrap();
    assert_eq!(plan.max_rows(), 64 * 4 * 128);
    assert_eq!(plan.max_rows_distinct(), plan.max_rows());
    assert_eq!((plan.row_alignment(), plan.block_rows()), (1, 512));
    assert!(plan.takes_options());
    let layout = plan.output_layout(Capacity::max(&plan)).unwrap();
    let ranges = layout.last().expect("ranges");
    assert_eq!(
        (ranges.name, ranges.data_type, &ranges.dims[..]),
        ("source_ranges", DataType::I64, &[64, 4][..])
    );
    // 64 experts with 16,384 rows of BF16 each.
    let many = Config {
        max_tokens_per_rank: 4096,
        ..PADDED
    };
    let plan = Plan::check(4, true, many).unwrap();
    let layout = plan.output_layout(Capacity::max(&plan)).unwrap();
    assert_eq!(layout[0].name, "tokens");
    assert_eq!(layout[0].bytes, 64 * 16_384 * 7168 * 2);
    let told = plan
        .output_layout(Capacity::of_rows(&plan, 512))
        .unwrap_err();
    let told = told.to_string();
    for text in [
        "512",
        "receive is padded",
        "local experts * ranks * max_tokens_per_rank",
    ] {
        assert!(told.contains(text), "{told}");
    }
}

#[test]
fn padded_blocks_have_all_blocks_of_tiled_scales() {
    let config = Config {
        format: TokenFormat::Mxfp8(ScaleLayout::Tiled),
        ..PADDED
    };
    let plan = Plan::check(4, true, config).unwrap();
    assert_eq!(plan.max_scale_blocks(), 64 * 512 / 128);
    for whole in [Capacity::max(&plan), Capacity::max_distinct(&plan)] {
        plan.output_layout(whole).unwrap();
        let short = Capacity {
            scale_blocks: 255,
            ..whole
        };
        let told = plan.output_layout(short).unwrap_err().to_string();
        for text in ["scale_blocks", "255", "at least 256"] {
            assert!(told.contains(text), "{told}");
        }
    }
}

#[test]
fn scales_of_blocks_are_row_major_or_transposed_in_each_block() {
    let dims = |transposed_scales| {
        let config = Config {
            format: TokenFormat::BlockwiseFp8,
            receive: Receive::Padded(Padded {
                transposed_scales,
                ..Padded::default()
            }),
            ..PADDED
        };
        let plan = Plan::check(4, true, config).unwrap();
        let layout = plan.output_layout(Capacity::max(&plan)).unwrap();
        let mut layout = layout.into_iter();
        layout.find(|of| of.name == "scales").expect("scales").dims
    };
    assert_eq!(dims(false), [64 * 512, 56]);
    assert_eq!(dims(true), [64 * 56, 512]);
}

#[test]
fn padded_blocks_exclude_what_has_no_block() {
    for (config, texts) in [
        (
            Config {
                shared_expert: true,
                ..PADDED
            },
            ["receive is padded", "shared_expert is true"],
        ),
        (
            Config {
                skip_a2a: true,
                ..PADDED
            },
            ["receive is padded", "skip_a2a is true"],
        ),
        (
            Config {
                combine: CombineMode::Exact,
                p2p_world_size: Some(2),
                ..PADDED
            },
            ["receive is padded", "combine is exact"],
        ),
        (
            Config {
                max_tokens_per_rank: 1 << 23,
                top_k: 1,
                ..PADDED
            },
            [
                "max_tokens_per_rank is 8388608",
                "local experts * ranks * max_tokens_per_rank",
            ],
        ),
    ] {
        refused(config, &texts);
    }
}
