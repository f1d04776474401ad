//! The acceptance tests: many shapes and ways on a real group, bit for bit against the oracle.

mod at_once;
#[cfg(feature = "candle")]
mod candle;
mod cases;
#[cfg(feature = "cuda")]
mod conversions;
mod counted;
#[cfg(feature = "cudarc")]
mod cudarc;
#[cfg(feature = "cust")]
mod cust;
mod damaged;
mod epilogue;
pub mod exact;
mod faults;
#[cfg(feature = "cuda")]
mod held;
mod invalid;
pub mod killed;
mod late;
mod links;
mod local;
#[cfg(feature = "cudarc")]
mod moe_layer;
#[cfg(any(feature = "cudarc", feature = "cust"))]
mod on_devices;
#[cfg(feature = "cuda")]
mod orders;
#[cfg(feature = "cuda")]
mod out_of_turn;
mod rounds;
pub mod sanitize;
#[cfg(feature = "cuda")]
mod shared;
mod silu;
mod stalled;
mod two;
mod written;

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ferry::{Config, Group, Rank};
use ferry_reference::Problem;
use ferry_reference::workload::Routing;

use crate::group::{GroupArgs, GroupKind, GroupOptions, OpenGroup, gpus, open};
use crate::kernel_files::KernelFiles;
#[cfg(feature = "cuda")]
use crate::probes::ProbePtx;
use crate::sharing;
use ferry_rig::{Session, Settings};

/// Run the acceptance tests on GPUs (or, to try them out, in the simulator)
///
/// With --group node and nvshmem every process is a rank: start one for each, with mpirun or with
/// --rendezvous and --rank. Local and simulated ranks are all in this process. `ferry-tests all` runs it in
/// every kind of group.
#[derive(clap::Args, Debug)]
#[command(verbatim_doc_comment)]
pub struct GpuArgs {
    /// Place of the ranks
    #[arg(long, value_enum, default_value = "local")]
    pub group: GroupKind,
    /// Ranks of a local or simulated group [default: all GPUs; 4 in the simulator]
    #[arg(long, value_name = "N")]
    ranks: Option<usize>,
    /// Fail if this machine has fewer GPUs
    #[arg(long, value_name = "N")]
    require_gpus: Option<usize>,
    /// Smaller shapes and fewer rounds
    #[arg(long)]
    quick: bool,
    /// Only the kernels for all shapes: compiling some for a shape takes seconds
    #[arg(long)]
    general: bool,
    /// Only tests whose name contains this; may be given several times, for tests with any of them
    #[arg(long, value_name = "TEXT")]
    filter: Vec<String>,
    /// Leave out tests whose name contains this; may be given several times
    #[arg(long, value_name = "TEXT")]
    skip: Vec<String>,
    /// Runs only each N-th of the tests that are left, from the K-th on, so that N programs share them
    #[arg(long, value_name = "K/N")]
    part: Option<Part>,
    /// Only print the tests' names
    #[arg(long)]
    list: bool,
    /// Begin no further test after so many seconds, and say how many were not run
    #[arg(long, value_name = "N")]
    seconds: Option<u64>,
    /// Longest wait of a kernel where nobody is missing, in seconds
    #[arg(long, value_name = "N", default_value_t = 20)]
    deadline: u64,
    /// Rounds back to back without a reset
    #[arg(long, default_value_t = 1000)]
    rounds: usize,
    /// Seed of inputs, delays and the simulator
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Write a JSON line for every test
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Way that ranks have GPUs, and processes meet.
    #[command(flatten)]
    pub group_args: GroupArgs,
    /// PTX in place of the embedded one.
    #[command(flatten)]
    pub(crate) files: KernelFiles,
}

impl GpuArgs {
    /// Options of a group of so many ranks.
    fn group_options(&self, ranks: usize) -> GroupOptions {
        GroupOptions {
            kind: self.group,
            ranks,
            seed: self.seed,
            args: self.group_args.clone(),
            files: self.files.clone(),
        }
    }

