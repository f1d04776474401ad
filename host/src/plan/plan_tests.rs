//! Configurations that a plan refuses, and its sizes.

use std::time::Duration;

use ferry_layout::{ScaleLayout, TokenFormat};

use super::check::{MAX_HIDDEN, MAX_ROWS};
use super::*;
use crate::plan::capacity::Capacity;

const GOOD: Config = Config {
    deadline: Duration::from_secs(1),
    ..Config::new(256, 8, 7168, 128)
};

fn problems(ranks: u32, config: Config) -> Vec<(&'static str, String)> {
    match Plan::check(ranks, true, config) {
        Ok(_) => Vec::new(),
        Err(error) => error
            .problems
            .into_iter()
            .map(|p| (p.field, p.value))
            .collect(),
    }
}

/// Asserts that on four ranks `change` breaks one rule.
fn refused(field: &'static str, value: &str, change: impl Fn(&mut Config)) {
    let mut config = GOOD;
    change(&mut config);
    assert_eq!(problems(4, config), [(field, value.to_owned())]);
}

#[test]
fn a_good_configuration_gives_its_sizes() {
    let plan = Plan::check(4, false, GOOD).unwrap();
    assert_eq!(plan.local_experts(), 64);
    assert_eq!(plan.max_rows(), 4 * 128 * 8);
    assert_eq!(plan.shape().p2p_world_size, 4);
    assert_eq!(plan.config(), &GOOD);
    assert!(plan.window_bytes() > 4 * 128 * 7168 * 2);
    assert!(plan.workspace_bytes() > 0);
    assert_eq!(plan.deadline_ns(), 1_000_000_000);
}

#[test]
fn where_nothing_travels_a_rank_gets_its_own_experts_rows_of_the_tokens_that_all_have() {
    for ranks in [1, 4] {
        let config = Config {
            skip_a2a: true,
            shared_expert: true,
            ..GOOD
        };
        let plan = Plan::check(ranks, false, config).unwrap();
        let (ranks, shape) = (ranks as usize, plan.shape());
        assert_eq!(plan.ranks() as usize, ranks);
        assert_eq!((shape.ranks, shape.p2p_world_size), (1, 1));
        assert_eq!(plan.local_experts(), 256 / ranks);
        // The shared expert's tokens are divided among the ranks.
        assert_eq!(plan.max_rows(), 128 * 8 + 128 / ranks);
        assert!(plan.takes_options());
    }
    assert_eq!(
        problems(
            3,
            Config {
                skip_a2a: true,
                ..GOOD
            }
        ),
        [("experts", "256".to_owned())]
    );
}

#[test]
fn a_shared_expert_takes_a_group_of_its_own_and_room_for_the_ranks_tokens() {
    for (format, tokens, padded, padding) in [
        (TokenFormat::Bf16, 129, 129, 0),
        (TokenFormat::BlockwiseFp8, 129, 132, 64 * 3),
        (TokenFormat::Nvfp4(ScaleLayout::Tiled), 129, 129, 0),
    ] {
        let without = Config {
            format,
            max_tokens_per_rank: tokens,
            ..GOOD
        };
        let with = Config {
            shared_expert: true,
            ..without
        };
        let without = Plan::check(4, false, without).unwrap();
        let with = Plan::check(4, false, with).unwrap();
        assert_eq!((without.groups(), with.groups()), (64, 65));
        assert_eq!(without.max_rows(), 4 * tokens * 8 + padding);
        assert_eq!(with.max_rows(), without.max_rows() + padded);
        assert_eq!(with.max_scale_blocks(), without.max_scale_blocks() + 2);
        assert_eq!(with.window_bytes(), without.window_bytes());
    }
}

