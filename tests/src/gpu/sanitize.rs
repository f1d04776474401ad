//! The acceptance tests under the tools of compute-sanitizer: one rank, or ranks that share a GPU; few
//! tokens, so much time for each tool.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

const PROGRAM: &str = "compute-sanitizer";
/// Folder of the CUDA toolkit that has it, if it is not in PATH.
const TOOLKIT: &str = "/usr/local/cuda/bin";
/// Exit code if it found something: none of the tests' own.
const FOUND: &str = "99";

/// Tests of one rank, by parts of their names: small ones, of every kind.
const NAMES: [&str; 14] = [
    "64 tokens",
    "1 token,",
    "no tokens,",
    "tokens halve",
    "by row, 128",
    "128 tokens, 8 multiprocessors",
    "no weights",
    "rounds back to back",
    "a graph replayed",
    "two communicators",
    "fused SiLU",
    "does not exist",
    "too small",
    "work afterwards",
];

/// A test of several ranks that has a single small round, for the tool that is slow with them.
const ROUND: &str = "work afterwards";

/// A tool of compute-sanitizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Tool {
    /// Accesses outside of allocations
    Memcheck,
    /// Races in shared memory
    Racecheck,
    /// Barriers that not all threads reach
    Synccheck,
    /// Reads of what nobody wrote
    Initcheck,
}

impl Tool {
    const ALL: [Self; 4] = [
        Self::Memcheck,
        Self::Racecheck,
        Self::Synccheck,
        Self::Initcheck,
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::Memcheck => "memcheck",
            Self::Racecheck => "racecheck",
            Self::Synccheck => "synccheck",
            Self::Initcheck => "initcheck",
        }
    }

    /// Each option has a value.
    fn options(self) -> Vec<&'static str> {
        let mut options = vec!["--tool", self.name(), "--error-exitcode", FOUND];
        options.extend(["--print-limit", "20"]);
        if self == Self::Memcheck {
            // Calls that may fail are made, and what they return is looked at.
            options.extend(["--report-api-errors", "no"]);
        }
        options
    }
}

/// Run the acceptance tests on one GPU under the tools of compute-sanitizer
///
/// Needs compute-sanitizer of a CUDA installation. It fails if a tool finds something, or if none of its
/// tests ran.
#[derive(clap::Args, Clone, Debug)]
#[command(verbatim_doc_comment)]
pub struct SanitizeArgs {
    /// Seconds for each tool; what it has not done then is cut short
    #[arg(long, value_name = "N", default_value_t = 100)]
    seconds: u64,
    /// Only these tools [default: all]
    #[arg(long, value_enum)]
    tool: Vec<Tool>,
    /// Only tests whose name contains this; may be given several times [default: small tests of every kind;
    /// of several ranks, the quick suite, and one round under racecheck]
    #[arg(long, value_name = "TEXT")]
    filter: Vec<String>,
    /// Number of ranks
    #[arg(long, value_name = "N", default_value_t = 1)]
    ranks: usize,
    /// Let ranks share the GPUs that are there
    #[arg(long)]
    share_gpus: bool,
    /// Place of the ranks
    #[arg(long, default_value = "local", hide = true)]
    group: String,
}

/// Runs the tests under each tool. An error if one found something, or if none of its tests ran.
pub fn run(args: &SanitizeArgs) -> Result<()> {
    let sanitizer = find()?;
    let itself = std::env::current_exe().context("finding this program")?;
    let tools = if args.tool.is_empty() {
        &Tool::ALL[..]
    } else {
        &args.tool
    };
    let mut failed = 0;
    for &tool in tools {
        let tests = args.tests(tool);
        let names = names(&tests, &itself)?;
        let mut command = Command::new(&sanitizer);
        command.args(tool.options()).arg(&itself).args(&tests);
        // The tests stop by themselves, so that the tool can say what it found; if they do not,
        // they are stopped.
        command.args(["--seconds", &(args.seconds * 4 / 5).to_string()]);
        let seen = watch(command, Duration::from_secs(args.seconds))?;
        let verdict = seen.verdict(&names);
        let word = if verdict.is_ok() { "ok  " } else { "FAIL" };
        println!("{word} {}: {}", tool.name(), seen.summary(&names));
        if let Err(error) = verdict {
            failed += 1;
            println!("     {error:#}");
        }
    }
    println!(
        "{} passed, {failed} failed, 0 skipped",
        tools.len() - failed
    );
    ensure!(failed == 0, "{failed} of {} tools failed", tools.len());
    Ok(())
}

/// Finds the program.
fn find() -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain([PathBuf::from(TOOLKIT)]);
    let mut programs = folders.map(|folder| folder.join(PROGRAM));
    let found = programs.find(|program| program.is_file());
    found.with_context(|| {
        format!(
            "{PROGRAM} is neither in PATH nor in {TOOLKIT}; it is part of the CUDA toolkit \
             (package cuda-sanitizer)"
        )
    })
}

