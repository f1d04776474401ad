//! `cargo xtask bench --report`: BENCHMARKS.md and its charts, made from committed JSON lines.
//!
//! The page shows the newest record of each number of GPUs, and names it.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};

use crate::generated;

mod chart;
mod layer;
mod records;
mod svg;
mod tables;
#[cfg(test)]
mod tests;

use chart::thousands;
use records::{Gpus, RecordFile, Results, Round, Source, TOKENS};

/// The page.
pub(crate) const PAGE: &str = "BENCHMARKS.md";
/// The chart that the page shows.
pub(crate) const CHART: &str = "tests/benchmarks/chart.svg";
/// The command that generates both.
const COMMAND: &str = "cargo xtask bench --report";
/// Folder of the records, named `<date>-<gpus>-<commit>.jsonl`.
const FOLDER: &str = "tests/benchmarks";
const TEMPLATE: &str = include_str!("report/template.md");
/// Placeholder of the results in the template.
const PLACE: &str = "{{results}}\n";
const MOST_LINES: usize = 200;

/// Columns of the tables: heading, format, and whether dispatch or combine.
const COLUMNS: [(&str, &str, Call); 5] = [
    ("FP8 dispatch", "fp8", Call::Dispatch),
    ("combine after it", "fp8", Call::Combine),
    ("BF16 dispatch", "bf16", Call::Dispatch),
    ("combine after it", "bf16", Call::Combine),
    ("MXFP4 dispatch", "mxfp4", Call::Dispatch),
];

/// A call of a round.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Call {
    Dispatch,
    Combine,
}

/// Writes the page and the charts, or with `check` fails if they are stale.
pub(crate) fn run(root: &Path, check: bool) -> Result<()> {
    generated::renew(root, &generate(root)?, check, COMMAND)
}

/// Returns a complaint if the committed page or a chart is stale.
pub(crate) fn complaint(root: &Path) -> Option<String> {
    match generate(root) {
        Ok(files) => Some(generated::complaint(
            generated::stale(root, &files)?,
            COMMAND,
        )),
        Err(error) => Some(format!("{PAGE}: {error:#}")),
    }
}

/// Names of the files in the folder of records that begin and end so, in order.
fn listed(root: &Path, start: &str, end: &str) -> Result<BTreeSet<String>> {
    let entries =
        fs::read_dir(root.join(FOLDER)).with_context(|| format!("cannot list {FOLDER}"))?;
    let names = entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
    let mut names = names.collect::<Result<BTreeSet<String>>>()?;
    names.retain(|name| name.starts_with(start) && name.ends_with(end));
    Ok(names)
}

/// Paths and texts of the page and the charts.
fn generate(root: &Path) -> Result<Vec<(String, String)>> {
    let names = listed(root, "", ".jsonl")?;
    ensure!(!names.is_empty(), "there is no .jsonl file in {FOLDER}");
    let files = names.iter().map(|name| {
        let text = read(root, &format!("{FOLDER}/{name}"))?;
        RecordFile::parse(name, &text)
    });
    let results = Results::of(files.collect::<Result<_>>()?)?;
    let page = TEMPLATE.replacen(PLACE, &measured(&results), 1);
    let lines = page.lines().count();
    ensure!(lines <= MOST_LINES, "{lines} lines, more than {MOST_LINES}");
    let mut generated = vec![
        (PAGE.to_owned(), page),
        (CHART.to_owned(), chart::draw(&results)),
    ];
    for name in listed(root, "moe-layer-", ".json")? {
        let path = format!("{FOLDER}/{name}");
        let drawn = layer::draw(&read(root, &path)?).with_context(|| path.clone())?;
        generated.push((path.replace(".json", ".svg"), drawn));
    }
    Ok(generated)
}

/// The part of the page that is made of records.
fn measured(results: &Results) -> String {
    let mut text = String::new();
    // A `String` takes every write.
    let _ = write_measured(&mut text, results);
    text
}

fn write_measured(text: &mut String, results: &Results) -> std::fmt::Result {
    writeln!(
        text,
        "![time and share of the limit against tokens]({CHART})"
    )?;
    for (gpus, source) in &results.sources {
        write_section(text, results, *gpus, source)?;
    }
    write_silu(text, results)
}

