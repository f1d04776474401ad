//! Why a launch does what it does: which number was compared with which constant.
//!
//! Nothing is decided here. Each [`Question`] has the answer of the tactics beside the facts, and a test
//! compares the two.

use ferry::CombineMode;
use ferry::layout::{Kernel, Shape};
use ferry_layout::{
    BlockHistogram, HISTOGRAM_BYTES, MAX_PARTS, PART_ITEMS, SMALL_BATCH_ASSIGNMENTS,
    SMALL_BLOCK_TOKENS,
};
use ferry_protocol::tactics::dispatch::notifications;
use ferry_protocol::tactics::{Numbering, Phase, Split, Wire, tuning};
use ferry_protocol::{ByteRange, LANES};

use super::case::{Case, dispatch_kernel};
use super::facts::{Fact, Question, count};
use super::roles;

/// Why blocks have so many threads.
pub fn of_geometry(case: &Case) -> Question {
    let most = case.common().shape.max_tokens_per_rank;
    let kernel = Kernel::Dispatch;
    let limit = count(SMALL_BLOCK_TOKENS, "SMALL_BLOCK_TOKENS");
    Question::new(
        "small blocks",
        kernel.threads(most) < kernel.threads_per_block(),
        [Fact::at_most(count(most, "tokens planned"), limit)],
    )
}

/// Why rows are cut, or are not.
pub fn of_parts(case: &Case) -> Question {
    let (shape, tokens) = (&case.common().shape, case.common().tokens);
    let rows = u64::from(tokens) * u64::from(shape.ranks);
    let halves = count(2 * rows, "items if all sources' rows are halved");
    let most = format!("parts at most (a tile each, up to {MAX_PARTS} MAX_PARTS)");
    let most = count(shape.max_parts(), &most);
    Question::new(
        "rows in parts",
        case.extent().parts > 1,
        [
            on_one_node(shape),
            Fact::more(count(rows, "rows"), count(0u32, "rows")),
            Fact::at_most(halves, count(PART_ITEMS, "PART_ITEMS")),
            Fact::more(most, count(1u32, "part")),
        ],
    )
}

/// Where the number of parts comes from, where rows are cut: of parts that dispatch moves, or that combine
/// reduces.
pub fn of_parts_number(parts: u32, rows: u32) -> Option<String> {
    (parts > 1).then(|| {
        format!("{parts}: {PART_ITEMS} PART_ITEMS over {rows} rows, rounded up to a power of two; or what \
             fits")
    })
}

/// Why assignments are numbered as they are.
pub fn of_numbering(case: &Case) -> Question {
    let (shape, tokens) = (&case.common().shape, case.common().tokens);
    let assignments = tokens * shape.top_k;
    let histogram = u64::from(shape.experts) * u64::from(BlockHistogram::of(assignments).bytes(1));
    let limit = count(SMALL_BATCH_ASSIGNMENTS, "SMALL_BATCH_ASSIGNMENTS");
    let most_bytes = count(HISTOGRAM_BYTES, "HISTOGRAM_BYTES");
    Question::new(
        "numbered in the block",
        case.dispatch(Phase::Fused).numbering == Numbering::InBlock,
        [
            Fact::at_most(count(assignments, "assignments"), limit),
            Fact::at_most(count(histogram, "bytes of histogram"), most_bytes),
        ],
    )
}

/// Why the rows of a launch that dispatches travel as they do.
pub fn of_dispatch_wire(case: &Case, phase: Phase) -> Vec<Question> {
    let (common, tactics) = (case.common(), case.dispatch(phase));
    let shape = &common.shape;
    let senders = roles::of_dispatch(case, phase).senders;
    let wire = tactics.wire(senders);
    let name = shape.format().name();
    let has_free_word = || {
        Fact::new(
            shape.format().never_encodes_sentinel(),
            format!("no word of {name} is the sentinel"),
            format!("every word of {name} means something, so none can be the sentinel"),
        )
    };
    let parts = count(tactics.parts, "parts a row");
    let cuts_all = Fact::new(
        common.window.cuts_all(),
        "the plan cuts the rows of every batch",
        "the plan has batches whose rows stay whole",
    );
    let inline = Question::new(
        "inline flags",
        wire == Wire::Inline,
        [has_free_word(), Fact::more(parts, count(1u32, "part"))],
    )
    .or([has_free_word(), cuts_all]);
    let remote = Question::new("remote", wire == Wire::Remote, [over_nodes(shape)]);
    let items = count(common.tokens * tactics.parts, "items");
    let is_specialised = matches!(tactics.split, Split::Specialised | Split::SpecialisedBySm);
    let by_block = Question::new(
        "flagged by block",
        wire == Wire::FlaggedByBlock,
        [
            Fact::at_most(items, count(senders, "senders")),
            Fact::new(
                !is_specialised,
                "senders receive as well",
                "senders do nothing else",
            ),
        ],
    );
    until_yes([inline, remote, by_block])
}

