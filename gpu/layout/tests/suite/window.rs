//! Places in a window or a workspace of any shape never overlap, and words and pages read back as they were
//! written.

use std::ops::Range;

use ferry_layout::{
    Assignment, AssignmentWords, ByteOffset, CombineMode, Common, Counter, Header, MAX_BLOCKS,
    MAX_EXPERTS, MAX_RANKS, MAX_TOP_K, NOT_ROUTED, Rank, SENTINEL, Shape, Signal, StagedEpoch,
    TILE_ASSIGNMENTS, Window, Workspace,
};
use proptest::prelude::*;

use crate::shapes::{any_shape, small_shape};

/// Bytes of a place, and its name.
type Place = (Range<u64>, String);

/// Alignment of rows: a cache line.
const LINE: u64 = 128;

/// The places of one kind, from the first to the last along each index.
struct Kind<'a> {
    name: &'static str,
    bytes: u64,
    counts: [u64; 2],
    at: Box<dyn Fn(u64, u64) -> u64 + 'a>,
}

impl Kind<'_> {
    fn place(&self, i: u64, j: u64) -> Place {
        let start = (self.at)(i, j);
        let name = format!("{}[{i}, {j}]", self.name);
        (start..start + self.bytes, name)
    }

    fn is_empty(&self) -> bool {
        self.counts.contains(&0)
    }

    /// The bytes from the first place to the last.
    fn extent(&self) -> Place {
        let [i, j] = self.counts;
        let (first, last) = (self.place(0, 0), self.place(i - 1, j - 1));
        (first.0.start..last.0.end, format!("all of {}", self.name))
    }

    fn all(&self) -> impl Iterator<Item = Place> {
        let [i, j] = self.counts;
        (0..i).flat_map(move |i| (0..j).map(move |j| self.place(i, j)))
    }
}

fn of_signal(signal: Signal) -> u64 {
    assert!(signal.bytes().is_multiple_of(8));
    signal.bytes()
}

fn of_row(row: ByteOffset) -> u64 {
    assert!(row.bytes().is_multiple_of(LINE));
    row.bytes()
}

/// Every kind of signal in a window.
fn signals<'a>(shape: &'a Shape, window: &'a Window) -> Vec<Kind<'a>> {
    let ranks = u64::from(shape.ranks);
    let rank = |i| Rank(i as u32);
    let kind = |name, counts, at| Kind {
        name,
        bytes: 8,
        counts,
        at,
    };
    vec![
        kind(
            "count",
            [ranks, u64::from(shape.local_experts())],
            Box::new(move |i, j| of_signal(window.count(rank(i), j as u32))),
        ),
        kind(
            "token_count",
            [ranks, 1],
            Box::new(move |i, _| of_signal(window.token_count(rank(i)))),
        ),
        kind(
            "presence",
            [ranks, u64::from(shape.presence_words())],
            Box::new(move |i, j| of_signal(window.presence(rank(i), j as u32))),
        ),
        kind(
            "start",
            [ranks, u64::from(shape.local_experts())],
            Box::new(move |i, j| of_signal(window.source_base(rank(i), j as u32))),
        ),
        kind(
            "dispatch_flag",
            [ranks, shape.max_items()],
            Box::new(move |i, j| of_signal(window.dispatch_flag(rank(i), j as u32))),
        ),
        kind(
            "consumed",
            [ranks, 1],
            Box::new(move |i, _| of_signal(window.credit(rank(i)))),
        ),
        kind(
            "combine_flag",
            [shape.max_items(), u64::from(shape.combine_slots())],
            Box::new(move |i, j| of_signal(window.combine_flag(i as u32, j as u32))),
        ),
    ]
}

