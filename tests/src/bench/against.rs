//! `bench --against`: two programs measure the same, in turns, and what differs is told from noise.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;
use serde_json::Value;

use super::statistics::Summary;
use crate::network;

/// Turns of each program unless `--turns` says another number.
pub const TURNS: usize = 5;
/// Quantiles of Student's t for a two-sided 99 % interval, by the degrees of freedom from 2 on. Above 20, the
/// last one is a little too wide.
const T_99: [f64; 19] = [
    9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.250, 3.169, 3.106, 3.055, 3.012, 2.977,
    2.947, 2.921, 2.898, 2.878, 2.861, 2.845,
];

/// A program with arguments of its own.
struct Program {
    name: &'static str,
    path: PathBuf,
    arguments: Vec<OsString>,
}

/// Figures of one run, by what was measured.
type Figures = BTreeMap<String, f64>;

/// Something that both programs measured. Times in microseconds, a run after the other.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Compared {
    /// The call, and what it was given.
    pub what: String,
    /// Times of this program's runs.
    pub this_us: Vec<f64>,
    /// Times of the other's runs.
    pub other_us: Vec<f64>,
    /// The ratio of this program's times to the other's, turn by turn: the geometric mean.
    pub ratio: f64,
    /// The 99 % interval of that ratio: from it over this to it times this. Of a hundred figures that do not
    /// differ, one is outside.
    pub interval: f64,
}

impl Compared {
    /// Compares as many runs of each, at least 3.
    fn of(what: &str, this_us: Vec<f64>, other_us: Vec<f64>) -> Self {
        let ratios = this_us.iter().zip(&other_us);
        let ratios: Vec<f64> = ratios.map(|(this, other)| (this / other).ln()).collect();
        let count = ratios.len() as f64;
        let mean = ratios.iter().sum::<f64>() / count;
        let squares = ratios.iter().map(|ratio| (ratio - mean).powi(2));
        let error = (squares.sum::<f64>() / (count - 1.0) / count).sqrt();
        let t = T_99[(ratios.len() - 3).min(T_99.len() - 1)];
        Self {
            what: what.to_owned(),
            this_us,
            other_us,
            ratio: mean.exp(),
            interval: (t * error).exp(),
        }
    }

    /// Word for the difference, if it is not noise.
    fn verdict(&self) -> &'static str {
        if self.ratio > self.interval {
            "slower"
        } else if self.ratio * self.interval < 1.0 {
            "faster"
        } else {
            ""
        }
    }
}

/// Runs this program and `other`, a path with arguments of its own behind it, in turns with the arguments of
/// this call, and prints what differs.
///
/// # Errors
/// A program cannot be run or fails, or the two measure nothing in common.
pub fn run(other: &str, turns: usize, json: Option<&Path>) -> Result<()> {
    let mut shared: Vec<OsString> = std::env::args_os().skip(1).collect();
    for flag in ["--against", "--turns", "--json"] {
        network::take(&mut shared, flag);
    }
    let mut words = other.split_whitespace();
    let path = words.next().context("--against: names no program")?;
    let programs = [
        Program {
            name: "this program",
            path: std::env::current_exe().context("finding this program")?,
            arguments: Vec::new(),
        },
        Program {
            name: "the other one",
            path: path.into(),
            arguments: words.map(OsString::from).collect(),
        },
    ];
    let compared = compare(&programs, &shared, turns)?;
    print!("{}", table(&compared, turns));
    if let Some(file) = json {
        let line =
            |compared: &Compared| serde_json::json!({ "against": compared }).to_string() + "\n";
        let lines: String = compared.iter().map(line).collect();
        fs::write(file, lines).with_context(|| format!("--json {}", file.display()))?;
    }
    Ok(())
}

