//! `cargo xtask bench --report`: BENCHMARKS.md and its chart, made from committed JSON lines.
//!
//! The generated page names the records that it was made from, so that `--check` can make it again.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};

mod chart;
mod records;
#[cfg(test)]
mod tests;

use chart::thousands;
use records::{Gpus, RANKS, RecordFile, Results, Round, TOKENS};

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

/// The generated files.
struct Report {
    page: String,
    chart: String,
}

/// Writes the page and the chart, or with `check` fails if they are stale.
pub(crate) fn run(root: &Path, files: &[PathBuf], check: bool) -> Result<()> {
    if check {
        if let Some(complaint) = complaint(root)? {
            bail!("{complaint}");
        }
        println!("{PAGE} and {CHART} are fresh");
        return Ok(());
    }
    let names = match files {
        [] => named_or_newest(root)?,
        files => files.iter().map(|file| file_name(file)).collect(),
    };
    let report = generate(root, &names)?;
    write(root, PAGE, &report.page)?;
    write(root, CHART, &report.chart)?;
    println!("{PAGE} and {CHART} are written, from {}", names.join(", "));
    Ok(())
}

/// A complaint if the committed page or chart is stale.
pub(crate) fn complaint(root: &Path) -> Result<Option<String>> {
    let page = read(root, PAGE)?;
    let names = named_records(&page);
    if names.is_empty() {
        return Ok(Some(format!("{PAGE} names no record in {FOLDER}")));
    }
    let report = match generate(root, &names) {
        Ok(report) => report,
        Err(error) => return Ok(Some(format!("{PAGE}: {error:#}"))),
    };
    let chart = read(root, CHART).unwrap_or_default();
    for (path, is_same) in [(PAGE, page == report.page), (CHART, chart == report.chart)] {
        if !is_same {
            return Ok(Some(format!(
                "{path} is stale; renew it with `cargo xtask bench --report`"
            )));
        }
    }
    Ok(None)
}

/// The records that the page names; those of the newest date if it names none.
fn named_or_newest(root: &Path) -> Result<Vec<String>> {
    let named = named_records(&read(root, PAGE).unwrap_or_default());
    if !named.is_empty() {
        return Ok(named);
    }
    let entries =
        fs::read_dir(root.join(FOLDER)).with_context(|| format!("cannot list {FOLDER}"))?;
    let mut names = Vec::new();
    for entry in entries {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if name.ends_with(".jsonl") {
            names.push(name);
        }
    }
    names.sort();
    let date = |name: &String| name.chars().take(records::DATE_LENGTH).collect::<String>();
    let newest = names.last().map(date);
    names.retain(|name| Some(date(name)) == newest);
    ensure!(!names.is_empty(), "there is no .jsonl file in {FOLDER}");
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

fn generate(root: &Path, names: &[String]) -> Result<Report> {
    let files = names.iter().map(|name| {
        let text = read(root, &format!("{FOLDER}/{name}"))?;
        RecordFile::parse(name, &text)
    });
    let results = Results::of(files.collect::<Result<_>>()?)?;
    let page = TEMPLATE.replacen(PLACE, &measured(&results), 1);
    let lines = page.lines().count();
    ensure!(lines <= MOST_LINES, "{lines} lines, more than {MOST_LINES}");
    Ok(Report {
        page,
        chart: chart::draw(&results),
    })
}

/// The part of the page that is made of records.
fn measured(results: &Results) -> String {
    let mut text = String::new();
    // A `String` takes every write.
    let _ = write_measured(&mut text, results);
    text
}

fn write_measured(text: &mut String, results: &Results) -> std::fmt::Result {
    let l2 = if results.flushed { "flushed" } else { "warm" };
    writeln!(text, "Commit {}, L2 cache {l2}.\n", results.commit)?;
    writeln!(
        text,
        "![time and share of the limit against tokens]({CHART})"
    )?;
    let own = RANKS.map(Gpus::own);
    let shared = results.sources.keys().filter(|gpus| gpus.ranks_per_gpu > 1);
    for gpus in own.iter().chain(shared) {
        write_section(text, results, *gpus)?;
    }
    write_silu(text, results)
}

/// The results of ranks.
fn write_section(text: &mut String, results: &Results, gpus: Gpus) -> std::fmt::Result {
    writeln!(text, "\n### {gpus}\n")?;
    let Some(source) = results.sources.get(&gpus) else {
        return writeln!(text, "Missing: no record of this commit.");
    };
    let list = source.files.iter().map(|name| format!("`{FOLDER}/{name}`"));
    writeln!(
        text,
        "{}: {}.",
        source.date,
        list.collect::<Vec<_>>().join(", ")
    )?;
    if let Some(limits) = &source.limits {
        writeln!(
            text,
            "Limits: wire {:.0} GB/s a GPU and direction, device memory {} GB/s, signal there and \
             back {:.2} µs,\nempty call between events {:.1} µs.",
            limits.wire_gb_per_s,
            thousands(limits.hbm_gb_per_s, 0),
            limits.round_trip_us,
            limits.empty_call.of(results.flushed),
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
         of the copy in device memory; a kernel that reads more than it writes can be faster.\n"
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
