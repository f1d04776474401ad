//! Log of runs, a line of JSON each, so that they add up.

use std::fs::{OpenOptions, read_to_string};
use std::io::Write;
use std::ops::Range;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::SoakArgs;
use super::tally::Tally;
use crate::group::GroupKind;
use crate::network;

/// Digest of the kernels at the time this program was built.
const KERNELS: &str = include_str!("../../../gpu/ptx-digest.txt");

/// Line of a run that began these seeds within so many seconds.
pub fn line(
    args: &SoakArgs,
    machine: &str,
    (seeds, seconds): (Range<u64>, u64),
    tally: &Tally,
) -> Value {
    let clock = SystemTime::now().duration_since(UNIX_EPOCH);
    let mut line = json!({
        "date": date(clock.map_or(0, |since| since.as_secs() / 86_400)),
        "commit": args.commit,
        "machine": machine,
        "seeds": [seeds.start, seeds.end],
        "seconds": seconds,
        "rounds": tally.rounds(),
        "by_format": tally.by_format(),
    });
    if let Some(node) = args.group_args.node {
        line["node"] = json!(node);
    }
    if let Some(network) = network::of_this_process() {
        line["network"] = json!(network);
    }
    if args.has_group() && args.kind() != GroupKind::Simulated {
        line["ptx"] = json!(format!("{:016x}", fnv(KERNELS)));
    }
    line
}

/// Appends a run's line, and prints the rounds of all runs.
pub fn append(path: &Path, line: &Value) -> Result<()> {
    let name = path.display();
    let mut file = OpenOptions::new()
        .create(true)
        .append(true)
        .open(path)
        .with_context(|| format!("--log {name}"))?;
    writeln!(file, "{line}").with_context(|| format!("--log {name}"))?;
    let text = read_to_string(path).with_context(|| format!("--log {name}"))?;
    let rounds = text.lines().map(rounds_of);
    let (runs, rounds) = (text.lines().count(), rounds.sum::<u64>());
    println!("{name}: {rounds} rounds in {runs} runs");
    Ok(())
}

fn rounds_of(line: &str) -> u64 {
    let line: Value = serde_json::from_str(line).unwrap_or_default();
    line["rounds"].as_u64().unwrap_or(0)
}

/// Date so many days after 1970-01-01 (H. Hinnant, "chrono-compatible low-level date algorithms").
fn date(days: u64) -> String {
    let days = days + 719_468;
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let shifted = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 {
        shifted + 3
    } else {
        shifted - 9
    };
    let year = year + 400 * era + u64::from(month <= 2);
    format!("{year}-{month:02}-{day:02}")
}

/// FNV-1a hash.
fn fnv(text: &str) -> u64 {
    let fold = |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    text.bytes().fold(0xcbf2_9ce4_8422_2325, fold)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_are_dates() {
        assert_eq!(date(0), "1970-01-01");
        assert_eq!(date(11_016), "2000-02-29");
        assert_eq!(date(20_779), "2026-11-22");
        assert_eq!(fnv(""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fnv("a"), 0xaf63_dc4c_8601_ec8c);
    }

    #[test]
    fn lines_add_up() {
        assert_eq!(rounds_of(r#"{"rounds": 12}"#), 12);
        assert_eq!(rounds_of("no line"), 0);
    }
}