/// Every kind of row in a window.
fn rows<'a>(shape: &'a Shape, window: &'a Window) -> Vec<Kind<'a>> {
    let (ranks, tokens) = (u64::from(shape.ranks), u64::from(shape.max_tokens_per_rank));
    let dispatch_bytes = u64::from(shape.dispatch_row_bytes());
    let combine_bytes = u64::from(shape.combine_row_bytes());
    let rank = |i| Rank(i as u32);
    let mut kinds = vec![
        Kind {
            name: "dispatch_row",
            bytes: dispatch_bytes,
            counts: [ranks, tokens],
            at: Box::new(move |i, j| of_row(window.dispatch_row(rank(i), j as u32))),
        },
        Kind {
            name: "combine_row",
            bytes: combine_bytes,
            counts: [tokens, u64::from(shape.combine_slots())],
            at: Box::new(move |i, j| of_row(window.combine_row(i as u32, j as u32))),
        },
    ];
    kinds.extend(inline_rows(shape, window));
    if shape.spans_nodes() {
        kinds.push(Kind {
            name: "dispatch_staging",
            bytes: dispatch_bytes,
            counts: [tokens, 1],
            at: Box::new(move |i, _| of_row(window.dispatch_staging(i as u32))),
        });
        kinds.push(match shape.mode() {
            CombineMode::Reduced => Kind {
                name: "reduced_staging",
                bytes: combine_bytes,
                counts: [ranks, tokens],
                at: Box::new(move |i, j| of_row(window.reduced_staging(rank(i), j as u32))),
            },
            CombineMode::Exact => Kind {
                name: "exact_staging",
                bytes: combine_bytes,
                counts: [shape.max_rows(), 1],
                at: Box::new(move |i, _| of_row(window.exact_staging(i as u32))),
            },
        });
        kinds.extend(staged_words(shape, window));
    }
    kinds
}

/// Every kind of word that puts carry.
fn staged_words<'a>(shape: &'a Shape, window: &'a Window) -> Vec<Kind<'a>> {
    let ranks = u64::from(shape.ranks);
    let word = |name, counts, at| Kind {
        name,
        bytes: 8,
        counts,
        at,
    };
    let place = |at: ByteOffset| {
        assert!(at.bytes().is_multiple_of(8));
        at.bytes()
    };
    vec![
        word(
            "staged_count",
            [ranks, u64::from(shape.local_experts()) + 1],
            Box::new(move |i, j| {
                place(window.staged_count(Rank((ranks - 1 - i) as u32), j as u32))
            }),
        ),
        word(
            "staged_presence",
            [ranks, u64::from(shape.presence_words())],
            Box::new(move |i, j| {
                place(window.staged_presence(Rank((ranks - 1 - i) as u32), j as u32))
            }),
        ),
        word(
            "staged_epoch",
            [2, 1],
            Box::new(move |i, _| {
                let halves = [StagedEpoch::Dispatch, StagedEpoch::Combine];
                place(window.staged_epoch(halves[i as usize]))
            }),
        ),
    ]
}

/// Every kind of bare row in a window.
fn inline_rows<'a>(shape: &'a Shape, window: &'a Window) -> Vec<Kind<'a>> {
    let tokens = u64::from(shape.max_cut_tokens());
    let mut kinds = Vec::new();
    if shape.format().never_encodes_sentinel() {
        kinds.push(Kind {
            name: "bare_dispatch_row",
            bytes: u64::from(shape.inline_dispatch_row_bytes()),
            counts: [u64::from(shape.ranks), tokens],
            at: Box::new(move |i, j| of_row(window.inline_dispatch_row(Rank(i as u32), j as u32))),
        });
    }
    let tokens = u64::from(shape.max_inline_tokens());
    if tokens > 0 {
        kinds.push(Kind {
            name: "bare_combine_row",
            bytes: u64::from(shape.combine_row_bytes()),
            counts: [tokens, u64::from(shape.combine_slots())],
            at: Box::new(move |i, j| of_row(window.inline_combine_row(i as u32, j as u32))),
        });
    }
    kinds
}

