//! Programs of tests: cargo builds them, and each runs as soon as it is there, beside the builds of the next.

use std::io::{self, BufRead as _, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus, Stdio};
use std::sync::mpsc;
use std::thread;

use serde_json::Value;

use crate::cargo::{WORKSPACE_FEATURES, cargo};
use crate::log::Log;
use crate::printed::{Report, seed};
use crate::screen::{Screen, time};
use crate::watched::watch;

/// Numbers of tests by outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Tests that passed.
    pub passed: u64,
    /// Tests that failed, and builds, which count as one.
    pub failed: u64,
    /// Tests that were left out.
    pub skipped: u64,
}

impl Tally {
    fn add(&mut self, report: &Report) {
        let [passed, failed, skipped] = report.counts;
        self.passed += passed;
        self.failed += failed + u64::from(!report.is_whole);
        self.skipped += skipped;
    }

    /// The line with the numbers.
    pub fn summary(&self) -> String {
        format!(
            "ferry: {} passed, {} failed, {} skipped",
            self.passed, self.failed, self.skipped
        )
    }

    /// The exit code of these outcomes.
    pub fn exit_code(&self) -> ExitCode {
        if self.failed == 0 {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        }
    }
}

/// A set of suites in one set of features.
pub struct Suites<'a> {
    /// The workspace.
    pub root: &'a Path,
    /// Destination of a line for each suite.
    pub screen: &'a Screen,
    /// Destination of all output.
    pub log: &'a Log,
    /// Arguments of cargo: packages, targets, features.
    pub selection: &'a [&'a str],
    /// Arguments of the programs: names of tests.
    pub filters: &'a [&'a str],
    /// Variables of cargo and of the programs.
    pub variables: &'a [(&'a str, std::ffi::OsString)],
}

/// A program of tests.
struct Program {
    package: String,
    /// Arguments of cargo that name it among its package's targets.
    target: Vec<String>,
    executable: PathBuf,
    /// The package's folder, in which cargo runs tests.
    folder: PathBuf,
}

impl Program {
    /// Reads one of cargo's messages.
    fn of(message: &Value) -> Option<Self> {
        let executable = PathBuf::from(message["executable"].as_str()?);
        if message["profile"]["test"] != true {
            return None;
        }
        let target = &message["target"];
        let (kind, name) = (target["kind"][0].as_str()?, target["name"].as_str()?);
        let target = match kind {
            "test" | "bin" | "example" => vec![format!("--{kind}"), name.to_owned()],
            _ => vec![String::from("--lib")],
        };
        let manifest = Path::new(message["manifest_path"].as_str()?);
        // `path+file:///folder#name@version`, without the name where the folder has it.
        let id = message["package_id"].as_str()?;
        let after = id.rsplit(['#', '/']).next()?;
        let folder = manifest.parent()?.to_owned();
        let package = match after.split_once('@') {
            Some((name, _)) => name.to_owned(),
            None => folder.file_name()?.to_str()?.to_owned(),
        };
        Some(Program {
            package,
            target,
            executable,
            folder,
        })
    }

    /// Its package, and its own name if it is no library.
    fn title(&self) -> String {
        match &self.target[..] {
            [_, name] if *name != self.package => format!("{} {name}", self.package),
            _ => self.package.clone(),
        }
    }
}

