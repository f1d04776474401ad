//! Tables of a section that only some records fill: kernels for all shapes beside those of the shape, and
//! other routings, layouts and modes.

use std::collections::BTreeSet;
use std::fmt::{Result, Write as _};

use super::chart::thousands;
use super::number;
use super::records::{Gpus, Key, Kind, Phase, Results, Round};

/// Numbers of tokens of the first table, and of the second.
const KERNELS_TOKENS: [usize; 4] = [1, 8, 128, 4096];
const KINDS_TOKENS: [usize; 2] = [128, 4096];

/// Kernels of both kinds, with a warm cache and a flushed one, if the record has both.
pub(super) fn write_kernels(text: &mut String, results: &Results, gpus: Gpus) -> Result {
    if results.keys(gpus).all(|key| key.specialised) {
        return Ok(());
    }
    writeln!(
        text,
        "\nKernels for all shapes (the default) and those compiled for the shape, with the L2 cache warm\n\
         and flushed: median / 99th percentile. The last column has the host's medians for FP8 dispatch,\n\
         combine.\n"
    )?;
    writeln!(
        text,
        "| tokens a rank | kernels | FP8 dispatch | flushed | combine after it | flushed | BF16 dispatch \
         | flushed | pair, FP8 | pair, BF16 | host |"
    )?;
    writeln!(text, "|{}", "---|".repeat(11))?;
    for tokens in KERNELS_TOKENS {
        for (name, specialised) in [("general", false), ("specialised", true)] {
            let round = |format: &str, flushed: bool| {
                results.get(&Key {
                    specialised,
                    flushed,
                    ..Key::of(gpus, format, tokens)
                })
            };
            let calls = [
                ("fp8", dispatch as fn(&Round) -> &Phase),
                ("fp8", combine),
                ("bf16", dispatch),
            ];
            let cells = calls.map(|(format, call)| {
                let cell = |flushed| times(round(format, flushed).map(call));
                format!("{} | {}", cell(false), cell(true))
            });
            let host = round("fp8", false).map(|round| {
                let [dispatch, combine] =
                    [&round.dispatch, &round.combine].map(|call| number(call.host_us));
                format!("{dispatch}, {combine}")
            });
            writeln!(
                text,
                "| {} | {name} | {} | {} | {} | {} |",
                thousands(tokens as f64, 0),
                cells.join(" | "),
                pair(round("fp8", false)),
                pair(round("bf16", false)),
                host.unwrap_or("-".into()),
            )?;
        }
    }
    Ok(())
}

/// Other routings, layouts and modes, if the record has any, below the usual rounds.
pub(super) fn write_kinds(text: &mut String, results: &Results, gpus: Gpus) -> Result {
    let warm = results
        .keys(gpus)
        .filter(|key| !key.flushed && key.specialised && key.max_sms.is_none());
    let mut kinds: BTreeSet<(&Kind, &str)> =
        warm.map(|key| (&key.kind, key.format.as_str())).collect();
    let usual = Kind::usual();
    kinds.retain(|(kind, _)| **kind != usual);
    if kinds.is_empty() {
        return Ok(());
    }
    writeln!(
        text,
        "\nOther routings, layouts and modes, specialised kernels, L2 cache warm: median / 99th percentile.\n"
    )?;
    let headings = KINDS_TOKENS.map(|tokens| {
        let tokens = thousands(tokens as f64, 0);
        format!("{tokens} tokens: dispatch | combine | pair | NCCL")
    });
    writeln!(text, "| | {} |", headings.join(" | "))?;
    writeln!(text, "|{}", "---|".repeat(1 + 4 * KINDS_TOKENS.len()))?;
    for (kind, format) in [(&usual, "fp8"), (&usual, "bf16")].into_iter().chain(kinds) {
        let cells = KINDS_TOKENS.map(|tokens| {
            let round = results.get(&Key {
                kind: kind.clone(),
                ..Key::of(gpus, format, tokens)
            });
            let calls =
                [dispatch, combine].map(|call: fn(&Round) -> &Phase| times(round.map(call)));
            let [dispatch, combine] = calls;
            format!("{dispatch} | {combine} | {} | {}", pair(round), nccl(round))
        });
        writeln!(text, "| {} | {} |", title(kind, format), cells.join(" | "))?;
    }
    Ok(())
}

fn dispatch(round: &Round) -> &Phase {
    &round.dispatch
}

fn combine(round: &Round) -> &Phase {
    &round.combine
}

/// Median and 99th percentile of a call.
fn times(call: Option<&Phase>) -> String {
    call.map_or("-".into(), |call| {
        format!("{} / {}", number(call.us), number(call.p99_us))
    })
}

/// The same of a pair.
fn pair(round: Option<&Round>) -> String {
    let Some(us) = round.and_then(|round| round.pair_us) else {
        return "-".into();
    };
    let p99 = round.and_then(|round| round.pair_p99_us);
    let p99 = p99.map_or_else(String::new, |p99| format!(" / {}", number(p99)));
    number(us) + &p99
}

/// NCCL's all-gather and reduce-scatter.
fn nccl(round: Option<&Round>) -> String {
    let both = round.and_then(|round| Some([round.dispatch.nccl_us?, round.combine.nccl_us?]));
    both.map_or("-".into(), |both| both.map(number).join(", "))
}

/// Name of a row: its format, and what differs from the usual.
fn title(kind: &Kind, format: &str) -> String {
    let usual = Kind::usual();
    let late = match kind.late_us {
        0 => String::new(),
        us => format!("the last rank {us} µs late"),
    };
    let mode = format!("{} mode", kind.mode);
    let parts = [
        (kind.routing != usual.routing).then_some(&kind.routing),
        (kind.mode != usual.mode).then_some(&mode),
        (kind.receive != usual.receive).then_some(&kind.receive),
        (kind.late_us > 0).then_some(&late),
    ];
    let parts: Vec<_> = parts.into_iter().flatten().map(String::as_str).collect();
    match parts.is_empty() {
        true => format!("{}, as above", format.to_uppercase()),
        false => format!("{}, {}", format.to_uppercase(), parts.join(", ")),
    }
}