impl SanitizeArgs {
    /// The test program's arguments. Tools make kernels many times slower, so nobody gives up soon.
    fn tests(&self, tool: Tool) -> Vec<String> {
        let fixed = format!(
            "gpu --group {} --ranks {} --quick --general --rounds 16 --deadline 100",
            self.group, self.ranks
        );
        let mut tests: Vec<String> = fixed.split(' ').map(str::to_owned).collect();
        tests.extend(self.share_gpus.then(|| "--share-gpus".to_owned()));
        for filter in self.filters(tool) {
            tests.extend(["--filter".to_owned(), filter.to_owned()]);
        }
        tests
    }

    /// Parts of the names of the tests to run; none for all.
    fn filters(&self, tool: Tool) -> Vec<&str> {
        match (self.filter.is_empty(), self.ranks, tool) {
            (false, ..) => self.filter.iter().map(String::as_str).collect(),
            (true, 1, _) => NAMES.to_vec(),
            (true, _, Tool::Racecheck) => vec![ROUND],
            (true, ..) => Vec::new(),
        }
    }
}

/// Names of the tests that are to run.
fn names(tests: &[String], itself: &Path) -> Result<Vec<String>> {
    let output = Command::new(itself)
        .args(tests)
        .arg("--list")
        .stderr(Stdio::inherit())
        .output()
        .context("listing the tests")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(
        output.status.success(),
        "listing the tests: {}\n{text}",
        output.status
    );
    let names: Vec<String> = text.lines().map(str::to_owned).collect();
    if names.is_empty() || names[0].starts_with("skip") {
        bail!("there is no test to run: {text}");
    }
    Ok(names)
}

/// Output of a tool and the tests, and how they ended.
#[derive(Debug, Default)]
struct Seen {
    lines: Vec<String>,
    /// End that it came to by itself: whether well, and as what.
    ended: Option<(bool, String)>,
    seconds: f64,
}