/// The results of ranks.
fn write_section(
    text: &mut String,
    results: &Results,
    gpus: Gpus,
    source: &Source,
) -> std::fmt::Result {
    let Source {
        commit, date, file, ..
    } = source;
    let l2 = if source.flushed { "flushed" } else { "warm" };
    let only = match results.keys(gpus).all(|key| key.specialised) {
        true => ", without general kernels",
        false => "",
    };
    writeln!(text, "\n### {gpus}\n")?;
    writeln!(
        text,
        "Commit {commit}, {date}, L2 cache {l2}{only}: `{FOLDER}/{file}`."
    )?;
    if let Some(limits) = &source.limits {
        writeln!(
            text,
            "Limits: wire {:.0} GB/s a GPU and direction, memory {} GB/s, signal there and back {:.2} µs, \
             empty call {:.1} µs.",
            limits.wire_gb_per_s,
            thousands(limits.hbm_gb_per_s, 0),
            limits.round_trip_us,
            limits.empty_call.of(source.flushed),
        )?;
    }
    write_table(text, results, gpus)?;
    write_limited(text, results, gpus)?;
    tables::write_kernels(text, results, gpus)?;
    tables::write_kinds(text, results, gpus)
}

/// The fused SiLU kernels, if a record has them.
fn write_silu(text: &mut String, results: &Results) -> std::fmt::Result {
    let Some((file, times)) = &results.silu else {
        return Ok(());
    };
    writeln!(text, "\n### Fused SiLU\n")?;
    writeln!(
        text,
        "32,768 rows of 64 experts, 2,048 columns of output. The limit is input and output at the rate\n\
         of the same run's copy in device memory; a kernel that reads more than it writes can be faster.\n\
         Record: `{FOLDER}/{file}`.\n"
    )?;
    writeln!(text, "| format | µs | limit |\n|---|---|---|")?;
    for time in times {
        let interleaved = if time.interleaved {
            ", interleaved"
        } else {
            ""
        };
        let clamped = if time.clamped { ", clamped" } else { "" };
        let (us, limit) = (number(time.us), number(time.floor_us));
        let format = &time.format;
        writeln!(text, "| {format}{interleaved}{clamped} | {us} | {limit} |")?;
    }
    Ok(())
}

fn write_table(text: &mut String, results: &Results, gpus: Gpus) -> std::fmt::Result {
    let headings: Vec<_> = COLUMNS.iter().map(|(heading, ..)| *heading).collect();
    writeln!(
        text,
        "\n| tokens a rank | {} | pair, FP8 | NCCL all-gather | NCCL reduce-scatter |",
        headings.join(" | ")
    )?;
    writeln!(text, "|{}", "---|".repeat(headings.len() + 4))?;
    for tokens in TOKENS {
        let cells = COLUMNS.map(|(_, format, call)| {
            let round = results.round(gpus, format, tokens, None);
            round.map_or("missing".into(), |round| cell(round, call))
        });
        let fp8 = results.round(gpus, "fp8", tokens, None);
        let number =
            |pick: fn(&Round) -> Option<f64>| fp8.and_then(pick).map_or("-".into(), number);
        writeln!(
            text,
            "| {} | {} | {} | {} | {} |",
            thousands(tokens as f64, 0),
            cells.join(" | "),
            number(|round| round.pair_us),
            number(|round| round.dispatch.nccl_us),
            number(|round| round.combine.nccl_us),
        )?;
    }
    Ok(())
}

/// Times with a limit on the multiprocessors, with the most tokens.
fn write_limited(text: &mut String, results: &Results, gpus: Gpus) -> std::fmt::Result {
    const SMS: u32 = 16;
    let tokens = TOKENS[TOKENS.len() - 1];
    let cells = COLUMNS.map(|(heading, format, call)| {
        let round = results.round(gpus, format, tokens, Some(SMS))?;
        Some(format!("{heading} {}", cell(round, call)))
    });
    let cells: Vec<_> = cells.into_iter().flatten().collect();
    if cells.is_empty() {
        return Ok(());
    }
    writeln!(
        text,
        "\nOn {SMS} multiprocessors, {} tokens: {}.",
        thousands(tokens as f64, 0),
        cells.join(", ")
    )
}

/// Time in µs, and the limit's share of it.
fn cell(round: &Round, call: Call) -> String {
    let phase = match call {
        Call::Dispatch => &round.dispatch,
        Call::Combine => &round.combine,
    };
    let time = number(phase.us);
    match phase.share() {
        Some(share) if share < 0.01 => format!("{time} (<1 %)"),
        Some(share) => format!("{time} ({:.0} %)", 100.0 * share),
        None => time,
    }
}

fn number(value: f64) -> String {
    thousands(value, 1)
}

fn read(root: &Path, path: &str) -> Result<String> {
    fs::read_to_string(root.join(path)).with_context(|| format!("cannot read {path}"))
}
