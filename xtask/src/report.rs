//! `cargo xtask bench --report`: BENCHMARKS.md and its charts, made from committed JSON lines.
//!
//! The page shows the newest record of each number of GPUs, and names it.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};

mod chart;
mod layer;
mod records;
#[cfg(test)]
mod tests;

use chart::thousands;
use records::{Gpus, RecordFile, Results, Round, Source, TOKENS};

/// The page.
pub(crate) const PAGE: &str = "BENCHMARKS.md";
/// The chart that the page shows.
pub(crate) const CHART: &str = "tests/benchmarks/chart.svg";
/// Folder of the records, named `<date>-<gpus>-<commit>.jsonl`.
const FOLDER: &str = "tests/benchmarks";
const TEMPLATE: &str = include_str!("report/template.md");
/// Placeholder of the results in the template.
const PLACE: &str = "{{results}}\n";
const MOST_LINES: usize = 150;

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

/// Writes the page and the charts, or with `check` fails if they are stale. Among records of one
/// day and number of GPUs, one of `files` counts, else the one that the page names.
pub(crate) fn run(root: &Path, files: &[PathBuf], check: bool) -> Result<()> {
    if check {
        if let Some(complaint) = complaint(root)? {
            bail!("{complaint}");
        }
        println!("{PAGE} and its charts are up to date");
        return Ok(());
    }
    let mut preferred = named_records(&read(root, PAGE).unwrap_or_default());
    preferred.extend(files.iter().map(|file| file_name(file)));
    for (path, text) in generate(root, &preferred)? {
        write(root, &path, &text)?;
        println!("{path} is written");
    }
    Ok(())
}

/// Returns a complaint if the committed page or a chart is stale.
pub(crate) fn complaint(root: &Path) -> Result<Option<String>> {
    let page = read(root, PAGE)?;
    let names = named_records(&page);
    if names.is_empty() {
        return Ok(Some(format!("{PAGE} names no record in {FOLDER}")));
    }
    let generated = match generate(root, &names) {
        Ok(generated) => generated,
        Err(error) => return Ok(Some(format!("{PAGE}: {error:#}"))),
    };
    let stale = |(path, text): &(String, String)| read(root, path).ok().as_ref() != Some(text);
    Ok(generated
        .iter()
        .find(|file| stale(file))
        .map(|(path, _)| format!("{path} is stale; renew it with `cargo xtask bench --report`")))
}

/// Names of the files in the folder of records that begin and end so, in order.
fn listed(root: &Path, start: &str, end: &str) -> Result<BTreeSet<String>> {
    let entries =
        fs::read_dir(root.join(FOLDER)).with_context(|| format!("cannot list {FOLDER}"))?;
    let mut names = BTreeSet::new();
    for entry in entries {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if name.starts_with(start) && name.ends_with(end) {
            names.insert(name);
        }
    }
    Ok(names)
}

/// File names in a page's `tests/benchmarks/NAME.jsonl`.
fn named_records(page: &str) -> Vec<String> {
    let folder = format!("{FOLDER}/");
    let names = page.split(&folder).skip(1).filter_map(|rest| {
        let (name, _) = rest.split_once(".jsonl")?;
        let is_name = name
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c));
        is_name.then(|| format!("{name}.jsonl"))
    });
    let mut names: Vec<_> = names.collect();
    names.sort();
    names.dedup();
    names
}

/// Paths and texts of the page and the charts. Of one day, the last one of `preferred` counts.
fn generate(root: &Path, preferred: &[String]) -> Result<Vec<(String, String)>> {
    let mut names: Vec<_> = listed(root, "", ".jsonl")?.into_iter().collect();
    ensure!(!names.is_empty(), "there is no .jsonl file in {FOLDER}");
    // Of as many GPUs the last one counts.
    let date = |name: &str| name.chars().take(records::DATE_LENGTH).collect::<String>();
    let rank = |name: &String| preferred.iter().rposition(|other| other == name);
    names.sort_by_cached_key(|name| (date(name), rank(name), name.clone()));
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
    let Source { commit, date, .. } = source;
    let l2 = if source.flushed { "flushed" } else { "warm" };
    let list = source.files.iter().map(|name| format!("`{FOLDER}/{name}`"));
    let list = list.collect::<Vec<_>>().join(", ");
    writeln!(text, "\n### {gpus}\n")?;
    writeln!(text, "Commit {commit}, {date}, L2 cache {l2}: {list}.")?;
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
    write_limited(text, results, gpus)
}

/// The fused SiLU kernels, if a record has them.
fn write_silu(text: &mut String, results: &Results) -> std::fmt::Result {
    if results.silu.is_empty() {
        return Ok(());
    }
    writeln!(text, "\n### Fused SiLU\n")?;
    writeln!(
        text,
        "32,768 rows of 64 experts, 2,048 columns of output. The limit is input and output at the rate\n\
         of the same run's copy in device memory; a kernel that reads more than it writes can be faster.\n"
    )?;
    writeln!(text, "| format | µs | limit |\n|---|---|---|")?;
    for time in &results.silu {
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

fn file_name(path: &Path) -> String {
    path.file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into()
}

fn read(root: &Path, path: &str) -> Result<String> {
    fs::read_to_string(root.join(path)).with_context(|| format!("cannot read {path}"))
}

fn write(root: &Path, path: &str, text: &str) -> Result<()> {
    fs::write(root.join(path), text).with_context(|| format!("cannot write {path}"))
}