    /// Whether a test of this name is run.
    fn wants(&self, name: &str) -> bool {
        let has_any = |texts: &[String]| texts.iter().any(|text| name.contains(text.as_str()));
        let fits = |node| name.contains(&format!(", {node} a node"));
        (self.filter.is_empty() || has_any(&self.filter))
            && !has_any(&self.skip)
            && self.group_args.node.is_none_or(fits)
    }
}

/// Each `of`-th test from number `first`, which counts from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part {
    first: usize,
    of: usize,
}

impl Part {
    /// Whether the test of this number, from 0, is one of them.
    const fn has(self, number: usize) -> bool {
        number % self.of == self.first - 1
    }
}

impl FromStr for Part {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let numbers = text
            .split_once('/')
            .map(|(first, of)| (first.parse(), of.parse()));
        match numbers {
            Some((Ok(first), Ok(of))) if (1..=of).contains(&first) => Ok(Self { first, of }),
            _ => bail!("{text} is not K/N with K from 1 to N"),
        }
    }
}

/// Longest wait of a kernel where somebody is missing, of ranks that have a GPU each.
const SHORT_DEADLINE: Duration = Duration::from_millis(500);

/// End of a test that did not fail.
enum Outcome {
    Passed,
    /// Skipped, with the reason.
    Skipped(String),
    /// Passed, with what was measured.
    Measured(String),
}

/// Runs tests one after another, on all processes of a group together.
struct Suite<'a> {
    args: &'a GpuArgs,
    open: OpenGroup,
    /// PTX of the kernels that convert and write.
    #[cfg(feature = "cuda")]
    probes: ProbePtx,
    passed: usize,
    failed: usize,
    skipped: usize,
    /// Not begun, because the time was over.
    not_run: usize,
    /// Tests whose names are wanted, so far.
    wanted: usize,
    start: Instant,
    /// File for a line of every test, in the process that speaks for the group.
    json: Option<File>,
}

/// Runs the tests. An error if any failed.
pub fn run(args: &GpuArgs) -> Result<()> {
    let found = gpus();
    if let Some(wanted) = args.require_gpus.filter(|&wanted| found < wanted) {
        bail!("--require-gpus {wanted}: this machine has {found}");
    }
    let simulated = args.group == GroupKind::Simulated;
    let ranks = args.ranks.unwrap_or(if simulated {
        4
    } else {
        args.require_gpus.unwrap_or(found)
    });
    if args.group == GroupKind::Local && ranks == 0 {
        println!("skip everything: no GPU was found");
        println!("0 passed, 0 failed, 1 skipped");
        return Ok(());
    }
    let mut open = open(&args.group_options(ranks))?;
    #[cfg(feature = "cuda")]
    let probes = open.agree(args.files.probes())?;
    let json = args.json.as_ref().filter(|_| open.is_first());
    let create =
        |path: &PathBuf| File::create(path).with_context(|| format!("--json {}", path.display()));
    let json = json.map(create).transpose();
    let mut suite = Suite {
        args,
        json: open.agree(json)?,
        open,
        #[cfg(feature = "cuda")]
        probes,
        passed: 0,
        failed: 0,
        skipped: 0,
        not_run: 0,
        wanted: 0,
        start: Instant::now(),
    };
    suite.introduce()?;
    run_all(&mut suite)?;
    suite.finish()
}

