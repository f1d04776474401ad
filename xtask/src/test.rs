//! `cargo xtask test` on a machine without GPUs: all tests, and the kernels' digest.

use std::env;
use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::thread;

use anyhow::{Context, Result, bail};
use ferry_ptx_tools::CodeGenerator;
use xtask_front::WORKSPACE_FEATURES;

use crate::build_ptx::{self, Mode};
use crate::cuda_stub;
use crate::places::Places;

pub(crate) mod gpus;

/// The variable that names a checkout of rust-cuda, to build and compare the kernels with.
const RUST_CUDA: &str = "RUST_CUDA";

/// The variable with the folders that the program loader searches first.
const LOADER_PATH: &str = "LD_LIBRARY_PATH";

/// All tests, in one set of features, so that each crate is compiled once. Code for GPUs is compiled, too,
/// and loads a driver only when called.
const ALL_TESTS: [&str; 3] = [
    "--workspace",
    "--features",
    "ferry-ep/cuda,ferry-tests/cuda",
];

/// Tests of the host library that a driver or `cust`, which links one, makes others. Features of all other
/// crates are those of [`ALL_TESTS`], so that none of them is compiled again.
const DRIVER_TESTS: [&str; 12] = [
    "--package",
    "ferry-ep",
    "--lib",
    "--test",
    "driver",
    "--features",
    "cust,nvshmem",
    "--",
    "cuda::",
    "device::",
    "interop::",
    "driver",
];

/// Numbers of tests by outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Tally {
    passed: u64,
    failed: u64,
    skipped: u64,
}

impl Tally {
    /// Adds the numbers of a `test result:` line; ignores other lines.
    fn add_line(&mut self, line: &str) {
        let Some((_, counts)) = line.split_once("test result: ") else {
            return;
        };
        for part in counts.split([';', '.']) {
            let mut words = part.split_whitespace();
            let (Some(Ok(count)), Some(kind)) = (words.next().map(str::parse::<u64>), words.next())
            else {
                continue;
            };
            match kind {
                "passed" => self.passed += count,
                "failed" => self.failed += count,
                "ignored" => self.skipped += count,
                _ => {}
            }
        }
    }

    fn add_outcome<T>(&mut self, outcome: &Result<T>) {
        match outcome {
            Ok(_) => self.passed += 1,
            Err(_) => self.failed += 1,
        }
    }

    fn summary(&self) -> String {
        format!(
            "ferry: {} passed, {} failed, {} skipped",
            self.passed, self.failed, self.skipped
        )
    }
}

/// Runs everything and ends with one line that counts the tests.
pub(crate) fn run(places: &Places) -> Result<ExitCode> {
    let mut tally = Tally::default();
    let (tests, with_driver, digests) = thread::scope(|scope| {
        // Beside the tests, of which some leave processors idle.
        let digests = scope.spawn(|| build_ptx::digests(places, None));
        let tests = run_cargo_test(places, &ALL_TESTS, &[], &mut tally);
        let with_driver = run_driver_tests(places, &mut tally);
        let digests = digests.join();
        let digests = digests.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        (tests, with_driver, digests)
    });
    let kernels = digests.and_then(|digests| {
        build_ptx::judge_all(places, CodeGenerator::Stock, &digests, Mode::Check)
    });
    tally.add_outcome(&kernels);
    let nvvm = check_nvvm(env::var_os(RUST_CUDA), &mut tally, |checkout| {
        build_ptx::run_nvvm(places, checkout, None, Mode::Check)
    });
    for error in [&tests, &with_driver, &kernels, &nvvm]
        .into_iter()
        .filter_map(|outcome| outcome.as_ref().err())
    {
        eprintln!("error: {error:#}");
    }
    println!("tests on GPUs were not run: `cargo xtask test --gpus N` runs them");
    println!("{}", tally.summary());
    let all_passed = [tests, with_driver, kernels, nvvm]
        .iter()
        .all(Result::is_ok);
    Ok(if all_passed {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Checks the kernels of the second code generator, if there is a checkout.
fn check_nvvm(
    checkout: Option<OsString>,
    tally: &mut Tally,
    check: impl FnOnce(&Path) -> Result<()>,
) -> Result<()> {
    let Some(checkout) = checkout.filter(|path| !path.is_empty()) else {
        println!("skipped: {RUST_CUDA} names no rust-cuda checkout");
        tally.skipped += 1;
        return Ok(());
    };
    let outcome = check(Path::new(&checkout));
    tally.add_outcome(&outcome);
    outcome
}

/// Runs the host library's tests with `cust` again, against a driver whose functions fail.
fn run_driver_tests(places: &Places, tally: &mut Tally) -> Result<()> {
    let mut loaded_from = vec![cuda_stub::loaded_from(places)?];
    if let Some(paths) = env::var_os(LOADER_PATH) {
        loaded_from.extend(env::split_paths(&paths));
    }
    let variables = [
        (cuda_stub::VARIABLE, cuda_stub::folder(places)?.into()),
        (LOADER_PATH, env::join_paths(loaded_from)?),
    ];
    run_cargo_test(places, &DRIVER_TESTS, &variables, tally)
}

/// Runs `cargo test`, prints its output, and counts the tests. Without incremental files: their small units
/// of code make the suites take 1.7 times as long.
fn run_cargo_test(
    places: &Places,
    arguments: &[&str],
    variables: &[(&str, OsString)],
    tally: &mut Tally,
) -> Result<()> {
    let mut cargo = Command::new("cargo")
        .args(["test", "--no-fail-fast"])
        .args(WORKSPACE_FEATURES)
        .args(arguments)
        .env("CARGO_INCREMENTAL", "0")
        .envs(variables.iter().cloned())
        .current_dir(&places.root)
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot run cargo")?;
    let printed = cargo
        .stdout
        .take()
        .context("cargo has no standard output")?;
    for line in BufReader::new(printed).lines() {
        let line = line.context("cannot read cargo's output")?;
        println!("{line}");
        tally.add_line(&line);
    }
    let status = cargo.wait().context("cannot wait for cargo")?;
    if !status.success() {
        bail!("`cargo test {}` failed", arguments.join(" "));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn result_lines_are_added_up() {
        let mut tally = Tally::default();
        tally
            .add_line("test result: ok. 5 passed; 0 failed; 2 ignored; 0 measured; 1 filtered out");
        tally.add_line("test result: FAILED. 3 passed; 1 failed; 0 ignored; 0 measured");
        tally.add_line("running 7 tests");
        assert_eq!(
            tally,
            Tally {
                passed: 8,
                failed: 1,
                skipped: 2
            }
        );
        assert_eq!(tally.summary(), "ferry: 8 passed, 1 failed, 2 skipped");
    }

    #[test]
    fn without_a_checkout_of_rust_cuda_a_test_counts_as_skipped() {
        for (checkout, wanted) in [(None, [0, 1]), (Some(""), [0, 1]), (Some("there"), [1, 0])] {
            let mut tally = Tally::default();
            let outcome = check_nvvm(checkout.map(OsString::from), &mut tally, |path| {
                assert_eq!(path, Path::new("there"));
                Ok(())
            });
            assert!(outcome.is_ok());
            assert_eq!([tally.passed, tally.skipped], wanted);
        }
    }

    #[test]
    fn a_failed_step_counts_as_a_failed_test() {
        let mut tally = Tally::default();
        tally.add_outcome::<()>(&Err(anyhow::anyhow!("differs")));
        assert_eq!(tally.failed, 1);
    }
}
