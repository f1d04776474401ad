//! Windows and workspaces of 8, 16 and 64 ranks for a model's real sizes, byte by byte: regions
//! follow each other without overlap and are as large as `Window`'s table says.

use ferry_layout::{Counter, MAX_BLOCKS, Rank, Shape, StagedEpoch, TokenFormat, Window, Workspace};

const EXPERTS: u64 = 256;
const TOP_K: u64 = 8;
const HIDDEN: u64 = 7168;
const TOKENS: u64 = 4096;
/// Alignment of regions: a cache line.
const LINE: u64 = 128;

/// A region: its first byte, and the place of its last item.
struct Region {
    name: &'static str,
    start: u64,
    last: u64,
    items: u64,
    /// Bytes from an item to the next.
    each: u64,
}

impl Region {
    /// First byte that the next region may take.
    const fn end(&self) -> u64 {
        (self.start + self.items * self.each).next_multiple_of(LINE)
    }
}

fn shape(ranks: u64, p2p_world_size: u64, combine_mode: u32, format: TokenFormat) -> Shape {
    Shape {
        ranks: ranks as u32,
        p2p_world_size: p2p_world_size as u32,
        experts: EXPERTS as u32,
        top_k: TOP_K as u32,
        hidden: HIDDEN as u32,
        max_tokens_per_rank: TOKENS as u32,
        combine_mode,
        token_format: format.number(),
    }
}

/// Every shape of these sizes, on one node and on nodes of eight.
fn shapes() -> impl Iterator<Item = Shape> {
    let groups = [(8, 8), (16, 16), (16, 8), (64, 64), (64, 8)];
    groups.into_iter().flat_map(|(ranks, node)| {
        [0, 1].into_iter().flat_map(move |mode| {
            TokenFormat::ALL.map(move |format| shape(ranks, node, mode, format))
        })
    })
}

/// Bytes of a dispatch row: elements, scales, the row's own scale, 8 bytes for each expert.
fn dispatch_row(format: TokenFormat) -> u64 {
    let bytes = match format {
        TokenFormat::Bf16 => 2 * HIDDEN,
        TokenFormat::BlockwiseFp8 => HIDDEN + HIDDEN / 128 * 4,
        TokenFormat::Mxfp8(_) => HIDDEN + HIDDEN / 32,
        TokenFormat::Mxfp4(_) => HIDDEN / 2 + HIDDEN / 32,
        TokenFormat::Nvfp4(_) => HIDDEN / 2 + HIDDEN / 16,
        TokenFormat::Nvfp4RowScaled(_) => HIDDEN / 2 + HIDDEN / 16 + 16,
    };
    (bytes + 8 * TOP_K).next_multiple_of(LINE)
}

fn signals(shape: &Shape, window: &Window) -> Vec<Region> {
    let ranks = u64::from(shape.ranks);
    let last = Rank(shape.ranks - 1);
    let (first, token) = (Rank(0), TOKENS as u32 - 1);
    let slots = TOP_K;
    let region = |name, start, last, items| Region {
        name,
        start,
        last,
        items,
        each: 8,
    };
    let counts = ranks * (EXPERTS / ranks + 1);
    vec![
        region(
            "counts",
            window.count(first, 0).bytes(),
            window.token_count(last).bytes(),
            counts,
        ),
        region(
            "presence",
            window.presence(first, 0).bytes(),
            window.presence(last, TOKENS as u32 / 32 - 1).bytes(),
            ranks * TOKENS / 32,
        ),
        region(
            "begins",
            window.expert_base(0).bytes(),
            window
                .expert_block_base((EXPERTS / ranks) as u32 - 1)
                .bytes(),
            2 * EXPERTS / ranks,
        ),
        region(
            "starts",
            window.source_base(first, 0).bytes(),
            window
                .source_base(last, (EXPERTS / ranks) as u32 - 1)
                .bytes(),
            EXPERTS,
        ),
        region(
            "dispatch flags",
            window.dispatch_flag(first, 0).bytes(),
            window.dispatch_flag(last, token).bytes(),
            ranks * TOKENS,
        ),
        region(
            "consumed",
            window.credit(first).bytes(),
            window.credit(last).bytes(),
            ranks,
        ),
        region(
            "gave up",
            window.culprit(first).bytes(),
            window.culprit(last).bytes(),
            ranks,
        ),
        region(
            "combine flags",
            window.combine_flag(0, 0).bytes(),
            window.combine_flag(token, slots as u32 - 1).bytes(),
            TOKENS * slots,
        ),
    ]
}

