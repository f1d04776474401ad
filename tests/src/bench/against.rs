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
pub const TURNS: usize = 3;

/// A program with arguments of its own.
struct Program {
    name: &'static str,
    path: PathBuf,
    arguments: Vec<OsString>,
}

/// Figures of one run, by what was measured.
type Figures = BTreeMap<String, f64>;

/// Something that both programs measured. Times in microseconds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Compared {
    /// The call, and what it was given.
    pub what: String,
    /// The median of this program's runs.
    pub this_us: f64,
    /// The median of the other's runs.
    pub other_us: f64,
    /// The extent to which this program took longer; negative: shorter.
    pub difference: f64,
    /// The larger of the two programs' own spreads: the most by which a run of a program differs from another
    /// run of the same.
    pub noise: f64,
}

impl Compared {
    fn of(what: &str, this: Vec<f64>, other: Vec<f64>) -> Self {
        let spread = |times: &[f64]| {
            let ends = times.iter().copied();
            let (least, most) = (
                ends.clone().fold(f64::INFINITY, f64::min),
                ends.fold(0.0, f64::max),
            );
            most / least - 1.0
        };
        let noise = spread(&this).max(spread(&other));
        let (this_us, other_us) = (Summary::of(this).median, Summary::of(other).median);
        Self {
            what: what.to_owned(),
            this_us,
            other_us,
            difference: this_us / other_us - 1.0,
            noise,
        }
    }

    /// Word for the difference, if it is above the noise.
    fn verdict(&self) -> &'static str {
        match self.difference {
            difference if difference.abs() <= self.noise => "",
            difference if difference > 0.0 => "slower",
            _ => "faster",
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
        turns >= 2,
        "--turns {turns}: noise shows in 2 turns or more"
    );
    let mut runs: [Vec<Figures>; 2] = [Vec::new(), Vec::new()];
    for turn in 0..2 * turns {
        let program = &programs[turn % 2];
        println!("run {} of {}: {}", turn + 1, 2 * turns, program.name);
        runs[turn % 2].push(program.measure(shared, turn)?);
    }
    let times = |runs: &[Figures], what: &str| -> Option<Vec<f64>> {
        runs.iter().map(|run| run.get(what).copied()).collect()
    };
    let all = runs[0][0].keys().filter_map(|what| {
        let (this, other) = (times(&runs[0], what)?, times(&runs[1], what)?);
        Some(Compared::of(what, this, other))
    });
    let all: Vec<_> = all.collect();
    ensure!(
        !all.is_empty(),
        "--against {}: it measured nothing that this program did",
        programs[1].path.display()
    );
    Ok(all)
}

impl Program {
    /// Runs it once.
    fn measure(&self, shared: &[OsString], turn: usize) -> Result<Figures> {
        let name = format!("ferry-against-{}-{turn}.jsonl", std::process::id());
        let file = std::env::temp_dir().join(name);
        let mut command = Command::new(&self.path);
        command
            .args(shared)
            .args(&self.arguments)
            .arg("--json")
            .arg(&file);
        let output = command.output();
        let output = output.with_context(|| format!("starting {}", self.path.display()))?;
        let lines = fs::read_to_string(&file).unwrap_or_default();
        // It is only left where it was never written.
        let _ = fs::remove_file(&file);
        if !output.status.success() {
            let [said, error] =
                [&output.stdout, &output.stderr].map(|of| String::from_utf8_lossy(of));
            bail!(
                "{} ended with {}:\n{said}{error}",
                self.path.display(),
                output.status
            );
        }
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
        Value::Null => String::from("all"),
        other => other.to_string(),
    };
    let l2 = match round["l2_flushed"].as_bool() {
        Some(true) => "cold",
        _ => "warm",
    };
    let plan = format!(
        "{:>6} tokens, {}, {}, {}, {} SMs",
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
        "noise",
    );
    for one in all {
        let [change, noise] = [one.difference, one.noise].map(|part| 100.0 * part);
        // Writing to a string does not fail.
        let _ = writeln!(
            text,
            "{:width$}  {:>9.1}  {:>9.1}  {change:>+7.1}%  {noise:>6.1}%  {}",
            one.what,
            one.this_us,
            one.other_us,
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

    fn compared(name: &str, this: &[f64], other: &[f64]) -> Result<Vec<Compared>> {
        let folder = format!("ferry-against-{name}-{}", std::process::id());
        let folder = std::env::temp_dir().join(folder);
        fs::create_dir_all(&folder).unwrap();
        let programs = [
            program(&folder, "this program", this),
            program(&folder, "the other one", other),
        ];
        let all = compare(&programs, &["bench".into()], this.len());
        fs::remove_dir_all(&folder).unwrap();
        all
    }

    #[test]
    fn a_difference_counts_if_it_is_above_the_spread_of_either() {
        for (name, this, other, difference, noise, verdict) in [
            ("slower", [11.0, 11.0], [10.0, 10.2], 0.0891, 0.02, "slower"),
            ("faster", [9.0, 9.0], [10.0, 10.0], -0.1, 0.0, "faster"),
            ("noise", [10.0, 12.0], [10.0, 10.0], 0.1, 0.2, ""),
        ] {
            let all = compared(name, &this, &other).unwrap();
            let [one] = all.as_slice() else {
                panic!("{all:?}");
            };
            assert_eq!(
                one.what,
                "     8 tokens, bf16, all, all, all SMs: pair in a graph"
            );
            assert!((one.difference - difference).abs() < 1e-4, "{one:?}");
            assert!((one.noise - noise).abs() < 1e-4, "{one:?}");
            assert_eq!(one.verdict(), verdict);
            assert!(table(&all, 2).contains(&format!("{:.1}", one.other_us)));
        }
    }

    #[test]
    fn a_program_that_fails_is_shown_with_what_it_said() {
        let error = compared("fails", &[1.0, 1.0], &[1.0, f64::NAN]).unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("the-other-one ended with exit status: 3"),
            "{text}"
        );
        assert!(text.contains("broken"), "{text}");
        assert!(
            compared("once", &[1.0], &[1.0])
                .unwrap_err()
                .to_string()
                .contains("--turns 1")
        );
    }
}