/// Panics with the names of two places that overlap.
fn assert_disjoint(mut places: Vec<Place>) {
    places.sort_by_key(|(bytes, _)| bytes.start);
    for pair in places.windows(2) {
        let [(first, name), (second, other)] = pair else {
            unreachable!()
        };
        assert!(
            first.end <= second.start,
            "{name} ({first:?}) overlaps {other} ({second:?})"
        );
    }
}

/// Extents of the kinds; counts and token counts, which alternate, are one, and so are staged words of a
/// rank.
fn extents(kinds: &[Kind<'_>]) -> Vec<Place> {
    let wanted = kinds
        .iter()
        .filter(|kind| !kind.is_empty() && !["count", "staged_count"].contains(&kind.name));
    wanted
        .map(|kind| {
            let (mut bytes, name) = kind.extent();
            if kind.name == "token_count" {
                bytes.start = kinds[0].extent().0.start;
            }
            if kind.name == "staged_presence" {
                let counts = kinds.iter().find(|kind| kind.name == "staged_count");
                bytes.start = counts.map_or(bytes.start, |counts| counts.extent().0.start);
            }
            (bytes, name)
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn all_places_of_a_small_window_are_apart(shape in small_shape()) {
        let window = Window::of(&shape);
        let signals: Vec<_> = signals(&shape, &window).iter().flat_map(Kind::all).collect();
        let rows: Vec<_> = rows(&shape, &window).iter().flat_map(Kind::all).collect();
        for (bytes, name) in &signals {
            prop_assert!(bytes.end <= window.signal_bytes, "{name} is not cleared at init");
        }
        for (bytes, name) in &rows {
            prop_assert!(bytes.start >= window.signal_bytes, "{name} is among the signals");
            prop_assert!(bytes.end <= window.bytes, "{name} is out of bounds");
        }
        assert_disjoint([signals, rows].concat());
    }

    #[test]
    fn regions_of_any_window_are_apart(shape in any_shape()) {
        let window = Window::of(&shape);
        let signals = extents(&signals(&shape, &window));
        let rows = extents(&rows(&shape, &window));
        prop_assert!(signals.iter().all(|(bytes, _)| bytes.end <= window.signal_bytes));
        prop_assert!(rows.iter().all(|(bytes, _)| window.signal_bytes <= bytes.start));
        prop_assert!(rows.iter().all(|(bytes, _)| bytes.end <= window.bytes));
        assert_disjoint([signals, rows].concat());
    }

    #[test]
    fn bare_rows_are_absent_at_first(shape in any_shape()) {
        let window = Window::of(&shape);
        let bare = window.inline_start..window.inline_start + window.inline_bytes;
        let rows = rows(&shape, &window);
        for kind in rows.iter().filter(|kind| !kind.is_empty()) {
            let (bytes, name) = kind.extent();
            if kind.name.starts_with("bare") {
                prop_assert!(bare.start <= bytes.start && bytes.end <= bare.end, "{name}");
            } else {
                prop_assert!(bytes.end <= bare.start || bare.end <= bytes.start, "{name}");
            }
        }
    }

    #[test]
    fn rows_in_parts_have_bare_rows(shape in any_shape(), tokens in any::<u32>(), few in 0..300_u32) {
        for tokens in [tokens, few] {
            let parts = shape.parts(tokens.min(shape.max_tokens_per_rank));
            if parts > 1 {
                prop_assert!(tokens <= shape.max_cut_tokens());
                let end = shape.inline_header_start(parts - 1) + Header::bytes(shape.top_k);
                prop_assert!(end <= shape.inline_dispatch_row_bytes());
            }
        }
    }

    #[test]
    fn an_entry_is_what_was_sent_and_never_absent(
        experts in (1..=MAX_EXPERTS, 0..=16_u32).prop_map(|(experts, bits)| experts >> bits | 1),
        which in any::<u32>(),
        rank_in_expert in any::<u64>(),
        end in 0..3_u64,
    ) {
        let assignments = AssignmentWords::of(experts);
        let most = assignments.max_ranks_in_expert();
        prop_assert!(most >= 1 << 16);
        // Every third is the largest possible.
        let rank_in_expert = if end == 0 { most - 1 } else { rank_in_expert % most } as u32;
        for expert in [which % experts, experts - 1] {
            let word = assignments.encode(expert, rank_in_expert);
            prop_assert_ne!(word, SENTINEL);
            prop_assert_eq!(assignments.decode(word), Assignment { expert, rank_in_expert });
        }
        let word = assignments.encode(NOT_ROUTED, rank_in_expert);
        prop_assert_ne!(word, SENTINEL);
        prop_assert!(assignments.decode(word).expert >= experts);
    }

    #[test]
    fn rows_of_any_window_do_not_touch(shape in any_shape(), i in any::<u64>(), j in any::<u64>()) {
        let window = Window::of(&shape);
        for kind in signals(&shape, &window).iter().chain(&rows(&shape, &window)) {
            if kind.is_empty() {
                continue;
            }
            let (i, j) = (i % kind.counts[0], j % kind.counts[1]);
            let here = kind.place(i, j);
            if j + 1 < kind.counts[1] {
                assert_disjoint(vec![here.clone(), kind.place(i, j + 1)]);
            }
            if i + 1 < kind.counts[0] {
                assert_disjoint(vec![here, kind.place(i + 1, 0)]);
            }
        }
    }

    #[test]
    fn tables_of_any_workspace_are_apart(shape in any_shape()) {
        let workspace = Workspace::of(&shape);
        let assignments = u64::from(shape.max_tokens_per_rank) * u64::from(shape.top_k);
        let chunks = assignments.div_ceil(u64::from(TILE_ASSIGNMENTS));
        let table = |name: &str, start: u64, words: u64| (start..start + 4 * words, name.to_owned());
        let tables = vec![
            table("counters", 0, Counter::COUNT * Counter::STRIDE_BYTES / 4),
            table("last launches", Workspace::last_launch(0), 2 * u64::from(MAX_BLOCKS)),
            table("ordinals", workspace.ranks_in_expert, assignments),
            table("chunk counts", workspace.tile_counts, chunks * u64::from(shape.experts)),
            table("routes", workspace.routes, assignments),
            table("row map", workspace.row_map, u64::from(shape.ranks) * assignments),
        ];
        for (bytes, name) in &tables {
            prop_assert!(bytes.start.is_multiple_of(LINE), "{name}");
            prop_assert!(bytes.end <= workspace.bytes, "{name} is out of bounds");
        }
        assert_disjoint(tables);
    }

    #[test]
    fn a_header_has_a_word_for_everything(top_k in 1..=MAX_TOP_K) {
        let weight = |k| Header::weight(top_k, k);
        let assignments = (0..top_k).map(Header::assignment);
        let words: Vec<u32> = assignments.chain((0..top_k).map(weight)).collect();
        prop_assert!(words.is_sorted_by(|a, b| a + 4 <= *b));
        prop_assert!(weight(top_k - 1) + 4 <= Header::bytes(top_k));
        prop_assert!(Header::bytes(top_k).is_multiple_of(16));
    }

    #[test]
    fn all_that_travels_in_a_row_is_apart(shape in any_shape()) {
        let (payload, scales) = (shape.payload_bytes(), 4 * shape.scale_words());
        let row_scale = if shape.sizes().has_row_scale { 4 } else { 0 };
        prop_assert!(payload + scales <= shape.row_scale_start());
        prop_assert!(shape.row_scale_start() + row_scale <= shape.header_start());
        let end = shape.header_start() + Header::bytes(shape.top_k);
        prop_assert!(end <= shape.dispatch_row_bytes());
        prop_assert!(shape.header_start().is_multiple_of(16));
    }

    #[test]
    fn every_expert_has_one_rank(shape in any_shape(), expert in any::<u32>()) {
        let expert = expert % shape.experts;
        let Rank(rank) = shape.rank_of(expert);
        prop_assert!(rank < shape.ranks);
        let first = rank * shape.local_experts();
        prop_assert!((first..first + shape.local_experts()).contains(&expert));
    }

    #[test]
    fn a_node_is_a_block_of_ranks(shape in any_shape(), a in any::<u32>(), b in any::<u32>()) {
        let (a, b) = (a % shape.ranks, b % shape.ranks);
        let node = |rank| (0..shape.ranks).step_by(shape.p2p_world_size as usize)
            .position(|first| (first..first + shape.p2p_world_size).contains(&rank));
        prop_assert_eq!(shape.same_node(Rank(a), Rank(b)), node(a) == node(b));
        prop_assert_eq!(shape.spans_nodes(), node(0) != node(shape.ranks - 1));
    }

    /// The numbers that are computed once for all kernels equal those of the shape.
    #[test]
    fn kernels_are_given_what_a_shape_says(
        shape in any_shape(), tokens in any::<u32>(), few in 0..300_u32, rows in 0..1_u32 << 24,
    ) {
        let common = Common::of(&shape);
        let Common { row, window, .. } = common;
        prop_assert_eq!((common.shape, window), (shape, Window::of(&shape)));
        let sizes = shape.sizes();
        prop_assert_eq!(row.payload_bytes, shape.payload_bytes());
        prop_assert_eq!(row.scale_words, shape.scale_words());
        prop_assert_eq!(row.row_scale, shape.row_scale_start());
        prop_assert_eq!(row.header, shape.header_start());
        prop_assert_eq!(row.padded(rows), rows.next_multiple_of(shape.row_alignment()));
        for tokens in [tokens, few].map(|tokens| tokens % (shape.max_tokens_per_rank + 1)) {
            let parts = shape.parts(tokens);
            prop_assert_eq!(row.parts(tokens), parts);
            let is_inline = parts > 1 && shape.format().never_encodes_sentinel();
            // Without tokens, nothing is moved.
            prop_assert!(tokens == 0 || common.dispatches_inline(parts) == is_inline);
            prop_assert_eq!(shape.combines_inline(tokens), tokens <= shape.max_inline_tokens());
            for part in 0..parts {
                let (_, end) = Shape::part(shape.payload_bytes(), part, parts);
                let words = sizes.scale_words(end * 8 / sizes.element_bits);
                prop_assert_eq!(row.scale_words_before(end), words);
            }
        }
    }

    #[test]
    fn parts_make_up_a_row(shape in any_shape(), tokens in any::<u32>(), few in 0..300_u32) {
        for tokens in [tokens, few] {
            let tokens = tokens.min(shape.max_tokens_per_rank);
            let parts = shape.parts(tokens);
            prop_assert!(parts >= 1);
            prop_assert!(u64::from(tokens) * u64::from(parts) <= shape.max_items());
            for bytes in [shape.payload_bytes(), shape.combine_row_bytes()] {
                let mut end = 0;
                for part in 0..parts {
                    let span = Shape::part(bytes, part, parts);
                    prop_assert_eq!(span.0, end);
                    prop_assert!(span.0 <= span.1 && (span.1 - span.0).is_multiple_of(16));
                    end = span.1;
                }
                prop_assert_eq!(end, bytes);
            }
        }
    }
}

#[test]
fn the_largest_window_counts_in_64_bits() {
    let shape = Shape {
        ranks: MAX_RANKS,
        p2p_world_size: 8,
        experts: 65_472,
        top_k: MAX_TOP_K,
        hidden: 1 << 20,
        max_tokens_per_rank: 1 << 20,
        combine_mode: 1,
        token_format: 0,
    };
    let window = Window::of(&shape);
    let rows = u128::from(shape.ranks) * (1 << 20) * u128::from(shape.dispatch_row_bytes());
    let staged = u128::from(shape.max_rows()) * u128::from(shape.combine_row_bytes());
    assert!(u128::from(window.bytes) > rows + staged);
}
