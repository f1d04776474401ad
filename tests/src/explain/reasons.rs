//! Reasons why a launch does what it does: which number was compared with which constant.
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
use super::facts::{Fact, Question, fact};
use super::roles;

/// Returns why blocks have so many threads.
pub fn of_geometry(case: &Case) -> Question {
    let most = case.common().shape.max_tokens_per_rank;
    let kernel = Kernel::Dispatch;
    Question::new(
        "small blocks",
        kernel.threads(most) < kernel.threads_per_block(),
        [fact!(most, "tokens planned"; at most SMALL_BLOCK_TOKENS, "SMALL_BLOCK_TOKENS")],
    )
}

/// Returns why rows are cut, or are not.
pub fn of_parts(case: &Case) -> Question {
    let (shape, tokens) = (&case.common().shape, case.common().tokens);
    let rows = u64::from(tokens) * u64::from(shape.ranks);
    let most = format!("parts at most (a tile each, up to {MAX_PARTS} MAX_PARTS)");
    Question::new(
        "rows in parts",
        case.extent().parts > 1,
        [
            on_one_node(shape),
            fact!(rows, "rows"; more than 0_u32, "rows"),
            fact!(2 * rows, "items if all sources' rows are halved"; at most PART_ITEMS, "PART_ITEMS"),
            fact!(shape.max_parts(), &most; more than 1_u32, "part"),
        ],
    )
}

/// Tells where the number of parts comes from, if rows are cut: of parts that dispatch moves, or that combine
/// reduces.
pub fn of_parts_number(parts: u32, rows: u32) -> Option<String> {
    (parts > 1).then(|| {
        format!("{parts}: {PART_ITEMS} PART_ITEMS over {rows} rows, rounded up to a power of two; or what \
             fits")
    })
}

/// Returns why assignments are numbered as they are.
pub fn of_numbering(case: &Case) -> Question {
    let (shape, tokens) = (&case.common().shape, case.common().tokens);
    let assignments = tokens * shape.top_k;
    let histogram = u64::from(shape.experts) * u64::from(BlockHistogram::of(assignments).bytes(1));
    Question::new(
        "numbered in the block",
        case.dispatch(Phase::Fused).numbering == Numbering::InBlock,
        [
            fact!(assignments, "assignments"; at most SMALL_BATCH_ASSIGNMENTS, "SMALL_BATCH_ASSIGNMENTS"),
            fact!(histogram, "bytes of histogram"; at most HISTOGRAM_BYTES, "HISTOGRAM_BYTES"),
        ],
    )
}

/// Returns why the rows of a launch that dispatches travel as they do.
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
    let cuts_all = Fact::new(
        common.window.cuts_all(),
        "the plan cuts the rows of every batch",
        "the plan has batches whose rows stay whole",
    );
    let inline = Question::new(
        "inline flags",
        wire == Wire::Inline,
        [
            has_free_word(),
            fact!(tactics.parts, "parts a row"; more than 1_u32, "part"),
        ],
    )
    .or([has_free_word(), cuts_all]);
    let remote = Question::new("remote", wire == Wire::Remote, [over_nodes(shape)]);
    let is_specialised = matches!(tactics.split, Split::Specialised | Split::SpecialisedBySm);
    let by_block = Question::new(
        "flagged by block",
        wire == Wire::FlaggedByBlock,
        [
            fact!(common.tokens * tactics.parts, "items"; at most senders, "senders"),
            Fact::new(
                !is_specialised,
                "senders receive as well",
                "senders do nothing else",
            ),
        ],
    );
    until_yes([inline, remote, by_block])
}

