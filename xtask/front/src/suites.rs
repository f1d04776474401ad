//! Programs of tests: cargo builds them, and each runs as soon as it is there, beside the builds of the next.

use std::env;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use serde_json::Value;

use crate::cargo::{WORKSPACE_FEATURES, cargo};
use crate::lines::{Line, each};
use crate::log::Log;
use crate::printed::{Failure, Report, seed};
use crate::screen::{Screen, time};
use crate::watched::Messages;

/// Variable of test programs: how many tests run at a time. Else as many as there are processors.
const THREADS: &str = "RUST_TEST_THREADS";
/// Tests at a time that are more than there are processors: some only wait for a deadline.
const WAITING: usize = 2;

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
    fn add(&mut self, other: Tally) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
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
    pub variables: &'a [(&'a str, OsString)],
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

/// A program of tests that has ended.
struct Ended {
    report: Report,
    status: ExitStatus,
    /// Its lines on standard error.
    said: Vec<String>,
    took: Duration,
}

impl Ended {
    /// Whether it ended as a program whose tests ended as reported.
    fn is_explained(&self) -> bool {
        self.report.is_whole && (self.status.success() || self.report.counts[1] > 0)
    }

    /// Its tests by outcome. An end that they do not explain, a crash for example, is a failure.
    fn tally(&self) -> Tally {
        let [passed, failed, skipped] = self.report.counts;
        Tally {
            passed,
            failed: failed + u64::from(!self.is_explained()),
            skipped,
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
            let (built, to_run) = mpsc::channel();
            let (build, ran) = thread::scope(|scope| {
                let running = scope.spawn(move || {
                    let mut tally = Tally::default();
                    for program in to_run {
                        tally.add(self.run_program(&program)?);
                    }
                    io::Result::Ok(tally)
                });
                let build = self.build(built);
                (build, running.join().expect("no thread here panics"))
            });
            tally.add(ran?);
            let (status, rest) = build?;
            if !status.success() {
                tally.failed += 1;
                self.screen.say(&rest.join("\n"));
                self.screen.say("FAILED: these tests do not compile");
            }
            Ok(())
        })
    }

    /// Builds the programs, and hands each on when it is there.
    fn build(&self, built: mpsc::Sender<Program>) -> io::Result<(ExitStatus, Vec<String>)> {
        let mut cargo = self.cargo(&["--no-run", "--message-format=json-render-diagnostics"]);
        let mut messages = Messages::new(self.screen, self.log);
        let status = each(piped(&mut cargo)?, |line| match line {
            Line::Error(line) => messages.line(line),
            // Wrappers of the compiler and macros may print other lines.
            Line::Out(line) => match serde_json::from_str(&line) {
                Ok(message) => {
                    if let Some(program) = Program::of(&message) {
                        // Nobody takes it if running the one before failed.
                        let _ = built.send(program);
                    }
                }
                Err(_) => self.log.line(&line),
            },
        })?;
        Ok((status, messages.rest))
    }

    /// Runs the documentation's programs, and prints a line with their number, and failures.
    ///
    /// # Errors
    ///
    /// Cargo cannot be run.
    pub fn run_doctests(&self, tally: &mut Tally) -> io::Result<()> {
        self.screen.during(|| {
            self.screen.under_way("programs of the documentation");
            let ended = self.output_of(&mut self.cargo(&["--doc"]), "documentation")?;
            tally.add(ended.tally());
            self.say_ended("documentation", &ended, &self.again(None));
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

    fn run_program(&self, program: &Program) -> io::Result<Tally> {
        let title = program.title();
        self.log
            .line(&format!("== {title}: {}", program.executable.display()));
        let mut command = Command::new(&program.executable);
        command
            .args(self.filters)
            .current_dir(&program.folder)
            .env("CARGO_MANIFEST_DIR", &program.folder)
            .envs(self.variables.iter().cloned());
        if env::var_os(THREADS).is_none() {
            let processors = thread::available_parallelism().map_or(1, usize::from);
            command.env(THREADS, (processors + WAITING).to_string());
        }
        let ended = self.output_of(&mut command, &title)?;
        self.say_ended(&title, &ended, &self.again(Some(program)));
        Ok(ended.tally())
    }

    /// The command that runs a program again, or the documentation's, with its features.
    fn again(&self, program: Option<&Program>) -> String {
        let variables = self.variables.iter();
        // Seeds have a variable of their own.
        let variables = variables.filter(|(name, _)| !name.starts_with("FERRY_"));
        let mut words: Vec<String> = variables
            .map(|(name, value)| format!("{name}={}", quoted(&value.to_string_lossy())))
            .collect();
        words.push(String::from("cargo xtask test --"));
        match program {
            Some(program) if self.selection == ["--workspace"] => {
                words.extend([String::from("-p"), program.package.clone()]);
            }
            _ => words.extend(self.selection.iter().map(|word| word.to_string())),
        }
        match program {
            Some(program) => words.extend(program.target.iter().cloned()),
            None => words.push(String::from("--doc")),
        }
        words.join(" ")
    }

    /// Runs a program of tests to its end.
    fn output_of(&self, command: &mut Command, title: &str) -> io::Result<Ended> {
        let begin = self.screen.elapsed();
        let (mut reports, mut said) = (vec![Report::default()], Vec::new());
        let status = each(piped(command.stdin(Stdio::null()))?, |line| match line {
            Line::Error(line) => {
                self.log.line(&line);
                said.push(line);
            }
            Line::Out(line) => {
                self.log.line(&line);
                // Cargo runs the documentation of one crate after the other.
                if line.starts_with("running ") && reports.last().is_some_and(|last| last.is_whole)
                {
                    reports.push(Report::default());
                }
                if let Some(report) = reports.last_mut() {
                    report.line(&line);
                }
                let ended: u64 = reports.iter().map(|report| report.ended).sum();
                self.screen
                    .under_way(format!("{title}: {ended} tests have ended"));
            }
        })?;
        let mut report = Report::default();
        for mut one in reports {
            one.end();
            report.add(one);
        }
        Ok(Ended {
            report,
            status,
            said,
            took: self.screen.elapsed() - begin,
        })
    }

    fn say_ended(&self, title: &str, ended: &Ended, again: &str) {
        let [passed, failed, skipped] = ended.report.counts;
        if passed + failed + skipped > 0 {
            let mut line = format!("{title:32} {passed:5} passed");
            for (count, what) in [(failed, "FAILED"), (skipped, "skipped")] {
                if count > 0 {
                    line += &format!(", {count} {what}");
                }
            }
            self.screen
                .say(&format!("{line:60} {:>10}", time(ended.took)));
        }
        for Failure { test, output } in &ended.report.failures {
            let seed = seed(output).map_or(String::new(), |seed| format!("FERRY_SEED={seed} "));
            self.screen.say(&format!(
                "FAILED: {test}\n{}\nagain: {seed}{again} -- --exact {}\n",
                output.join("\n"),
                quoted(test)
            ));
        }
        if !ended.is_explained() {
            let last = ended.said.len().saturating_sub(20);
            self.screen.say(&format!(
                "{}\nFAILED: {title} ended with {}\nagain: {again}",
                ended.said[last..].join("\n"),
                ended.status
            ));
        }
    }
}

/// Starts a program whose output is read.
fn piped(command: &mut Command) -> io::Result<std::process::Child> {
    command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
}

/// A word for a shell.
fn quoted(word: &str) -> String {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "_-:/.,=+".contains(letter);
    match word.chars().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cargo::{root, target_dir};

    /// A program of tests that prints and ends like this.
    fn ended(script: &str) -> Ended {
        let (root, screen) = (root(), Screen::default());
        let log = Log::create(&target_dir(), "test-of-suites").unwrap();
        let suites = Suites {
            root: &root,
            screen: &screen,
            log: &log,
            selection: &["--workspace"],
            filters: &[],
            variables: &[],
        };
        suites
            .output_of(Command::new("sh").args(["-c", script]), "a shell")
            .unwrap()
    }

    #[test]
    fn a_crash_is_a_failure_whatever_was_printed() {
        let right = "echo 'test result: ok. 2 passed; 0 failed; 1 ignored'";
        let tally = |script: &str| {
            let Tally {
                passed,
                failed,
                skipped,
            } = ended(script).tally();
            [passed, failed, skipped]
        };
        assert_eq!(tally(right), [2, 0, 1]);
        assert_eq!(tally(&format!("{right}; kill -SEGV $$")), [2, 1, 1]);
        assert_eq!(tally(&format!("{right}; exit 3")), [2, 1, 1]);
        assert_eq!(tally("exit 0"), [0, 1, 0]);
        let failed = "echo 'test result: FAILED. 2 passed; 1 failed; 0 ignored'; exit 101";
        assert_eq!(tally(failed), [2, 1, 0]);
        let two = format!("echo running 3 tests; {right}; echo running 3 tests; {right}");
        assert_eq!(tally(&two), [4, 0, 2]);
    }

    #[test]
    fn words_are_quoted_for_a_shell() {
        assert_eq!(quoted("a::b"), "a::b");
        assert_eq!(
            quoted("host/src/lib.rs - (line 12)"),
            "'host/src/lib.rs - (line 12)'"
        );
        assert_eq!(quoted("it's"), "'it'\\''s'");
    }
}
