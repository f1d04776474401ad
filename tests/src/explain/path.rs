//! A row's way, in words: from a token's route to its places at the experts, and back.

use ferry::CombineMode;
use ferry::layout::Kernel;
use ferry_protocol::ByteRange;
use ferry_protocol::tactics::{Numbering, Phase, Split, Wire};

use super::case::Case;
use super::roles;

/// A step of the way: a word for it, and what happens.
pub type Step = (&'static str, String);

/// The way of a row of this rank through a launch that dispatches, in `phase`.
pub fn of_dispatch(case: &Case, phase: Phase) -> Vec<Step> {
    let mut steps = vec![route(case, phase), item(case, phase)];
    steps.extend([written(case, phase), published(case, phase)]);
    match phase {
        Phase::Fused => steps.extend([arrived(case, phase), placed(case, phase)]),
        _ => steps.push((
            "later",
            format!(
                "{} receives, with all of its warps",
                Kernel::DispatchWait.name()
            ),
        )),
    }
    steps
}

fn route(case: &Case, phase: Phase) -> Step {
    let (shape, tokens) = (&case.common().shape, case.common().tokens);
    let assignments = tokens * shape.top_k;
    let text = match case.dispatch(phase).numbering {
        Numbering::InBlock => format!(
            "every block keeps the expert ids of all {assignments} assignments in shared memory and counts \
             them there; a sender looks up its token's experts and their ranks within the experts"
        ),
        Numbering::Tiles => format!(
            "a sender reads its token's expert ids; the notifiers number the {assignments} assignments, a \
             tile each, and scan the tiles"
        ),
    };
    ("route", text)
}

fn item(case: &Case, phase: Phase) -> Step {
    let (common, parts) = (case.common(), case.dispatch(phase).parts);
    let bytes = ByteRange::part(common.row.payload_bytes, 0, parts).end;
    let item = match parts {
        1 => format!("an item is a row: {bytes} bytes of payload"),
        _ => format!("an item is one of {parts} parts of a row: {bytes} bytes of payload"),
    };
    let items = common.tokens * parts;
    (
        "item",
        format!("{item}; {}", queued(items, senders(case, phase))),
    )
}

/// Warps that the items to be sent are shared among.
fn senders(case: &Case, phase: Phase) -> u32 {
    roles::of_dispatch(case, phase).senders
}

/// Way in which so many items come to so many warps.
fn queued(items: u32, warps: u32) -> &'static str {
    if items <= warps {
        "no sender has more than one"
    } else {
        "senders begin with one each and take the others from the work queue"
    }
}

fn wire(case: &Case, phase: Phase) -> Wire {
    case.dispatch(phase).wire(senders(case, phase))
}

fn written(case: &Case, phase: Phase) -> Step {
    let format = case.common().shape.format();
    let how = match case.common().row.scale_words {
        0 => "copied".into(),
        _ => format!("encoded as {} in registers", format.name()),
    };
    let to = match wire(case, phase) {
        Wire::Inline => {
            "stored to inline-flag row [source, token] of each rank that has one of the token's experts"
        }
        Wire::Flagged | Wire::FlaggedByBlock => {
            "stored to row [source, token] of each rank that has one of the token's experts"
        }
        Wire::Remote => {
            "stored to row [source, token] of each rank of this node that has one of the token's experts, \
             and once to the staging area for all other nodes"
        }
    };
    let header = match wire(case, phase) {
        Wire::Inline => "a header for each part",
        _ => "the header",
    };
    let when = match case.dispatch(phase).numbering {
        Numbering::InBlock => "follows",
        Numbering::Tiles => "follows, once the tiles are scanned",
    };
    ("written", format!("{how} and {to}; {header} {when}"))
}

fn published(case: &Case, phase: Phase) -> Step {
    let text = match wire(case, phase) {
        Wire::Inline => "not at all: every word is its own flag, so that nobody fences",
        Wire::FlaggedByBlock => "the last sender of a block fences once and sets the flags of all",
        Wire::Flagged => "its sender fences and sets a flag at each of these ranks",
        Wire::Remote => {
            "its sender fences, sets a flag at each of the node's ranks, and puts the staged row to each \
             other one, with the flag behind it"
        }
    };
    ("published", text.into())
}

