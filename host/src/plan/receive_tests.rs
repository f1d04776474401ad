//! Receive layouts that a plan refuses, and the sizes of those that it takes.

use ferry_layout::{ReceiveLayout, ScaleLayout, TokenFormat};

use super::*;
use crate::plan::capacity::Capacity;
use crate::plan::receive::{Receive, ReceiveFields};
use crate::plan::scale_form::ScaleForm;

const FP8: TokenFormat = TokenFormat::BlockwiseFp8;
const KEEP_ROWS: [ReceiveLayout; 3] = [
    ReceiveLayout::View,
    ReceiveLayout::Strided,
    ReceiveLayout::Compact,
];

/// 3 experts a rank, 2 of them for each token.
const fn config(receive: ReceiveLayout) -> Config {
    Config {
        receive: Receive::of(receive),
        ..Config::new(6, 2, 256, 5)
    }
}

fn plan(config: Config) -> Plan {
    Plan::check(2, true, config).unwrap()
}

fn lines(config: Config) -> Vec<String> {
    let refused = Plan::check(2, true, config).unwrap_err();
    let problems = refused.problems.iter();
    problems.map(ToString::to_string).collect()
}

#[test]
fn rows_that_stay_as_they_came_exclude_others_by_name() {
    for receive in KEEP_ROWS {
        plan(config(receive));
        let one = |change: fn(&mut Config), rule: &str| {
            let mut config = config(receive);
            change(&mut config);
            assert_eq!(lines(config), [format!("receive is {receive}, but {rule}")]);
        };
        one(
            |config| config.format = TokenFormat::Mxfp8(ScaleLayout::Tiled),
            "format is mxfp8:tiled, and only rows by expert have tiled scales",
        );
        one(
            |config| config.combine = CombineMode::Exact,
            "combine is exact, which takes rows by expert",
        );
        one(
            |config| config.shared_expert = true,
            "shared_expert is true, and its rows are a group of rows by expert",
        );
        one(
            |config| config.skip_a2a = true,
            "skip_a2a is true, and rows that do not travel are by expert",
        );
        let all = Config {
            format: TokenFormat::Nvfp4(ScaleLayout::Tiled),
            combine: CombineMode::Exact,
            shared_expert: true,
            skip_a2a: true,
            ..config(receive)
        };
        assert_eq!(lines(all).len(), 4);
    }
}

#[test]
fn only_scales_of_fp8_are_transposed_and_weights_take_room() {
    let with = |receive, change: fn(&mut ReceiveFields)| {
        let mut fields = ReceiveFields::new(receive);
        change(&mut fields);
        Config {
            receive: fields.try_into().unwrap(),
            ..config(receive)
        }
    };
    let needs_fp8 =
        "transposed_scales is true, but format is bf16, and only scales of fp8 can be transposed";
    for receive in KEEP_ROWS {
        let transposed = with(receive, |fields| fields.transposed_scales = true);
        assert_eq!(lines(transposed), [needs_fp8]);
        plan(Config {
            format: FP8,
            ..transposed
        });
        let weights = with(receive, |fields| fields.combine_weights = true);
        let before = plan(config(receive)).window_bytes();
        assert!(plan(weights).window_bytes() > before);
    }
}