/// Runs each program so many times, one after the other.
fn compare(programs: &[Program; 2], shared: &[OsString], turns: usize) -> Result<Vec<Compared>> {
    ensure!(
        turns >= 3,
        "--turns {turns}: noise shows in 3 turns or more"
    );
    let mut runs: [Vec<Figures>; 2] = [Vec::new(), Vec::new()];
    let folder = network::scratch()?;
    let file = folder.path().join("figures.jsonl");
    for turn in 0..2 * turns {
        let program = &programs[turn % 2];
        println!("run {} of {}: {}", turn + 1, 2 * turns, program.name);
        runs[turn % 2].push(program.measure(shared, &file)?);
    }
    let times = |runs: &[Figures], what: &str| -> Option<Vec<f64>> {
        runs.iter().map(|run| run.get(what).copied()).collect()
    };
    let mut names: Vec<&String> = runs.iter().flatten().flat_map(BTreeMap::keys).collect();
    names.sort_unstable();
    names.dedup();
    let mut all = Vec::new();
    for what in names {
        match (times(&runs[0], what), times(&runs[1], what)) {
            (Some(this), Some(other)) => all.push(Compared::of(what, this, other)),
            _ => println!("not in every run: {what}"),
        }
    }
    ensure!(
        !all.is_empty(),
        "--against {}: it measured nothing that this program did",
        programs[1].path.display()
    );
    Ok(all)
}

impl Program {
    /// Runs it once, with its figures in `file`.
    fn measure(&self, shared: &[OsString], file: &Path) -> Result<Figures> {
        let mut command = Command::new(&self.path);
        command
            .args(shared)
            .args(&self.arguments)
            .arg("--json")
            .arg(file);
        let output = command.output();
        let output = output.with_context(|| format!("starting {}", self.path.display()))?;
        if !output.status.success() {
            let [said, error] =
                [&output.stdout, &output.stderr].map(|of| String::from_utf8_lossy(of));
            bail!(
                "{} ended with {}:\n{said}{error}",
                self.path.display(),
                output.status
            );
        }
        let wrote = || format!("{} wrote no figures", self.path.display());
        let lines = fs::read_to_string(file).with_context(wrote)?;
        // A program that writes none does not get those of the last one.
        fs::remove_file(file).with_context(wrote)?;
        let mut figures = Figures::new();
        for line in lines.lines() {
            let value: Value = serde_json::from_str(line)
                .with_context(|| format!("{} wrote no JSON", self.path.display()))?;
            if let Some(round) = value.get("round") {
                figures.extend(figures_of(round));
            }
        }
        Ok(figures)
    }
}

/// Times of a round's record, by their names: records of older programs lack some.
fn figures_of(round: &Value) -> Vec<(String, f64)> {
    let text = |name: &str| match &round[name] {
        Value::String(text) => text.clone(),
        // Older programs had one layout.
        Value::Null if name == "receive" => String::from("by-expert"),
        Value::Null => String::from("all"),
        other => other.to_string(),
    };
    let l2 = match round["l2_flushed"].as_bool() {
        Some(true) => "cold",
        _ => "warm",
    };
    // Older programs had one kind in a run.
    let kernels = match round["specialised"].as_bool() {
        Some(false) => ", general kernels",
        _ => "",
    };
    let plan = format!(
        "{:>6} tokens, {}, {}, {}, {} SMs{kernels}",
        text("tokens"),
        text("format"),
        text("mode"),
        text("receive"),
        text("max_sms")
    );
    let time = |call: &str, clock: &str| round[call][clock]["median"].as_f64();
    let each = [
        (
            format!("{plan}: dispatch, L2 {l2}"),
            time("dispatch", "gpu_us"),
        ),
        (
            format!("{plan}: combine, L2 {l2}"),
            time("combine", "gpu_us"),
        ),
        (
            format!("{plan}: pair in a graph"),
            round["pair_us"].as_f64(),
        ),
        (
            format!("{plan}: host, dispatch, L2 {l2}"),
            time("dispatch", "host_us"),
        ),
        (
            format!("{plan}: host, combine, L2 {l2}"),
            time("combine", "host_us"),
        ),
    ];
    let measured = |(what, time): (String, Option<f64>)| Some((what, time.filter(|&us| us > 0.0)?));
    each.into_iter().filter_map(measured).collect()
}