fn rows(shape: &Shape, window: &Window) -> Vec<Region> {
    let ranks = u64::from(shape.ranks);
    let (last, token) = (Rank(shape.ranks - 1), TOKENS as u32 - 1);
    let (dispatch, combine) = (dispatch_row(shape.format()), 2 * HIDDEN);
    let region = |name, (start, last): (u64, u64), items, each| Region {
        name,
        start,
        last,
        items,
        each,
    };
    let between = |first: ferry_layout::ByteOffset, last: ferry_layout::ByteOffset| {
        (first.bytes(), last.bytes())
    };
    let dispatch_rows = between(
        window.dispatch_row(Rank(0), 0),
        window.dispatch_row(last, token),
    );
    // At least as many ranks as experts of a token: a slot for each expert in both modes.
    let combine_rows = between(
        window.combine_row(0, 0),
        window.combine_row(token, TOP_K as u32 - 1),
    );
    let mut rows = vec![
        region("dispatch rows", dispatch_rows, ranks * TOKENS, dispatch),
        region("combine rows", combine_rows, TOKENS * TOP_K, combine),
    ];
    if !shape.spans_nodes() {
        rows.extend(inline_rows(shape, window));
        return rows;
    }
    let staged = between(window.dispatch_staging(0), window.dispatch_staging(token));
    rows.push(region("dispatch staging", staged, TOKENS, dispatch));
    rows.push(if shape.combine_mode == 0 {
        let ends = between(
            window.reduced_staging(Rank(0), 0),
            window.reduced_staging(last, token),
        );
        region("reduced staging", ends, ranks * TOKENS, combine)
    } else {
        let padding = EXPERTS / ranks * (u64::from(shape.row_alignment()) - 1);
        let most = ranks * TOKENS * TOP_K + padding;
        let ends = between(
            window.exact_staging(0),
            window.exact_staging(most as u32 - 1),
        );
        region("exact staging", ends, most, combine)
    });
    // The words of a rank have an empty one before the counts and before presence, and end at an even one.
    let words = |count: u64| (count + 1).next_multiple_of(2);
    let notice = 8 * (words(EXPERTS / ranks + 1) + words(TOKENS / 32));
    let (first, end) = (
        window.staged_count(last, 0).bytes() - 8,
        window.staged_count(Rank(0), 0).bytes() - 8,
    );
    rows.push(region("staged notices", (first, end), ranks, notice));
    let epoch = window.staged_epoch(StagedEpoch::Dispatch).bytes();
    rows.push(region("staged epochs", (epoch, epoch), 1, LINE));
    rows
}

/// Rows of one node that are cut into parts: those of 1024 tokens of all ranks together.
fn inline_rows(shape: &Shape, window: &Window) -> Vec<Region> {
    let ranks = u64::from(shape.ranks);
    let tokens = 1024 / ranks;
    let (last, token) = (Rank(shape.ranks - 1), tokens as u32 - 1);
    // Payload and scales; a header for each of 16 parts.
    let dispatch = match shape.format() {
        TokenFormat::Bf16 => 2 * HIDDEN + 16 * 8 * TOP_K,
        TokenFormat::BlockwiseFp8 => HIDDEN + HIDDEN / 128 * 4 + 16 * 8 * TOP_K,
        TokenFormat::Mxfp8(_) => HIDDEN + HIDDEN / 32 + 16 * 8 * TOP_K,
        _ => 0,
    };
    let mut rows = Vec::new();
    if dispatch > 0 {
        rows.push(Region {
            name: "bare dispatch rows",
            start: window.inline_dispatch_row(Rank(0), 0).bytes(),
            last: window.inline_dispatch_row(last, token).bytes(),
            items: 1024,
            each: dispatch.next_multiple_of(LINE),
        });
    }
    if shape.combine_mode == 0 {
        // All inline rows, cut or not: there is about a warp for each.
        let tokens = 2048 / ranks;
        let last = window.inline_combine_row(tokens as u32 - 1, TOP_K as u32 - 1);
        rows.push(Region {
            name: "bare combine rows",
            start: window.inline_combine_row(0, 0).bytes(),
            last: last.bytes(),
            items: tokens * TOP_K,
            each: 2 * HIDDEN,
        });
    }
    rows
}

#[test]
fn a_window_is_its_regions_one_after_another() {
    for shape in shapes() {
        let window = Window::of(&shape);
        let signals = signals(&shape, &window);
        let signal_bytes = signals[signals.len() - 1].end();
        assert_eq!(window.signal_bytes, signal_bytes, "{shape:?}");
        let mut end = 0;
        for region in signals.into_iter().chain(rows(&shape, &window)) {
            let name = region.name;
            assert_eq!(region.start, end, "{name} of {shape:?}");
            let last = region.start + (region.items - 1) * region.each;
            assert_eq!(region.last, last, "{name} of {shape:?}");
            end = region.end();
        }
        assert_eq!(window.bytes, end, "{shape:?}");
    }
}

#[test]
fn a_workspace_is_its_tables_one_after_another() {
    for shape in shapes() {
        let workspace = Workspace::of(&shape);
        let assignments = TOKENS * TOP_K;
        let counters = Counter::COUNT * Counter::STRIDE_BYTES / 4;
        let tables = [
            ("counters", 0, counters),
            (
                "last launches",
                Workspace::last_launch(0),
                2 * u64::from(MAX_BLOCKS),
            ),
            ("ordinals", workspace.ranks_in_expert, assignments),
            (
                "chunk counts",
                workspace.tile_counts,
                assignments / 256 * EXPERTS,
            ),
            ("routes", workspace.routes, assignments),
            (
                "row map",
                workspace.row_map,
                u64::from(shape.ranks) * assignments,
            ),
        ];
        let mut end = 0;
        for (name, start, words) in tables {
            assert_eq!(start, end, "{name} of {shape:?}");
            end = (start + 4 * words).next_multiple_of(LINE);
        }
        assert_eq!(workspace.bytes, end, "{shape:?}");
    }
}