fn run_all(suite: &mut Suite<'_>) -> Result<()> {
    links::run(suite)?;
    cases::run(suite)?;
    rounds::run(suite)?;
    late::run(suite)?;
    counted::run(suite)?;
    exact::run(suite)?;
    epilogue::run(suite)?;
    two::run(suite)?;
    at_once::run(suite)?;
    written::run(suite)?;
    invalid::run(suite)?;
    local::run(suite)?;
    damaged::run(suite)?;
    #[cfg(feature = "cuda")]
    held::run(suite)?;
    #[cfg(feature = "cudarc")]
    cudarc::run(suite)?;
    #[cfg(feature = "cudarc")]
    moe_layer::run(suite)?;
    #[cfg(feature = "candle")]
    candle::run(suite)?;
    #[cfg(feature = "cust")]
    cust::run(suite)?;
    #[cfg(feature = "cuda")]
    conversions::run(suite)?;
    #[cfg(feature = "cuda")]
    orders::run(suite)?;
    #[cfg(feature = "cuda")]
    shared::run(suite)?;
    // Last: they leave communicators behind that gave up.
    silu::run(suite)?;
    at_once::run_failing(suite)?;
    #[cfg(feature = "cuda")]
    out_of_turn::run(suite)?;
    late::run_failing(suite)?;
    stalled::run(suite)?;
    faults::run(suite)
}