/// Why the warps of a launch that dispatches share its work as they do.
pub fn of_dispatch_split(case: &Case, phase: Phase) -> Vec<Question> {
    let (common, tactics) = (case.common(), case.dispatch(phase));
    let (shape, grid) = (&common.shape, case.grid(dispatch_kernel(phase)));
    let warps = grid.warps();
    let items = common.tokens * tactics.parts;
    let receives = || {
        Fact::new(
            phase == Phase::Fused,
            "the launch receives as well",
            "the launch only sends",
        )
    };
    let others = count(others(case, phase), "warps besides notifiers");
    let can_share = || Fact::more(others, count(1u32, "warp"));
    let rows = count(items, "whole rows");
    let many_rows = count(tuning::SPECIALISE_FROM_ROWS, "SPECIALISE_FROM_ROWS");
    let is_whole = Fact::new(tactics.parts == 1, "rows stay whole", "rows are cut");
    let split = tactics.split;
    let specialised = Question::new(
        "specialised",
        matches!(split, Split::Specialised | Split::SpecialisedBySm),
        [
            receives(),
            can_share(),
            Fact::more(count(items, "items"), others),
        ],
    )
    .or([
        receives(),
        can_share(),
        is_whole,
        Fact::at_least(rows, many_rows),
    ]);
    if specialised.answer {
        let saturating = tuning::saturating_senders(shape.format());
        let spared = tuning::spared_senders(shape.format(), warps);
        let enough = Fact::at_most(
            count(saturating, "senders fill the wire (saturating_senders)"),
            count(spared, "that can be spared (spared_senders)"),
        );
        let by_sm = Question::new(
            "specialised by SM",
            split == Split::SpecialisedBySm,
            [enough],
        );
        return vec![specialised, by_sm];
    }
    let senders = roles::of_dispatch(case, phase).senders;
    let inline_bytes = match tactics.wire(senders) {
        Wire::Inline => ByteRange::part(common.row.payload_bytes, 0, tactics.parts).end,
        _ => 0,
    };
    let large = count(tuning::SENDER_HALF_FROM_BYTES, "SENDER_HALF_FROM_BYTES");
    let part = Fact::at_least(count(inline_bytes, "bytes of an inline part"), large);
    let half = [receives(), part];
    let half = Question::new("sender half", split == Split::SenderHalf, half);
    let only_sends = Fact::new(phase == Phase::Send, "nobody receives", "all receive");
    let all = [
        only_sends,
        Fact::more(count(items, "items"), count(warps, "warps")),
    ];
    let all = Question::new("all send", split == Split::AllSend, all);
    [vec![specialised], until_yes([half, all])].concat()
}

/// Warps that do not notify.
fn others(case: &Case, phase: Phase) -> u32 {
    let warps = case.grid(dispatch_kernel(phase)).warps();
    // A launch of a single warp notifies first and sends then.
    (warps - case.dispatch(phase).notifiers).max(1)
}

/// Where the numbers of notifiers and senders come from.
pub fn of_dispatch_numbers(case: &Case, phase: Phase) -> Vec<String> {
    let (common, tactics) = (case.common(), case.dispatch(phase));
    let (shape, warps) = (&common.shape, case.grid(dispatch_kernel(phase)).warps());
    let told = notifications(shape, common.tokens, tactics.numbering);
    let most = (warps / tuning::WARPS_PER_NOTIFIER).max(1);
    let notifiers = format!(
        "{} notifiers: {told} have something to tell; at most {most}, one in {} (WARPS_PER_NOTIFIER)",
        tactics.notifiers,
        tuning::WARPS_PER_NOTIFIER
    );
    let format = shape.format();
    let senders = match tactics.split {
        Split::Specialised | Split::SpecialisedBySm => format!(
            "{} senders: the least of {} that fill the wire, {} that can be spared, {} that {} items keep \
             busy, {} besides notifiers less a receiver",
            tactics.senders,
            tuning::saturating_senders(format),
            tuning::spared_senders(format, warps),
            tuning::useful_senders(format, common.tokens * tactics.parts),
            common.tokens * tactics.parts,
            others(case, phase) - 1,
        ),
        Split::AllSend => format!("{warps} senders: all warps"),
        _ => format!("{} senders: all but the notifiers", tactics.senders),
    };
    vec![notifiers, senders]
}

