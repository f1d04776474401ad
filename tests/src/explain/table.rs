//! The tactics of a case in one line, for a table that is compared with a committed one.

use ferry_protocol::tactics::Phase;

use super::case::{Case, dispatch_kernel};
use super::roles::of_dispatch;
use super::words;

/// The names of the columns.
pub const HEAD: &str = "\
tokens plan format ranks/nodes mode    SMs warps | parts numbering    | \
dispatch: wire, split, notify, send            | \
dispatch_async: wire, split, notify, send      | \
combine: wire, split, reducers a block, items a warp, batch, reduce parts, polls";

/// The line of a case. Columns have a width, so that a difference is seen.
pub fn line(case: &Case) -> String {
    let common = case.common();
    let shape = &common.shape;
    let fused = case.dispatch(Phase::Fused);
    format!(
        "{:>6} {:>4} {:<6} {:>5}/{:<5} {:<7} {:>3} {:>5} | {:>5} {:<12} | {} | {} | {}",
        common.tokens,
        shape.max_tokens_per_rank,
        shape.format().name(),
        shape.ranks,
        shape.ranks / shape.p2p_world_size,
        words::mode(shape.mode()),
        case.blocks(),
        case.grid(dispatch_kernel(Phase::Fused)).in_block,
        fused.parts,
        words::numbering(fused.numbering),
        dispatch(case, Phase::Fused),
        dispatch(case, Phase::Send),
        combine(case),
    )
}

fn dispatch(case: &Case, phase: Phase) -> String {
    let tactics = case.dispatch(phase);
    let senders = of_dispatch(case, phase).senders;
    format!(
        "{:<16} {:<17} {:>6} {:>4}",
        words::wire(tactics.wire(senders)),
        words::split(tactics.split),
        tactics.notifiers,
        senders,
    )
}

fn combine(case: &Case) -> String {
    let tactics = case.combine();
    format!(
        "{:<16} {:<11} {:>2} {:<4} {:>2} {:>2} {}",
        words::wire(tactics.wire),
        words::split(tactics.split),
        tactics.reducers_in_block,
        if tactics.one_item_each { "one" } else { "many" },
        tactics.batch,
        tactics.reduce_parts,
        if tactics.polls_all { "all" } else { "one" },
    )
}
