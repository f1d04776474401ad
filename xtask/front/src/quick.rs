//! `cargo xtask test`: all suites that need no kernels, each case with some of its seeds.

use std::ffi::OsString;
use std::io;
use std::process::{Command, ExitCode, ExitStatus};

use crate::cargo::{WORKSPACE_FEATURES, cargo, root, target_dir};
use crate::log::Log;
use crate::screen::Screen;
use crate::suites::{Suites, Tally};

/// Variable with the seeds that cases take: `ferry_rig::drawn` reads it.
const SEEDS: &str = "FERRY_SEEDS";
/// Variable of loom, and the most preemptions of a thread that its models try; else they try 3.
const PREEMPTIONS: (&str, &str) = ("LOOM_MAX_PREEMPTIONS", "2");

/// Suites that other commands run, after `left out: `.
pub const OTHER_SUITES: &str = "C (cargo xtask test-c), Python (cargo xtask package-python), GPUs \
    (cargo xtask test --gpus N)";

/// Runs the tests. The last line names what they leave out.
///
/// # Errors
///
/// Cargo or a program of tests cannot be run.
pub fn run() -> io::Result<ExitCode> {
    let (root, screen) = (root(), Screen::default());
    let log = Log::create(&target_dir(), "test")?;
    let drawn = commit(&root);
    screen.say(&format!(
        "ferry: tests without GPUs and kernels, on seeds drawn from {}; all output is in {}",
        drawn.as_deref().unwrap_or("no commit"),
        log.path().display()
    ));
    let salt = drawn.unwrap_or_else(|| String::from("none"));
    let variables = [
        (SEEDS, OsString::from(format!("some:{salt}"))),
        (PREEMPTIONS.0, PREEMPTIONS.1.into()),
    ];
    let suites = Suites {
        root: &root,
        screen: &screen,
        log: &log,
        selection: &["--workspace"],
        filters: &[],
        variables: &variables,
    };
    let mut tally = Tally::default();
    suites.run(&mut tally)?;
    suites.run_doctests(&mut tally)?;
    screen.say(&tally.summary());
    screen.say(&format!(
        "left out: all other seeds, some orders in loom, the library's code for GPUs and the kernels' \
         digests (cargo xtask test --rest, which compiles kernels), {OTHER_SUITES}"
    ));
    Ok(tally.exit_code())
}

/// Runs `cargo test` with these arguments and the features of the whole workspace, as the suites are built:
/// what a failure is repeated with.
///
/// # Errors
///
/// Cargo cannot be run.
pub fn cargo_test(arguments: &[String]) -> io::Result<ExitStatus> {
    let mut cargo = cargo();
    cargo.arg("test").args(WORKSPACE_FEATURES).args(arguments);
    cargo.env("CARGO_INCREMENTAL", "0").status()
}

/// The commit, from whose name seeds are drawn, so that each commit tries others.
fn commit(root: &std::path::Path) -> Option<String> {
    let mut git = Command::new("git");
    let output = git
        .args(["rev-parse", "--short=12", "HEAD"])
        .current_dir(root)
        .output()
        .ok()?;
    let name = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| name.trim().to_owned())
}