/// Regions are looked at in `ferry-layout`; here, that a plan passes all sizes on.
#[test]
fn plans_of_many_ranks_give_their_sizes() {
    let (tokens, row) = (4096, 7168 * 2);
    for (ranks, p2p_world_size) in [(8, 8), (16, 16), (16, 8), (64, 64), (64, 8)] {
        let config = Config {
            max_tokens_per_rank: tokens,
            p2p_world_size: Some(p2p_world_size),
            ..GOOD
        };
        let plan = Plan::check(ranks as u32, true, config).unwrap();
        assert_eq!(plan.local_experts(), 256 / ranks);
        assert_eq!(plan.max_rows(), ranks * tokens * 8);
        let blocks = 256 / ranks + (ranks * tokens * 8 - 256 / ranks) / 128;
        assert_eq!(plan.max_scale_blocks(), blocks);
        // A header has 8 bytes for each expert; rows are whole cache lines.
        let near = ranks * tokens * (row + 128) + tokens * 8 * row;
        // Between nodes, counts and presence for each rank, each behind an empty word, and a line of epochs.
        let notice = (256 / ranks + 2).next_multiple_of(2) + 130;
        let notices = (ranks * 8 * notice).next_multiple_of(128) + 128;
        let staged = tokens * (row + 128) + ranks * tokens * row + notices;
        // On one node, rows of 1024 tokens of all ranks can be dispatched bare, with a header for each of 16
        // parts, and rows of 2048 be combined so.
        let bare = 1024 * (row + 16 * 64) + 2048 / ranks * 8 * row;
        let rows = near + if ranks > p2p_world_size { staged } else { bare };
        let counts = ranks * (256 / ranks + 1);
        let experts = [2 * 256 / ranks, 256];
        let (consumed, gave_up) = (ranks, ranks);
        let words = [
            counts,
            ranks * 128,
            ranks * tokens,
            consumed,
            gave_up,
            tokens * 8,
        ];
        let words = words.iter().chain(&experts);
        let signals: usize = words.map(|n| (8 * n).next_multiple_of(128)).sum();
        assert_eq!(
            plan.window_bytes(),
            (rows + signals) as u64,
            "{ranks} ranks"
        );
        let row_map = 4 * (ranks * tokens * 8) as u64;
        assert!(plan.workspace_bytes() > row_map);
    }
}

#[test]
fn blockwise_fp8_has_whole_strides_of_scales() {
    let config = Config {
        experts: 64,
        max_tokens_per_rank: 4096,
        format: TokenFormat::BlockwiseFp8,
        ..GOOD
    };
    let plan = Plan::check(32, false, config).unwrap();
    // Two experts, each with up to 3 rows of padding: 6 rows, rounded up.
    assert_eq!(plan.max_rows(), 32 * 4096 * 8 + 8);
}

#[test]
fn every_size_is_checked() {
    refused("hidden", "12", |c| c.hidden = 12);
    refused("hidden", "0", |c| c.hidden = 0);
    refused("hidden", "1048584", |c| c.hidden = MAX_HIDDEN + 8);
    refused("top_k", "0", |c| c.top_k = 0);
    refused("top_k", "33", |c| c.top_k = 33);
    refused("top_k", "8", |c| c.experts = 4);
    refused("experts", "255", |c| c.experts = 255);
    refused("experts", "65536", |c| c.experts = 65_536);
    refused("max_tokens_per_rank", "0", |c| c.max_tokens_per_rank = 0);
    let many = u32::MAX as usize / 2 / 32 + 1;
    refused("max_tokens_per_rank", &many.to_string(), |c| {
        c.max_tokens_per_rank = many;
    });
    // Where there are so many experts, a word has 16 bits for the ordinal.
    refused("max_tokens_per_rank", "8193", |c| {
        c.experts = 65_532;
        c.max_tokens_per_rank = 8193;
    });
    let all = usize::MAX;
    refused("max_tokens_per_rank", &all.to_string(), |c| {
        c.max_tokens_per_rank = all;
    });
}

#[test]
fn ranks_nodes_and_behaviour_are_checked() {
    let experts = 650;
    let many = Config { experts, ..GOOD };
    assert_eq!(problems(65, many), [("ranks", "65".to_owned())]);
    assert_eq!(problems(0, GOOD), [("ranks", "0".to_owned())]);
    for size in [0, 3, 8] {
        refused("p2p_world_size", &size.to_string(), |c| {
            c.p2p_world_size = Some(size);
        });
    }
    refused("deadline", "0 s", |c| c.deadline = Duration::ZERO);
    let long = Duration::from_secs(100_000);
    refused("deadline", "100000 s", |c| c.deadline = long);
    refused("max_sms", "0", |c| c.max_sms = Some(0));
}