/// Each field is taken by these layouts, and refused by its name, with the layout's, in all others.
#[test]
fn layouts_take_their_own_fields_only() {
    use ReceiveLayout::{ByExpert, Compact, Padded, Strided, View};
    type Change = fn(&mut ReceiveFields);
    let all: [(&str, Change, &[ReceiveLayout]); 7] = [
        (
            "transposed_scales is true",
            |fields| fields.transposed_scales = true,
            &[Padded, View, Strided, Compact],
        ),
        (
            "clear_absent is true",
            |fields| fields.clear_absent = true,
            &[Strided],
        ),
        (
            "combine_weights is true",
            |fields| fields.combine_weights = true,
            &[View, Strided, Compact],
        ),
        (
            "expert_alignment is 8",
            |fields| fields.expert_alignment = 8,
            &[ByExpert],
        ),
        (
            "clear_padding is true",
            |fields| fields.clear_padding = true,
            &[ByExpert, Padded],
        ),
        (
            "row_sources is true",
            |fields| fields.row_sources = true,
            &[ByExpert, Padded],
        ),
        (
            "m_indices is true",
            |fields| fields.m_indices = true,
            &[ByExpert, Padded],
        ),
    ];
    for receive in ReceiveLayout::ALL {
        let plain = ReceiveFields::new(receive);
        assert_eq!(Receive::of(receive).fields(), plain);
        assert_eq!(Receive::try_from(plain), Ok(Receive::of(receive)));
        let (mut every, mut taken, mut refused) = (plain, plain, 0);
        for (field, change, layouts) in all {
            let mut fields = plain;
            change(&mut fields);
            change(&mut every);
            let found = Receive::try_from(fields);
            if layouts.contains(&receive) {
                change(&mut taken);
                assert_eq!(found.map(|receive| receive.fields()), Ok(fields));
                continue;
            }
            refused += 1;
            let told = found.unwrap_err().problems[0].to_string();
            let wanted = format!("{field}, but receive is {receive}, ");
            assert!(told.starts_with(&wanted), "{told}; wanted {wanted}");
        }
        // All of them at once, and the others are kept.
        let (kept, _) = every.taken();
        assert_eq!(kept.fields(), taken);
        assert_eq!(
            Receive::try_from(every).unwrap_err().problems.len(),
            refused
        );
    }
}

/// A plan of flat fields: those that the layout does not take are told with all other problems.
#[cfg(feature = "simulator")]
#[test]
fn problems_of_flat_fields_are_told_with_all_others() {
    let group = Group::simulated(2, 1).unwrap();
    let view = ReceiveFields {
        transposed_scales: true,
        ..ReceiveFields::new(ReceiveLayout::View)
    };
    let wrong = ReceiveFields {
        m_indices: true,
        ..view
    };
    let lines = |config, fields| match Plan::with_fields(&group, config, fields) {
        Ok(plan) => vec![plan.config().receive.to_string()],
        Err(Error::Plan(error)) => error.problems.iter().map(ToString::to_string).collect(),
        Err(other) => panic!("{other}"),
    };
    let fp8 = Config {
        format: FP8,
        ..config(ReceiveLayout::ByExpert)
    };
    assert_eq!(lines(fp8, view), ["view"]);
    let index =
        "m_indices is true, but receive is view, and only rows by expert and padded blocks take it";
    assert_eq!(lines(fp8, wrong), [index]);
    let bf16 =
        "transposed_scales is true, but format is bf16, and only scales of fp8 can be transposed";
    assert_eq!(lines(config(ReceiveLayout::ByExpert), wrong), [index, bf16]);
}

#[test]
fn there_is_a_row_for_each_source_and_token_without_padding() {
    for receive in KEEP_ROWS {
        for format in [TokenFormat::Bf16, FP8] {
            let plan = plan(Config {
                format,
                ..config(receive)
            });
            assert_eq!((plan.max_rows(), plan.max_rows_distinct()), (10, 10));
            assert!(plan.takes_options());
            let stride = plan.view_row_stride();
            let least = plan.shape().dispatch_row_bytes();
            assert_eq!(stride, u64::from(least).next_multiple_of(128));
        }
    }
    let text = |receive| {
        let most = Config {
            format: FP8,
            max_tokens_per_rank: 1 << 31,
            ..config(receive)
        };
        lines(most).remove(0)
    };
    let by_expert = text(ReceiveLayout::ByExpert);
    assert!(
        by_expert.contains("top_k, with padding, is 85899"),
        "{by_expert}"
    );
    let counted = "top_k is 8589934592, and at most 2147483647 rows can be counted";
    assert!(text(ReceiveLayout::Compact).ends_with(counted));
}