fn arrived(case: &Case, phase: Phase) -> Step {
    let text = match wire(case, phase) {
        Wire::Inline => {
            "presence bits say that it comes; its receiver polls its words until none is the sentinel"
        }
        _ => "presence bits say that it comes; its receiver waits for the flag",
    };
    ("arrived", text.into())
}

fn placed(case: &Case, phase: Phase) -> Step {
    let who = match case.dispatch(phase).split {
        Split::Specialised => "a warp that does not send",
        Split::SpecialisedBySm => "a warp of a multiprocessor that does not send",
        _ => "the receiver",
    };
    let what = match case.common().row.scale_words {
        0 => "payload",
        _ => "payload and scales",
    };
    let text = format!(
        "{who} adds source bases and the header's ranks within the experts, and copies {what} to a row for \
         each expert here"
    );
    match wire(case, phase) {
        Wire::Inline => ("placed", format!("{text}; every word is re-armed")),
        _ => ("placed", text),
    }
}

/// The way back.
pub fn of_combine(case: &Case) -> Vec<Step> {
    vec![
        back_item(case),
        summed(case),
        back_written(case),
        back_published(case),
        reduced(case),
    ]
}

fn back_item(case: &Case) -> Step {
    let (tactics, extent) = (case.combine(), case.extent());
    let item = match extent.parts {
        1 => "an item is a token of a source".into(),
        parts => format!("an item is one of {parts} parts of a token of a source"),
    };
    let [sender, _] = roles::of_combine(case);
    let queued = match tactics.batch {
        1 => queued(extent.items(&case.common().shape), sender.warps).into(),
        batch => format!("from the work queue, {batch} in a batch"),
    };
    ("item", format!("{item}; {queued}"))
}

fn summed(case: &Case) -> Step {
    let text = match case.common().shape.mode() {
        CombineMode::Reduced => {
            "the experts' rank finds the token's rows in the row map, weighs them, and sums them in the \
             order of top-k"
        }
        CombineMode::Exact => {
            "the experts' rank finds the token's rows in the row map and sends each as it is"
        }
    };
    ("summed", text.into())
}

fn back_written(case: &Case) -> Step {
    let slot = match case.common().shape.mode() {
        CombineMode::Reduced => "[token, rank's slot]",
        CombineMode::Exact => "[token, k]",
    };
    let text = match case.combine().wire {
        Wire::Inline => format!("stored to inline-flag row {slot} of the source"),
        Wire::Flagged | Wire::FlaggedByBlock => format!("stored to row {slot} of the source"),
        Wire::Remote => {
            format!(
                "stored to row {slot} of a source on this node, or to the staging area for another"
            )
        }
    };
    ("written", text)
}

fn back_published(case: &Case) -> Step {
    let text = match (case.combine().wire, case.combine().batch) {
        (Wire::Inline, _) => "not at all: every word is its own flag, so that nobody fences",
        (Wire::FlaggedByBlock, _) => {
            "the last sender of a block fences once and sets the flags of all"
        }
        (Wire::Flagged, 1) => "its sender fences and sets its flag",
        (Wire::Flagged, _) => "its sender fences once a batch and sets the flags",
        (Wire::Remote, _) => {
            "its sender fences and sets its flag, or puts the staged row, with the flag behind it"
        }
    };
    ("published", text.into())
}

fn reduced(case: &Case) -> Step {
    let tactics = case.combine();
    let of = match tactics.reduce_parts {
        1 => "a token".into(),
        parts => format!("one of {parts} parts of a token"),
    };
    let arrives = match (tactics.wire, tactics.polls_all) {
        (Wire::Inline, true) => "polls all words of its rows until none is the sentinel",
        (Wire::Inline, false) => {
            "polls a vector that is missing until none of its rows' words is the sentinel"
        }
        _ => "waits for the flags of its rows",
    };
    let sums = match case.common().shape.mode() {
        CombineMode::Reduced => "sums them in the order of ranks",
        CombineMode::Exact => "weighs and sums them in top-k order, or keeps them apart",
    };
    let armed = match tactics.wire {
        Wire::Inline => "; every word is re-armed",
        _ => "",
    };
    let text = format!("at the source, a reducer of {of} {arrives}, and {sums}{armed}");
    ("reduced", text)
}