fn table(all: &[Compared], turns: usize) -> String {
    let width = all.iter().map(|one| one.what.len()).max().unwrap_or(0);
    let mut text = format!(
        "\n{:width$}  {:>9}  {:>9}  {:>8}  {:>7}\n",
        format!("medians of {turns} runs, µs"),
        "this",
        "other",
        "change",
        "± 99 %",
    );
    for one in all {
        let [this, other] = [&one.this_us, &one.other_us].map(|of| Summary::of(of.clone()).median);
        let [change, interval] = [one.ratio, one.interval].map(|ratio| 100.0 * (ratio - 1.0));
        // Writing to a string does not fail.
        let _ = writeln!(
            text,
            "{:width$}  {this:>9.1}  {other:>9.1}  {change:>+7.1}%  {interval:>6.1}%  {}",
            one.what,
            one.verdict(),
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A program that measures these times of a pair, a run after the other, whatever it is told.
    fn program(folder: &Path, name: &'static str, times: &[f64]) -> Program {
        use std::os::unix::fs::PermissionsExt;
        let path = folder.join(name.replace(' ', "-"));
        let times: Vec<_> = times.iter().map(f64::to_string).collect();
        let script = format!(
            "#!/bin/sh\nfor file; do :; done\nn=$(cat {path}.n 2> /dev/null || echo 0)\n\
             set -- {times}\nshift $n\necho $((n + 1)) > {path}.n\n\
             [ \"$1\" = nan ] && echo broken && exit 3\n\
             echo '{{\"limits\":{{}}}}' > $file\n\
             echo '{{\"round\":{{\"tokens\":8,\"format\":\"bf16\",\"pair_us\":'$1'}}}}' >> $file\n",
            path = path.display(),
            times = times.join(" ").replace("NaN", "nan"),
        );
        fs::write(&path, script).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        Program {
            name,
            path,
            arguments: Vec::new(),
        }
    }

    fn compared(this: &[f64], other: &[f64]) -> Result<Vec<Compared>> {
        let folder = network::scratch().unwrap();
        let programs = [
            program(folder.path(), "this program", this),
            program(folder.path(), "the other one", other),
        ];
        compare(&programs, &["bench".into()], this.len())
    }

    #[test]
    fn a_difference_counts_if_all_turns_show_it() {
        for (this, other, ratio, verdict) in [
            ([11.0, 11.2, 10.9], [10.0, 10.1, 10.0], 1.0997, "slower"),
            ([10.0, 10.1, 10.0], [11.0, 11.2, 10.9], 0.9094, "faster"),
            ([10.0, 12.0, 11.0], [10.0, 10.0, 11.5], 1.0470, ""),
            // What drifts takes both along.
            ([10.0, 15.0, 20.0], [9.9, 14.85, 19.8], 1.0101, "slower"),
        ] {
            let all = compared(&this, &other).unwrap();
            let [one] = all.as_slice() else {
                panic!("{all:?}");
            };
            let what = "     8 tokens, bf16, all, by-expert, all SMs: pair in a graph";
            assert_eq!(one.what, what);
            assert!((one.ratio - ratio).abs() < 1e-4, "{one:?}");
            assert_eq!(one.verdict(), verdict, "{one:?}");
            assert!(table(&all, 3).contains(verdict));
        }
    }

    /// The logarithms of three turns' ratios are 0, 1 and 2 percent: their mean of 1 percent has an error of
    /// 1/sqrt(3) percent, and a 99 % interval of 9.925 times that.
    #[test]
    fn the_interval_is_students() {
        let this = [0.0, 0.01, 0.02].map(f64::exp).to_vec();
        let one = Compared::of("x", this, vec![1.0; 3]);
        assert!((one.ratio.ln() - 0.01).abs() < 1e-12, "{one:?}");
        assert!((one.interval.ln() - 0.0573).abs() < 1e-4, "{one:?}");
    }

    #[test]
    fn a_program_that_fails_is_shown_with_what_it_said() {
        let error = compared(&[1.0, 1.0, 1.0], &[1.0, f64::NAN, 1.0]).unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("the-other-one ended with exit status: 3"),
            "{text}"
        );
        assert!(text.contains("broken"), "{text}");
        assert!(
            compared(&[1.0; 2], &[1.0; 2])
                .unwrap_err()
                .to_string()
                .contains("--turns 2")
        );
    }
}