#[test]
fn capacities_are_any_for_compact_rows_and_one_for_the_others() {
    for receive in KEEP_ROWS {
        let plan = plan(Config {
            format: FP8,
            ..config(receive)
        });
        assert_eq!(Capacity::max(&plan).rows, 10);
        for rows in [0, 1, 9, 10, 11, 1000] {
            let checked = Capacity::of_rows(&plan, rows).check(&plan);
            if rows == 10 || receive == ReceiveLayout::Compact {
                checked.unwrap();
                continue;
            }
            assert_eq!(
                checked.unwrap_err().to_string(),
                format!(
                    "the capacity of a dispatch's outputs does not work: rows is {rows}, but receive is \
                     {receive}, with 10 rows: ranks * max_tokens_per_rank"
                )
            );
        }
    }
    // Row-major scales of blockwise FP8 are numbered in 32 bits: 2 words a row.
    let compact = plan(Config {
        format: FP8,
        ..config(ReceiveLayout::Compact)
    });
    let text = |rows| {
        let checked = Capacity::of_rows(&compact, rows).check(&compact);
        checked.map_err(|error| error.to_string())
    };
    assert_eq!(text(MOST_ROWS), Ok(()));
    assert!(
        text(MOST_ROWS + 1)
            .unwrap_err()
            .contains("it must be at most")
    );
    let wide = plan(Config {
        format: FP8,
        ..Config {
            hidden: 1024,
            ..config(ReceiveLayout::Compact)
        }
    });
    let most = (1_usize << 32) / 8;
    assert!(Capacity::of_rows(&wide, most).check(&wide).is_ok());
    let more = Capacity::of_rows(&wide, most + 1).check(&wide).unwrap_err();
    assert!(more.to_string().contains("536870913 rows"), "{more}");
}

/// Most rows of any capacity.
const MOST_ROWS: usize = crate::plan::check::MAX_ROWS as usize;

#[test]
fn scales_lie_as_format_and_layout_say() {
    let form = |receive, format, transposed_scales| {
        let fields = ReceiveFields {
            transposed_scales,
            ..ReceiveFields::new(receive)
        };
        let config = Config {
            format,
            receive: fields.try_into().unwrap(),
            ..config(receive)
        };
        plan(config).scale_form()
    };
    let mxfp8 = TokenFormat::Mxfp8(ScaleLayout::RowMajor);
    for receive in KEEP_ROWS {
        let copied = match receive {
            ReceiveLayout::View => ScaleForm::None,
            _ => ScaleForm::RowMajor,
        };
        assert_eq!(form(receive, TokenFormat::Bf16, false), ScaleForm::None);
        assert_eq!(form(receive, FP8, false), copied);
        assert_eq!(form(receive, mxfp8, false), copied);
        let transposed = ScaleForm::Transposed { multiple: 1 };
        assert_eq!(form(receive, FP8, true), transposed);
    }
    let by_expert = ScaleForm::Transposed { multiple: 4 };
    assert_eq!(form(ReceiveLayout::ByExpert, FP8, false), by_expert);
}

/// A number with commas between groups of three digits.
fn grouped(number: u64) -> String {
    if number < 1000 {
        number.to_string()
    } else {
        format!("{},{:03}", grouped(number / 1000), number % 1000)
    }
}

/// Rows of a token on all of `ranks` ranks, a row for each rank with one of its 8 of 256 experts: on average
/// over all choices.
fn rows_of_a_token(ranks: u32) -> f64 {
    let (experts, local) = (256.0, 256.0 / f64::from(ranks));
    let none_here: f64 = (0..8)
        .map(|slot| (experts - local - f64::from(slot)) / (experts - f64::from(slot)))
        .product();
    f64::from(ranks) * (1.0 - none_here)
}

#[test]
fn the_guide_says_what_outputs_of_each_layout_take() {
    let page = include_str!("../../docs/receive.md");
    for (ranks, tokens) in [(4, 4096), (8, 4096), (64, 128)] {
        for format in [TokenFormat::Bf16, FP8] {
            let bytes = |receive| {
                let config = Config {
                    format,
                    receive: Receive::of(receive),
                    ..Config::new(256, 8, 7168, tokens)
                };
                let plan = Plan::check(ranks, true, config).unwrap();
                let layout = plan.output_layout(Capacity::max(&plan)).unwrap();
                grouped(layout.iter().map(|tensor| tensor.bytes).sum())
            };
            let [by_expert, view, strided, compact, _] = ReceiveLayout::ALL.map(bytes);
            assert_eq!(strided, compact);
            let tokens = grouped(tokens as u64);
            let row = format!(
                "| {ranks} | {tokens} | `{format}` | {by_expert} | {strided} | {view} | 8 | {:.2} |",
                rows_of_a_token(ranks)
            );
            assert!(page.contains(&row), "docs/receive.md lacks {row}");
        }
    }
}