/// Runs a command, hands on what it prints, and stops it and what it started when the time is over.
fn watch(mut command: Command, most: Duration) -> Result<Seen> {
    let start = Instant::now();
    let mut child = command
        .stdout(Stdio::piped())
        .process_group(0)
        .spawn()
        .with_context(|| format!("starting {:?}", command.get_program()))?;
    let lines = listen(&mut child)?;
    let mut seen = Seen::default();
    while start.elapsed() < most {
        match lines.recv_timeout(most.saturating_sub(start.elapsed())) {
            Ok(line) => {
                println!("{line}");
                seen.lines.push(line);
            }
            Err(RecvTimeoutError::Timeout) => break,
            // It has nothing more to say, and is about to end.
            Err(RecvTimeoutError::Disconnected) => {
                if let Some(status) = child.try_wait().context("waiting for the tool")? {
                    seen.ended = Some((status.success(), status.to_string()));
                    break;
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }
    if seen.ended.is_none() {
        stop(&mut child)?;
        seen.lines.extend(lines.try_iter());
    }
    seen.seconds = start.elapsed().as_secs_f64();
    Ok(seen)
}

fn listen(child: &mut Child) -> Result<Receiver<String>> {
    let printed = child.stdout.take().context("the tool has no output")?;
    let (sender, lines) = channel();
    std::thread::spawn(move || {
        let lines = BufReader::new(printed).split(b'\n').map_while(Result::ok);
        for line in lines.map(|line| String::from_utf8_lossy(&line).into_owned()) {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    Ok(lines)
}

/// Kills the process group that the child leads.
fn stop(child: &mut Child) -> Result<()> {
    let kill = format!("kill -9 -{}", child.id());
    let status = Command::new("sh").args(["-c", &kill]).status();
    status.with_context(|| kill)?;
    child.wait().context("waiting for the tool")?;
    Ok(())
}

impl Seen {
    /// The tests that came to an end.
    fn ran<'a>(&self, names: &'a [String]) -> BTreeSet<&'a str> {
        let is_of = |line: &str, name: &str| {
            let result = ["ok   ", "FAIL ", "skip "]
                .iter()
                .find_map(|word| line.strip_prefix(word));
            result.is_some_and(|rest| {
                rest.strip_prefix(name)
                    .is_some_and(|rest| rest.starts_with(" ("))
            })
        };
        let has_run = |name: &&str| self.lines.iter().any(|line| is_of(line, name));
        names.iter().map(String::as_str).filter(has_run).collect()
    }

    fn summary(&self, names: &[String]) -> String {
        let ran = self.ran(names);
        let mut text = format!("{} tests ran in {:.0} s", ran.len(), self.seconds);
        let cut: Vec<&str> = names
            .iter()
            .map(String::as_str)
            .filter(|name| !ran.contains(name))
            .collect();
        if !cut.is_empty() {
            text += &format!("; cut short, {} not run: {}", cut.len(), cut.join("; "));
        }
        text
    }

    fn verdict(&self, names: &[String]) -> Result<()> {
        match &self.ended {
            Some((true, _)) => {}
            Some((false, status)) => {
                bail!("it ended with {status} ({FOUND}: the tool found something)")
            }
            None => {
                if let Some(line) = self.lines.iter().find(|line| is_finding(line)) {
                    bail!("the tool found something before it was stopped: {line}");
                }
                if let Some(line) = self.lines.iter().find(|line| line.starts_with("FAIL ")) {
                    bail!("a test failed before the tool was stopped: {line}");
                }
            }
        }
        ensure!(!self.ran(names).is_empty(), "no test came to an end");
        Ok(())
    }
}

/// Whether a line of a tool tells of something found, or explains it.
fn is_finding(line: &str) -> bool {
    const HARMLESS: [&str; 5] = [
        "COMPUTE-SANITIZER",
        "ERROR SUMMARY: 0 ",
        "RACECHECK SUMMARY: 0 ",
        "LEAK SUMMARY: 0 ",
        "Warning",
    ];
    line.strip_prefix("=========").is_some_and(|text| {
        let text = text.trim();
        !text.is_empty() && !HARMLESS.iter().any(|start| text.starts_with(start))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names() -> Vec<String> {
        ["a round", "a round of two", "another"]
            .map(String::from)
            .into()
    }

    fn seen(lines: &[&str], ended: Option<(bool, String)>) -> Seen {
        Seen {
            lines: lines.iter().copied().map(String::from).collect(),
            ended,
            seconds: 12.0,
        }
    }

    #[test]
    fn ranks_that_share_a_gpu_run_the_quick_suite_and_one_round_under_the_slow_tool() {
        #[derive(clap::Parser)]
        struct Arguments {
            #[command(flatten)]
            sanitize: SanitizeArgs,
        }
        let tests = |text: &str, tool| {
            let words = std::iter::once("sanitize").chain(text.split_whitespace());
            <Arguments as clap::Parser>::parse_from(words)
                .sanitize
                .tests(tool)
                .join(" ")
        };
        let two = "--ranks 2 --share-gpus";
        let fixed = "--quick --general --rounds 16 --deadline 100 --share-gpus";
        let gpu = format!("gpu --group local --ranks 2 {fixed}");
        assert_eq!(tests(two, Tool::Memcheck), gpu);
        assert_eq!(
            tests(two, Tool::Racecheck),
            format!("{gpu} --filter {ROUND}")
        );
        let named = format!("{two} --filter rounds");
        assert_eq!(
            tests(&named, Tool::Racecheck),
            format!("{gpu} --filter rounds")
        );
        assert_eq!(
            tests("", Tool::Racecheck).matches("--filter").count(),
            NAMES.len()
        );
    }

    #[test]
    fn what_was_cut_short_is_named() {
        let lines = [
            "========= COMPUTE-SANITIZER",
            "ok   a round of two (7 ms): 3",
        ];
        let seen = seen(&lines, None);
        assert_eq!(
            seen.summary(&names()),
            "1 tests ran in 12 s; cut short, 2 not run: a round; another"
        );
        assert!(seen.verdict(&names()).is_ok());
    }

    #[test]
    fn what_a_tool_found_fails_it() {
        let well = |lines: &[&str]| seen(lines, None).verdict(&names()).is_ok();
        let ran = "ok   a round (7 ms)";
        assert!(well(&[ran, "========= ERROR SUMMARY: 0 errors"]));
        assert!(!well(&[
            ran,
            "========= Invalid __global__ read of size 4 bytes"
        ]));
        assert!(!well(&[ran, "========= ERROR SUMMARY: 3 errors"]));
        assert!(!well(&[ran, "FAIL another (3 ms): differs"]));
        let ended = |success| seen(&[ran], Some((success, "exit status: 99".into())));
        assert!(ended(true).verdict(&names()).is_ok());
        assert!(ended(false).verdict(&names()).is_err());
    }

    #[test]
    fn a_tool_under_which_nothing_ran_has_shown_nothing() {
        assert!(seen(&[], None).verdict(&names()).is_err());
        assert!(
            seen(&[], Some((true, String::new())))
                .verdict(&names())
                .is_err()
        );
    }

    #[test]
    fn what_takes_too_long_is_stopped_with_what_it_started() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo begun; sleep 600 & sleep 600"]);
        let seen = watch(command, Duration::from_secs(1)).unwrap();
        assert_eq!(seen.lines, ["begun"]);
        assert!(seen.ended.is_none() && seen.seconds < 60.0, "{seen:?}");
    }
}