/// Returns why the warps of a launch that dispatches share its work as they do.
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
    let can_share =
        || fact!(others(case, phase), "warps besides notifiers"; more than 1_u32, "warp");
    let is_whole = Fact::new(tactics.parts == 1, "rows stay whole", "rows are cut");
    let split = tactics.split;
    let specialised = Question::new(
        "specialised",
        matches!(split, Split::Specialised | Split::SpecialisedBySm),
        [
            receives(),
            can_share(),
            fact!(items, "items"; more than others(case, phase), "warps besides notifiers"),
        ],
    )
    .or([
        receives(),
        can_share(),
        is_whole,
        fact!(items, "whole rows"; at least tuning::SPECIALISE_FROM_ROWS, "SPECIALISE_FROM_ROWS"),
    ]);
    if specialised.answer {
        let saturating = tuning::saturating_senders(shape.format());
        let spared = tuning::spared_senders(shape.format(), warps);
        let enough = fact!(
            saturating, "senders fill the wire (saturating_senders)";
            at most spared, "that can be spared (spared_senders)"
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
    let large = tuning::SENDER_HALF_FROM_BYTES;
    let part = fact!(
        inline_bytes, "bytes of an inline part"; at least large, "SENDER_HALF_FROM_BYTES"
    );
    let half = [receives(), part];
    let half = Question::new("sender half", split == Split::SenderHalf, half);
    let only_sends = Fact::new(phase == Phase::Send, "nobody receives", "all receive");
    let all = [only_sends, fact!(items, "items"; more than warps, "warps")];
    let all = Question::new("all send", split == Split::AllSend, all);
    [vec![specialised], until_yes([half, all])].concat()
}

/// Warps that do not notify.
fn others(case: &Case, phase: Phase) -> u32 {
    let warps = case.grid(dispatch_kernel(phase)).warps();
    // A launch of a single warp notifies first and sends then.
    (warps - case.dispatch(phase).notifiers).max(1)
}

/// Tells where the numbers of notifiers and senders come from.
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

/// Returns why combine's warps share its work as they do.
pub fn of_combine_split(case: &Case) -> Vec<Question> {
    let (tactics, grid) = (case.combine(), case.grid(Kernel::Combine));
    let is_specialised = tactics.split == Split::Specialised;
    let items = case.extent().items(&case.common().shape);
    let specialised = Question::new(
        "specialised",
        is_specialised,
        [
            fact!(items, "items at most"; more than grid.warps(), "warps"),
            fact!(grid.in_block, "warps a block"; more than 1_u32, "warp"),
        ],
    );
    let more = tuning::MORE_REDUCERS_FROM_WARPS;
    // With too few warps a block, both fractions are the same number.
    let reducers = Question::new(
        "3 of 8 warps reduce, not 2",
        8 * tactics.reducers_in_block > 2 * grid.in_block,
        [fact!(grid.warps(), "warps"; more than more, "MORE_REDUCERS_FROM_WARPS")],
    );
    if is_specialised {
        vec![specialised, reducers]
    } else {
        vec![specialised]
    }
}

/// Returns why combine's rows travel as they do.
pub fn of_combine_wire(case: &Case) -> Vec<Question> {
    let (common, tactics) = (case.common(), case.combine());
    let shape = &common.shape;
    let most = match shape.mode() {
        CombineMode::Reduced => {
            "tokens with inline-flag rows (PART_ITEMS over ranks, up to the plan's)"
        }
        CombineMode::Exact => "tokens with inline-flag rows (exact mode)",
    };
    let fits = fact!(common.tokens, "tokens of a source"; at most shape.max_inline_tokens(), most);
    let wire = tactics.wire;
    let inline = [on_one_node(shape), fits];
    let inline = Question::new("inline flags", wire == Wire::Inline, inline);
    let remote = Question::new("remote", wire == Wire::Remote, [over_nodes(shape)]);
    let one_each =
        fact!(case.extent().items(shape), "items at most"; at most senders(case), "senders");
    let by_block = Question::new(
        "flagged by block",
        wire == Wire::FlaggedByBlock,
        [one_each, is_reduced(shape)],
    );
    until_yes([inline, remote, by_block])
}

/// Returns why combine sends in batches, or does not.
pub fn of_combine_batch(case: &Case) -> Question {
    let (common, tactics) = (case.common(), case.combine());
    let (shape, extent) = (&common.shape, case.extent());
    let from = tuning::BATCH_FROM_ITEMS_PER_WARP;
    let each = format!("items over {from} (BATCH_FROM_ITEMS_PER_WARP)");
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
            fact!(extent.items(shape) / from, &each; at least senders(case), "senders"),
            fact!(2 * shape.top_k, "lanes for two tokens"; at most LANES, "lanes"),
        ],
    )
}

/// Returns why reducers poll as they do, where rows have inline flags.
pub fn of_polling(case: &Case) -> Question {
    let tactics = case.combine();
    let sums = case.common().tokens * tactics.reduce_parts;
    Question::new(
        "all words polled again",
        tactics.polls_all,
        [
            fact!(sums, "parts to reduce"; at most tuning::POLL_ALL_UP_TO_WARPS, "POLL_ALL_UP_TO_WARPS"),
        ],
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

/// Questions that are asked: the next question only after a no.
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