#[test]
fn no_experts_are_reported_once_for_the_count_and_once_for_top_k() {
    let fields: Vec<_> = problems(4, Config { experts: 0, ..GOOD });
    assert_eq!(
        fields,
        [("experts", "0".to_owned()), ("top_k", "8".to_owned())]
    );
}

#[test]
fn other_nodes_need_a_fabric_that_reaches_them() {
    let config = Config {
        p2p_world_size: Some(2),
        ..GOOD
    };
    assert!(Plan::check(4, true, config).is_ok());
    let error = Plan::check(4, false, config).unwrap_err();
    assert_eq!(error.problems.len(), 1);
    assert_eq!(error.problems[0].field, "p2p_world_size");
    let whole = Config {
        p2p_world_size: Some(4),
        ..GOOD
    };
    assert!(Plan::check(4, false, whole).is_ok());
}

#[test]
fn all_problems_come_together_with_one_line_each() {
    let config = Config {
        experts: 7,
        top_k: 40,
        hidden: 9,
        max_tokens_per_rank: 0,
        p2p_world_size: Some(3),
        deadline: Duration::ZERO,
        max_sms: Some(0),
        ..GOOD
    };
    let error = Plan::check(4, true, config).unwrap_err();
    let fields: Vec<_> = error.problems.iter().map(|p| p.field).collect();
    assert_eq!(
        fields,
        [
            "experts",
            "top_k",
            "top_k",
            "hidden",
            "max_tokens_per_rank",
            "p2p_world_size",
            "deadline",
            "max_sms"
        ]
    );
    let text = error.to_string();
    assert_eq!(text.lines().count(), 1 + error.problems.len());
    assert!(
        text.contains("hidden is 9, but it must be a multiple of 8 above 0"),
        "{text}"
    );
}

/// All ways to choose `top_k` of `experts`, as bits.
fn choices(experts: u32, top_k: u32) -> Vec<u32> {
    (0..1 << experts)
        .filter(|set: &u32| set.count_ones() == top_k)
        .collect()
}

/// Most rows that rank 0 gets of so many tokens with different experts, by trying all of them.
fn most_rows_of_all(plan: &Plan, tokens: u32) -> usize {
    let (shape, alignment) = (plan.shape(), plan.shape().row_alignment());
    let (experts, local) = (shape.experts, plan.local_experts() as u32);
    let choices = choices(experts, shape.top_k);
    let mut most = 0;
    for number in 0..choices.len().pow(tokens) {
        let sets =
            (0..tokens).map(|token| choices[number / choices.len().pow(token) % choices.len()]);
        let sets: Vec<u32> = sets.collect();
        let rows = (0..local).map(|expert| {
            let rows = sets.iter().filter(|&set| set >> expert & 1 != 0).count() as u32;
            rows.next_multiple_of(alignment) as usize
        });
        most = most.max(rows.sum());
    }
    most
}

#[test]
fn no_tokens_with_different_experts_bring_more_rows_than_max_rows_distinct() {
    for (ranks, experts, top_k, tokens) in [
        (1, 3, 2, 3),
        (2, 2, 2, 2),
        (2, 4, 3, 1),
        (2, 6, 3, 1),
        (3, 3, 2, 1),
        (3, 6, 4, 1),
        (2, 6, 2, 2),
        (4, 4, 4, 1),
    ] {
        for format in [TokenFormat::Bf16, TokenFormat::BlockwiseFp8] {
            let config = Config {
                format,
                hidden: 128,
                ..Config::new(experts, top_k, 128, tokens)
            };
            let plan = Plan::check(ranks, false, config).unwrap();
            let most = most_rows_of_all(&plan, ranks * tokens as u32);
            let given = plan.max_rows_distinct();
            assert!(most <= given && given <= plan.max_rows(), "{plan:?}");
            if format == TokenFormat::Bf16 {
                assert_eq!(most, given, "{plan:?}");
            }
        }
    }
}