/// Why combine's warps share its work as they do.
pub fn of_combine_split(case: &Case) -> Vec<Question> {
    let (tactics, grid) = (case.combine(), case.grid(Kernel::Combine));
    let items = count(case.extent().items(&case.common().shape), "items at most");
    let warps = count(grid.warps(), "warps");
    let in_block = count(grid.in_block, "warps a block");
    let is_specialised = tactics.split == Split::Specialised;
    let specialised = Question::new(
        "specialised",
        is_specialised,
        [
            Fact::more(items, warps),
            Fact::more(in_block, count(1u32, "warp")),
        ],
    );
    let more = tuning::MORE_REDUCERS_FROM_WARPS;
    // With too few warps a block, both fractions are the same number.
    let reducers = Question::new(
        "3 of 8 warps reduce, not 2",
        8 * tactics.reducers_in_block > 2 * grid.in_block,
        [Fact::more(warps, count(more, "MORE_REDUCERS_FROM_WARPS"))],
    );
    match is_specialised {
        true => vec![specialised, reducers],
        false => vec![specialised],
    }
}

/// Why combine's rows travel as they do.
pub fn of_combine_wire(case: &Case) -> Vec<Question> {
    let (common, tactics) = (case.common(), case.combine());
    let shape = &common.shape;
    let most = match shape.mode() {
        CombineMode::Reduced => {
            "tokens with inline-flag rows (PART_ITEMS over ranks, up to the plan's)"
        }
        CombineMode::Exact => "tokens with inline-flag rows (exact mode)",
    };
    let most = count(shape.max_inline_tokens(), most);
    let fits = Fact::at_most(count(common.tokens, "tokens of a source"), most);
    let wire = tactics.wire;
    let inline = [on_one_node(shape), fits];
    let inline = Question::new("inline flags", wire == Wire::Inline, inline);
    let remote = Question::new("remote", wire == Wire::Remote, [over_nodes(shape)]);
    let items = count(case.extent().items(shape), "items at most");
    let one_each = Fact::at_most(items, count(senders(case), "senders"));
    let by_block = Question::new(
        "flagged by block",
        wire == Wire::FlaggedByBlock,
        [one_each, is_reduced(shape)],
    );
    until_yes([inline, remote, by_block])
}

/// Why combine sends in batches, or does not.
pub fn of_combine_batch(case: &Case) -> Question {
    let (common, tactics) = (case.common(), case.combine());
    let (shape, extent) = (&common.shape, case.extent());
    let from = tuning::BATCH_FROM_ITEMS_PER_WARP;
    let each = format!("items over {from} (BATCH_FROM_ITEMS_PER_WARP)");
    let senders = count(senders(case), "senders");
    Question::new(
        "in batches",
        tactics.batch > 1,
        [
            Fact::new(
                tactics.wire == Wire::Flagged,
                "rows are flagged one by one",
                "rows are not flagged one by one",
            ),
            is_reduced(shape),
            Fact::new(extent.parts == 1, "rows stay whole", "rows are cut"),
            Fact::at_least(count(extent.items(shape) / from, &each), senders),
            Fact::at_most(
                count(2 * shape.top_k, "lanes for two tokens"),
                count(LANES, "lanes"),
            ),
        ],
    )
}

/// Why reducers poll as they do, where rows have inline flags.
pub fn of_polling(case: &Case) -> Question {
    let tactics = case.combine();
    let limit = count(tuning::POLL_ALL_UP_TO_WARPS, "POLL_ALL_UP_TO_WARPS");
    let sums = case.common().tokens * tactics.reduce_parts;
    Question::new(
        "all words polled again",
        tactics.polls_all,
        [Fact::at_most(count(sums, "parts to reduce"), limit)],
    )
}

/// Warps that send in combine.
fn senders(case: &Case) -> u32 {
    roles::of_combine(case)[0].warps
}

fn on_one_node(shape: &Shape) -> Fact {
    Fact::new(
        !shape.spans_nodes(),
        "all ranks are on one node",
        "rows for other nodes stay whole and have flags",
    )
}

fn over_nodes(shape: &Shape) -> Fact {
    Fact::new(
        shape.spans_nodes(),
        "some ranks are on other nodes",
        "all ranks are on one node",
    )
}

fn is_reduced(shape: &Shape) -> Fact {
    Fact::new(
        shape.mode() == CombineMode::Reduced,
        "a rank sends one row a token",
        "each expert's row goes back by itself",
    )
}

/// What is asked: the next question only after a no.
fn until_yes<const N: usize>(questions: [Question; N]) -> Vec<Question> {
    let mut asked = Vec::new();
    for question in questions {
        let answer = question.answer;
        asked.push(question);
        if answer {
            break;
        }
    }
    asked
}

/// All questions of a case.
pub fn all(case: &Case) -> Vec<Question> {
    let mut all = vec![of_geometry(case), of_parts(case), of_numbering(case)];
    for phase in [Phase::Fused, Phase::Send] {
        all.extend(of_dispatch_wire(case, phase));
        all.extend(of_dispatch_split(case, phase));
    }
    all.extend(of_combine_split(case));
    all.extend(of_combine_wire(case));
    all.extend([of_combine_batch(case), of_polling(case)]);
    all
}
