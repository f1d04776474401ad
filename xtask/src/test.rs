//! `cargo xtask test --full` on a machine without GPUs: all tests with all seeds, and the kernels' digests.
//! `--rest` does what `cargo xtask test` leaves out of it.

use std::env;
use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;
use std::thread;

use anyhow::Result;
use ferry_build::Package;
use ferry_ptx_tools::{CodeGenerator, Digest};
use xtask_front::{Log, Screen, Suites, Tally, quick, time};

use crate::build_ptx::{self, Mode};
use crate::cuda_stub;
use crate::places::Places;

mod rest;

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
const DRIVER_TESTS: [&str; 7] = [
    "--package",
    "ferry-ep",
    "--lib",
    "--test",
    "driver",
    "--features",
    "cust,nvshmem",
];
/// Names of these tests.
const DRIVER_FILTERS: [&str; 4] = ["cuda::", "device::", "interop::", "driver"];

/// A test run: where its lines and its output go, and its numbers.
struct Run<'a> {
    places: &'a Places,
    screen: &'a Screen,
    log: &'a Log,
    tally: Tally,
}

/// Packages that are tested.
#[derive(Clone, Copy)]
pub(crate) enum Extent {
    /// All.
    Full,
    /// All whose tests `cargo xtask test` runs otherwise.
    Rest,
}

/// Runs everything, and ends with a line that counts the tests and lines that name what was left out.
pub(crate) fn run(places: &Places, extent: Extent) -> Result<ExitCode> {
    let (screen, log) = (Screen::default(), Log::create(&places.target_dir, "test")?);
    let left_out = match extent {
        Extent::Full => Vec::new(),
        Extent::Rest => rest::run_by_quick(&places.root, ALL_TESTS[2])?,
    };
    let mut selection = ALL_TESTS.to_vec();
    selection.extend(left_out.iter().flat_map(|name| ["--exclude", name]));
    let what = match extent {
        Extent::Full => "all tests that need no GPU",
        Extent::Rest => "what `cargo xtask test` leaves out",
    };
    screen.say(&format!(
        "ferry: {what}; all output is in {}",
        log.path().display()
    ));
    let mut run = Run {
        places,
        screen: &screen,
        log: &log,
        tally: Tally::default(),
    };
    let digests = thread::scope(|scope| {
        // Beside the tests, of which some leave processors idle.
        let digests = scope.spawn(|| build_ptx::digests(places, None));
        run.suites(&selection, &[], &[])?;
        run.with_driver()?;
        let digests = screen.during(|| {
            screen.under_way("the kernels are compiled and assembled");
            digests.join()
        });
        anyhow::Ok(digests.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })?;
    run.judge(digests);
    run.nvvm(env::var_os(RUST_CUDA), |checkout| {
        build_ptx::run_nvvm(places, checkout, None, Mode::Check)
    });
    screen.say(&run.tally.summary());
    if !left_out.is_empty() {
        let names = left_out.join(", ");
        screen.say(&format!("left out, run by `cargo xtask test`: {names}"));
    }
    screen.say(&format!("left out: {}", quick::OTHER_SUITES));
    Ok(run.tally.exit_code())
}

impl Run<'_> {
    /// Runs suites and the programs of their documentation.
    fn suites(
        &mut self,
        selection: &[&str],
        filters: &[&str],
        variables: &[(&str, OsString)],
    ) -> Result<()> {
        let suites = Suites {
            root: &self.places.root,
            screen: self.screen,
            log: self.log,
            selection,
            filters,
            variables,
        };
        suites.run(&mut self.tally)?;
        if filters.is_empty() {
            suites.run_doctests(&mut self.tally)?;
        }
        Ok(())
    }

    /// Runs the host library's tests with `cust` again, against a driver whose functions fail.
    fn with_driver(&mut self) -> Result<()> {
        let mut loaded_from = vec![cuda_stub::loaded_from(self.places)?];
        if let Some(paths) = env::var_os(LOADER_PATH) {
            loaded_from.extend(env::split_paths(&paths));
        }
        let variables = [
            (cuda_stub::VARIABLE, cuda_stub::folder(self.places)?.into()),
            (LOADER_PATH, env::join_paths(loaded_from)?),
        ];
        self.screen.say("with a driver whose functions fail:");
        self.suites(&DRIVER_TESTS, &DRIVER_FILTERS, &variables)
    }

    /// Compares the digests with the committed ones. All of them count as one test.
    fn judge(&mut self, digests: Result<Vec<(Package, Digest)>>) {
        let begin = self.screen.elapsed();
        let outcome = digests.and_then(|digests| {
            let say = |text: &str| self.log.line(text);
            build_ptx::judge_all(
                self.places,
                CodeGenerator::Stock,
                &digests,
                Mode::Check,
                say,
            )?;
            Ok(digests.len())
        });
        match outcome {
            Ok(count) => {
                self.tally.passed += 1;
                let took = time(self.screen.elapsed() - begin);
                self.screen.say(&format!(
                    "digests of {count} packages of kernels hold ({took})"
                ));
            }
            Err(error) => self.fail(&error),
        }
    }

    /// Checks the kernels of the second code generator, if there is a checkout.
    fn nvvm(&mut self, checkout: Option<OsString>, check: impl FnOnce(&Path) -> Result<()>) {
        let Some(checkout) = checkout.filter(|path| !path.is_empty()) else {
            self.screen
                .say(&format!("skipped: {RUST_CUDA} names no rust-cuda checkout"));
            self.tally.skipped += 1;
            match build_ptx::stale_digests(&self.places.root) {
                Ok(stale) => stale.iter().for_each(|line| self.screen.say(line)),
                Err(error) => self.fail(&error),
            }
            return;
        };
        match check(Path::new(&checkout)) {
            Ok(()) => self.tally.passed += 1,
            Err(error) => self.fail(&error),
        }
    }

    fn fail(&mut self, error: &anyhow::Error) {
        self.tally.failed += 1;
        self.screen.say(&format!("FAILED: {error:#}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_checkout_of_rust_cuda_a_test_counts_as_skipped() {
        let scratch = tempfile::tempdir().unwrap();
        let folder = scratch.path();
        let (places, screen) = (Places::find(), Screen::default());
        let log = Log::create(folder, "nvvm").unwrap();
        for (checkout, wanted) in [
            (None, [0, 0, 1]),
            (Some(""), [0, 0, 1]),
            (Some("there"), [1, 0, 0]),
            (Some("differs"), [0, 1, 0]),
        ] {
            let mut run = Run {
                places: &places,
                screen: &screen,
                log: &log,
                tally: Tally::default(),
            };
            run.nvvm(checkout.map(OsString::from), |path| {
                anyhow::ensure!(path == Path::new("there"), "it differs");
                Ok(())
            });
            let Tally {
                passed,
                failed,
                skipped,
            } = run.tally;
            assert_eq!([passed, failed, skipped], wanted);
        }
    }
}