/// `12345` as `12,345`.
fn grouped(number: usize) -> String {
    if number < 1000 {
        number.to_string()
    } else {
        format!("{},{:03}", grouped(number / 1000), number % 1000)
    }
}

#[test]
fn the_guide_says_how_large_outputs_must_be() {
    let page = include_str!("../../docs/capacity.md");
    for (ranks, experts, top_k, tokens) in [
        (8, 256, 8, 4096),
        (32, 128, 8, 1024),
        (64, 256, 8, 128),
        (64, 256, 8, 4096),
        (64, 64, 6, 128),
    ] {
        let config = Config::new(experts, top_k, 7168, tokens);
        let plan = Plan::check(ranks, true, config).unwrap();
        let row = format!(
            "| {ranks} | {experts} | {top_k} | {} | {} | {} | {} |",
            grouped(tokens),
            grouped(plan.max_rows()),
            grouped(plan.max_rows_distinct()),
            grouped(tokens * top_k),
        );
        assert!(page.contains(&row), "docs/capacity.md lacks {row}");
    }
}

#[test]
fn the_guide_says_what_a_rank_holds() {
    let page = include_str!("../../docs/capacity.md");
    let mut lacks = String::new();
    for (ranks, tokens) in [
        (4, 128),
        (4, 4096),
        (8, 128),
        (8, 4096),
        (64, 128),
        (64, 4096),
    ] {
        for (format, name) in [
            (TokenFormat::Bf16, "BF16"),
            (TokenFormat::BlockwiseFp8, "FP8"),
        ] {
            // More than 8 GPUs are on several nodes.
            let config = Config {
                format,
                p2p_world_size: (ranks > 8).then_some(8),
                ..Config::new(256, 8, 7168, tokens)
            };
            let plan = Plan::check(ranks, true, config).unwrap();
            let bytes = |capacity| {
                let layout = plan.output_layout(capacity).unwrap();
                grouped(layout.iter().map(|tensor| tensor.bytes as usize).sum())
            };
            let row = format!(
                "| {ranks} | {} | {name} | {} | {} | {} | {} |\n",
                grouped(tokens),
                grouped(plan.window_bytes() as usize),
                grouped(plan.workspace_bytes() as usize),
                bytes(Capacity::max_distinct(&plan)),
                grouped(2 * 7168 * tokens),
            );
            if !page.contains(&row) {
                lacks += &row;
            }
        }
    }
    assert!(lacks.is_empty(), "docs/capacity.md lacks\n{lacks}");
}

#[test]
fn a_rank_that_the_group_has_not_has_no_shared_tokens() {
    let config = Config {
        skip_a2a: true,
        shared_expert: true,
        ..GOOD
    };
    let plan = Plan::check(4, false, config).unwrap();
    let shared = |rank, tokens| plan.shared_tokens(Rank(rank), tokens);
    assert_eq!([0, 3].map(|rank| shared(rank, 10)), [0..3, 8..10]);
    assert_eq!([4, u32::MAX].map(|rank| shared(rank, 10)), [10..10, 10..10]);
}

#[test]
fn experts_that_a_block_cannot_count_are_refused_where_nothing_travels() {
    let config = |experts, skip_a2a| Config {
        skip_a2a,
        ..Config::new(experts, 2, 128, 4)
    };
    assert_eq!(problems(2, config(2 * 2680, true)), []);
    assert_eq!(problems(2, config(2 * 2681, false)), []);
    let refused = problems(2, config(2 * 2681, true));
    assert_eq!(refused, [("experts", "5362".to_owned())]);
}

#[test]
fn rows_that_pad_experts_are_counted() {
    let most = MAX_ROWS as usize;
    let exact = Config {
        top_k: 1,
        experts: 1,
        max_tokens_per_rank: most,
        ..GOOD
    };
    assert_eq!(problems(1, exact), []);
    let padded = Config {
        format: TokenFormat::BlockwiseFp8,
        ..exact
    };
    assert_eq!(
        problems(1, padded),
        [("max_tokens_per_rank", most.to_string())]
    );
    let shared = Config {
        shared_expert: true,
        max_tokens_per_rank: most / 2 - 1,
        ..padded
    };
    assert_eq!(problems(1, shared).len(), 1);
}