impl Suite<'_> {
    fn introduce(&self) -> Result<()> {
        if !self.open.is_first() || self.args.list {
            return Ok(());
        }
        let group = &self.open.group;
        println!("{} group of {} ranks", group.name(), group.ranks());
        for rank in group.local_ranks() {
            println!("  rank {}: {}", rank.0, group.device(rank)?.name());
        }
        if let Some(title) = sharing::title(self.open.ranks_per_gpu) {
            println!("  {title}");
        }
        for (flag, file) in self.args.files.given() {
            println!("  {flag} {}", file.display());
        }
        Ok(())
    }

    fn group(&self) -> &Group {
        &self.open.group
    }

    fn ranks(&self) -> usize {
        self.group().ranks() as usize
    }

    /// Ranks of this process, the first of those that share a GPU: for what a GPU does alone.
    fn ranks_by_gpu(&self) -> impl Iterator<Item = Rank> {
        let local = self.group().local_ranks();
        let first = |rank: &Rank| match self.group().gpu_ranks(*rank) {
            Some(gpu) => gpu.ranks().find(|other| local.contains(other)) == Some(*rank),
            None => true,
        };
        let ranks: Vec<Rank> = local.iter().copied().filter(first).collect();
        ranks.into_iter()
    }

    fn is_simulated(&self) -> bool {
        self.args.group == GroupKind::Simulated
    }

    /// Longest wait of a kernel in tests where nobody is missing.
    fn deadline(&self) -> Duration {
        self.open.scaled(Duration::from_secs(self.args.deadline))
    }

    /// Longest wait of a kernel in tests where somebody is.
    fn short_deadline(&self) -> Duration {
        self.open.scaled(SHORT_DEADLINE)
    }

    /// Whether the time is over on any process. Collective.
    fn is_over(&mut self) -> Result<bool> {
        let Some(seconds) = self.args.seconds else {
            return Ok(false);
        };
        let over = self.start.elapsed() >= Duration::from_secs(seconds);
        let all = (self.open.gather)(&[u8::from(over)])?;
        Ok(all.iter().any(|over| over == &[1]))
    }

    /// Makes communicators and tensors on every process, or on none. Collective.
    fn session(&mut self, group: &Group, settings: &Settings, slots: usize) -> Result<Session> {
        let session = Session::with_slots(group, settings, slots);
        self.open.agree(session.map_err(Into::into))
    }

    /// Closes a session that served its test on every process. If it did not on one, it is
    /// dropped on all, because closing waits for everyone. Collective.
    fn conclude<T>(&mut self, session: Session, result: Result<T>) -> Result<T> {
        let value = self.open.agree(result)?;
        session.close()?;
        Ok(value)
    }

    /// Runs a test on a session of its own. Collective.
    fn with_session<T>(
        &mut self,
        settings: &Settings,
        slots: usize,
        run: impl FnOnce(&Self, &mut Session) -> Result<T>,
    ) -> Result<T> {
        let mut session = self.session(&self.group().clone(), settings, slots)?;
        let result = run(self, &mut session);
        self.conclude(session, result)
    }

    /// So many tokens of each rank, of `[experts, top_k, hidden]`, all experts equally likely.
    fn uniform(&self, tokens: usize, sizes: [usize; 3], seed: u64) -> Problem {
        ferry_rig::problem(vec![tokens; self.ranks()], sizes, Routing::Uniform, seed)
    }

    /// Configuration of a plan for these problems, all of the same sizes.
    fn config(&self, problems: &[Problem]) -> Config {
        let inputs = problems.iter().flat_map(|problem| &problem.inputs);
        let most = inputs.map(|input| input.tokens).max().unwrap_or(0);
        let Problem {
            experts,
            top_k,
            hidden,
            ..
        } = problems[0];
        Config {
            deadline: self.deadline(),
            ..Config::new(experts, top_k, hidden, most.max(1))
        }
    }

    /// Runs a test on every process; it failed if it failed on any.
    fn check(&mut self, name: &str, test: impl FnOnce(&mut Self) -> Result<Outcome>) -> Result<()> {
        if !self.args.wants(name) {
            return Ok(());
        }
        self.wanted += 1;
        if (self.args.part).is_some_and(|part| !part.has(self.wanted - 1)) {
            return Ok(());
        }
        if self.args.list {
            self.passed += 1;
            if self.open.is_first() {
                println!("{name}");
            }
            return Ok(());
        }
        if self.is_over()? {
            self.not_run += 1;
            return Ok(());
        }
        let start = Instant::now();
        let outcome = test(self);
        let ms = start.elapsed().as_millis();
        let failure = outcome
            .as_ref()
            .err()
            .map(|error| format!("{error:#}"))
            .unwrap_or_default();
        let failures = (self.open.gather)(failure.as_bytes())?;
        let failure = failures.into_iter().find(|text| !text.is_empty());
        let failure = failure.map(|text| String::from_utf8_lossy(&text).into_owned());
        let (word, detail) = match (failure, outcome) {
            (Some(failure), _) => ("FAIL", failure),
            (None, Ok(Outcome::Skipped(why))) => ("skip", why),
            (None, Ok(Outcome::Measured(figures))) => ("ok", figures),
            (None, _) => ("ok", String::new()),
        };
        match word {
            "FAIL" => self.failed += 1,
            "skip" => self.skipped += 1,
            _ => self.passed += 1,
        }
        if self.open.is_first() {
            let gap = if detail.is_empty() { "" } else { ": " };
            println!("{word:4} {name} ({ms} ms){gap}{detail}");
        }
        let line = serde_json::json!({
            "test": name, "outcome": word, "detail": detail, "ms": ms as u64,
            "group": self.group().name(), "ranks": self.ranks(),
        });
        if let Some(file) = &mut self.json {
            writeln!(file, "{line}")?;
        }
        Ok(())
    }

    fn finish(self) -> Result<()> {
        let Self {
            passed,
            failed,
            skipped,
            not_run,
            wanted,
            ..
        } = self;
        if self.open.is_first() && !self.args.list {
            println!("{passed} passed, {failed} failed, {skipped} skipped");
            if not_run > 0 {
                println!("{not_run} not run: the time was over");
            }
        }
        if failed > 0 {
            bail!("{failed} tests failed");
        }
        if wanted == 0 && !self.args.filter.is_empty() {
            let texts = self.args.filter.join(", ");
            bail!("--filter {texts}: no test has that in its name");
        }
        stalled::closed(self.open.group.close())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_have_each_test_once() {
        let parts = ["1/3", "2/3", "3/3"].map(|text| text.parse::<Part>().unwrap());
        for number in 0..7 {
            let owners = parts.iter().filter(|part| part.has(number));
            assert_eq!(owners.count(), 1, "{number}");
        }
        for wrong in ["0/3", "4/3", "1", "1/0", "a/3"] {
            let error = wrong.parse::<Part>().unwrap_err().to_string();
            assert_eq!(error, format!("{wrong} is not K/N with K from 1 to N"));
        }
    }
}