impl Suites<'_> {
    /// Builds and runs the suites, and prints a line for each, and failures.
    ///
    /// # Errors
    ///
    /// Cargo or a program cannot be run.
    pub fn run(&self, tally: &mut Tally) -> io::Result<()> {
        self.screen.during(|| {
            let mut build = self.cargo(&["--no-run", "--message-format=json-render-diagnostics"]);
            let mut build = build
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()?;
            let (messages, said) = (build.stdout.take(), build.stderr.take());
            let (Some(messages), Some(said)) = (messages, said) else {
                return Err(io::Error::other("cargo has no output"));
            };
            let (built, to_run) = mpsc::channel();
            let (rest, ran) = thread::scope(|scope| {
                let said = scope.spawn(|| watch(said, self.screen, self.log));
                let running = scope.spawn(move || {
                    let mut tally = Tally::default();
                    for program in to_run {
                        self.run_program(&program, &mut tally)?;
                    }
                    io::Result::Ok(tally)
                });
                let read = read_messages(messages, &built);
                drop(built);
                let join = "no thread here panics";
                (
                    read.and(said.join().expect(join)),
                    running.join().expect(join),
                )
            });
            let ran = ran?;
            tally.passed += ran.passed;
            tally.failed += ran.failed;
            tally.skipped += ran.skipped;
            if !build.wait()?.success() {
                tally.failed += 1;
                self.screen.say(&rest?.join("\n"));
                self.screen.say("FAILED: these tests do not compile");
            }
            Ok(())
        })
    }

    /// Runs the documentation's programs, and prints a line with their number, and failures.
    ///
    /// # Errors
    ///
    /// Cargo cannot be run.
    pub fn run_doctests(&self, tally: &mut Tally) -> io::Result<()> {
        self.screen.during(|| {
            let begin = self.screen.elapsed();
            let mut cargo = self.cargo(&["--doc"]);
            self.screen.under_way("programs of the documentation");
            let (report, status, rest) = self.output_of(&mut cargo, "documentation")?;
            tally.add(&report);
            self.say_outcome("documentation", &report, begin);
            for failure in &report.failures {
                self.say_failure(&failure.output, &failure.test, "cargo test --doc");
            }
            if !status.success() && report.counts[1] == 0 {
                tally.failed += 1;
                self.screen.say(&rest.join("\n"));
            }
            Ok(())
        })
    }

    /// `cargo test` of the selection. Without incremental files: their small units of code make the suites
    /// take 1.7 times as long.
    fn cargo(&self, arguments: &[&str]) -> Command {
        let mut cargo = cargo();
        cargo
            .args(["test", "--no-fail-fast"])
            .args(WORKSPACE_FEATURES)
            .args(self.selection)
            .args(arguments)
            .env("CARGO_INCREMENTAL", "0")
            .envs(self.variables.iter().cloned())
            .current_dir(self.root);
        cargo
    }

    fn run_program(&self, program: &Program, tally: &mut Tally) -> io::Result<()> {
        let begin = self.screen.elapsed();
        let title = program.title();
        self.log
            .line(&format!("== {title}: {}", program.executable.display()));
        let mut command = Command::new(&program.executable);
        command
            .args(self.filters)
            .current_dir(&program.folder)
            .env("CARGO_MANIFEST_DIR", &program.folder)
            .envs(self.variables.iter().cloned());
        let (report, status, rest) = self.output_of(&mut command, &title)?;
        tally.add(&report);
        self.say_outcome(&title, &report, begin);
        let repeat = format!(
            "cargo test -p {} {}",
            program.package,
            program.target.join(" ")
        );
        for failure in &report.failures {
            self.say_failure(&failure.output, &failure.test, &repeat);
        }
        if !report.is_whole {
            let last = rest.len().saturating_sub(20);
            self.screen.say(&rest[last..].join("\n"));
            self.screen.say(&format!(
                "FAILED: {title} ended with {status}; again: {repeat}"
            ));
        }
        Ok(())
    }

    /// Runs a program of tests: its report, how it ended, and its lines on standard error.
    fn output_of(
        &self,
        command: &mut Command,
        title: &str,
    ) -> io::Result<(Report, ExitStatus, Vec<String>)> {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let (printed, said) = (child.stdout.take(), child.stderr.take());
        let mut report = Report::default();
        let rest = thread::scope(|scope| {
            let said = scope.spawn(|| said.map_or(Ok(Vec::new()), |said| lines_of(said, self.log)));
            for line in BufReader::new(printed.into_iter().next().expect("it is piped")).lines() {
                let line = line?;
                self.log.line(&line);
                report.line(&line);
                self.screen
                    .under_way(format!("{title}: {} tests have ended", report.ended));
            }
            said.join().expect("no thread here panics")
        })?;
        Ok((report, child.wait()?, rest))
    }

    fn say_outcome(&self, title: &str, report: &Report, begin: std::time::Duration) {
        let [passed, failed, skipped] = report.counts;
        if passed + failed + skipped == 0 {
            return;
        }
        let mut line = format!("{title:32} {passed:5} passed");
        for (count, what) in [(failed, "FAILED"), (skipped, "skipped")] {
            if count > 0 {
                line += &format!(", {count} {what}");
            }
        }
        let took = time(self.screen.elapsed() - begin);
        self.screen.say(&format!("{line:60} {took:>10}"));
    }

    fn say_failure(&self, output: &[String], test: &str, repeat: &str) {
        let seed = seed(output).map_or(String::new(), |seed| format!("FERRY_SEED={seed} "));
        self.screen.say(&format!(
            "FAILED: {test}\n{}\nagain: {seed}{repeat} -- --exact {test}\n",
            output.join("\n")
        ));
    }
}

/// Reads cargo's messages, and hands on the programs of tests as they are built.
fn read_messages(messages: impl Read, built: &mpsc::Sender<Program>) -> io::Result<()> {
    for line in BufReader::new(messages).lines() {
        let message: Value = serde_json::from_str(&line?)?;
        if let Some(program) = Program::of(&message) {
            // Nobody takes it if running the one before failed.
            let _ = built.send(program);
        }
    }
    Ok(())
}

/// Logs and returns all lines.
fn lines_of(printed: impl Read, log: &Log) -> io::Result<Vec<String>> {
    let lines = BufReader::new(printed).lines();
    lines
        .inspect(|line| {
            if let Ok(line) = line {
                log.line(line);
            }
        })
        .collect()
}
