//! Time to make a communicator, with kernels for all shapes and with kernels compiled for its own, in a
//! process for which the driver compiles all of them and in one that finds what the first has compiled.

use std::env;
use std::ffi::OsString;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use ferry::{Communicator, Config, Group, Plan};
use serde::{Deserialize, Serialize};

use super::options::BenchArgs;
use super::rig::Rig;
use super::sink::Sink;
use crate::network;

/// The flag that makes a process measure its own set-up.
const HERE: &str = "--set-up-here";

/// Times of a process, in milliseconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Process {
    /// Time from before the driver is initialised until the group is there, with kernels for all shapes.
    group_ms: f64,
    plans: Vec<Made>,
}

/// Times of a plan's communicators of all ranks of a process, in milliseconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Made {
    tokens: usize,
    format: String,
    mode: String,
    /// Time with the group's kernels.
    general_ms: f64,
    /// Time with kernels that are compiled, or found, for the shape.
    specialised_ms: f64,
}

/// Times of two processes, the second with what the driver kept of the first.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct SetUp {
    cold: Process,
    warm: Process,
}

/// Starts both processes, and prints what they took.
pub fn measure(rig: &Rig, sink: &mut Sink) -> Result<()> {
    ensure!(
        rig.gpus.len() == rig.ranks(),
        "--only set-up: one process has all ranks; leave --group out"
    );
    let folder = network::scratch()?;
    let mut words: Vec<OsString> = env::args_os().skip(1).collect();
    network::take(&mut words, "--json");
    words.push(HERE.into());
    let set_up = SetUp {
        cold: process(&words, folder.path())?,
        warm: process(&words, folder.path())?,
    };
    sink.say(set_up.table());
    sink.line("set_up", &set_up)
}

/// Runs this program with these arguments and a folder for what the driver compiles.
fn process(words: &[OsString], cache: &Path) -> Result<Process> {
    let program = env::current_exe().context("finding this program")?;
    let mut command = Command::new(program);
    let command = command.args(words).env("CUDA_CACHE_PATH", cache);
    let output = command.env_remove("CUDA_CACHE_DISABLE").output()?;
    let [said, error] = [&output.stdout, &output.stderr].map(|of| String::from_utf8_lossy(of));
    if !output.status.success() {
        bail!(
            "--only set-up: a process ended with {}:\n{said}{error}",
            output.status
        );
    }
    let line = said.lines().last().unwrap_or_default();
    serde_json::from_str(line).with_context(|| format!("--only set-up: a process said {line:?}"))
}

/// Makes and closes communicators of each plan in this process, and prints the times as JSON. `started` is
/// when the group was asked for.
pub fn measure_here(group: &Group, args: &BenchArgs, started: Instant) -> Result<()> {
    let group_ms = ms_since(started);
    let mut plans = Vec::new();
    for (format, mode) in args.kinds() {
        for &tokens in &args.tokens {
            let of = |specialise| {
                let config = args.config(format, mode, tokens)?;
                let plan = Plan::new(
                    group,
                    Config {
                        specialise,
                        ..config
                    },
                )?;
                let started = Instant::now();
                let ranks = Communicator::new(group, &plan)?;
                let ms = ms_since(started);
                Communicator::close_all(ranks)?;
                anyhow::Ok(ms)
            };
            plans.push(Made {
                tokens,
                format: format.name().to_owned(),
                mode: mode.name().to_owned(),
                general_ms: of(false)?,
                specialised_ms: of(true)?,
            });
        }
    }
    println!("{}", serde_json::to_string(&Process { group_ms, plans })?);
    Ok(())
}

fn ms_since(started: Instant) -> f64 {
    started.elapsed().as_secs_f64() * 1e3
}

impl SetUp {
    fn table(&self) -> String {
        let line =
            |what: &str, cold: f64, warm: f64| format!("\n{what:60} {cold:>9.1} {warm:>9.1}");
        let head = "set-up, ms: in a process for which the driver compiles, and in the next one";
        let mut text = format!("\n{head}");
        let what = "group, with kernels for all shapes";
        text += &line(what, self.cold.group_ms, self.warm.group_ms);
        for (cold, warm) in self.cold.plans.iter().zip(&self.warm.plans) {
            let Made {
                tokens,
                format,
                mode,
                ..
            } = cold;
            let plan = format!("communicator, {tokens} tokens, {format}, {mode}");
            let what = format!("{plan}, general kernels");
            text += &line(&what, cold.general_ms, warm.general_ms);
            let what = format!("{plan}, specialised");
            text += &line(&what, cold.specialised_ms, warm.specialised_ms);
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_plan_has_a_line_of_each_kind_of_kernels() {
        let process = |times: [f64; 3]| Process {
            group_ms: times[0],
            plans: vec![Made {
                tokens: 128,
                format: "bf16".to_owned(),
                mode: "reduced".to_owned(),
                general_ms: times[1],
                specialised_ms: times[2],
            }],
        };
        let set_up = SetUp {
            cold: process([4000.0, 12.25, 3000.5]),
            warm: process([400.0, 11.0, 60.0]),
        };
        let table = set_up.table();
        let lines = table.lines().skip(2);
        let words = lines.map(|line| line.split_whitespace().rev().take(3).collect::<Vec<_>>());
        let wanted = [
            ["400.0", "4000.0", "shapes"],
            ["11.0", "12.2", "kernels"],
            ["60.0", "3000.5", "specialised"],
        ];
        assert_eq!(words.collect::<Vec<_>>(), wanted);
        let json = serde_json::to_string(&set_up.cold).unwrap();
        assert_eq!(serde_json::from_str::<Process>(&json).unwrap(), set_up.cold);
    }
}
