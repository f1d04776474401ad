//! Rounds with fresh seeds until the time is up, each compared with the oracle: in the simulator on
//! all processors, or on a group. What was run is counted by format and size, and a line of it can be
//! kept in a log.

mod log;
mod on_group;
mod simulated;
mod tally;

use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Result, bail};

use crate::group::{GroupArgs, GroupKind};
use tally::Tally;

/// Between lines that say how far it is.
const PROGRESS: Duration = Duration::from_secs(5);
/// Longest that a seed may take, of ranks that have a GPU each: they take milliseconds, on GPUs seconds.
const LONGEST: Duration = Duration::from_secs(180);
/// Seeds that a second of the clock has for itself, so that no two runs draw the same ones.
const SEEDS_A_SECOND: u64 = 1 << 20;

/// Run rounds with fresh seeds until the time is up, each compared with the oracle
///
/// In the simulator a seed draws everything: shape, format, layout, options, inputs and the order of warps.
/// What failed is printed with its seed; --seed S --count 1 runs it again.
#[derive(clap::Args, Debug)]
#[command(verbatim_doc_comment)]
pub struct SoakArgs {
    /// Begin no seed after so many seconds
    #[arg(long, value_name = "N", default_value_t = 60)]
    seconds: u64,
    /// Run on so many GPUs, a shape with 100 rounds a seed [default: in the simulator, on all processors]
    #[arg(long, value_name = "N", conflicts_with_all = ["ranks", "share_gpus"])]
    gpus: Option<usize>,
    /// Run such shapes on the ranks of a group [default: local]
    #[arg(long, value_enum)]
    pub group: Option<GroupKind>,
    /// Ranks of the group [default: all GPUs]
    #[arg(long, value_name = "N")]
    ranks: Option<usize>,
    /// The first seed [default: one that the clock gives]
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
    /// End after so many seeds
    #[arg(long, value_name = "N")]
    count: Option<u64>,
    /// Append a line of what was run, unless something failed
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// Name of this program's source in the log
    #[arg(long, value_name = "HASH", default_value = "unknown")]
    commit: String,
    /// Way that ranks have GPUs, and processes meet.
    #[command(flatten)]
    pub group_args: GroupArgs,
}

impl SoakArgs {
    /// Whether shapes are run on the ranks of one group, which the simulator's own way does not have.
    const fn has_group(&self) -> bool {
        let of_group = self.group_args.share_gpus || self.group_args.node.is_some();
        of_group || self.gpus.is_some() || self.ranks.is_some() || self.group.is_some()
    }

    /// Place of the group's ranks.
    fn kind(&self) -> GroupKind {
        self.group.unwrap_or(GroupKind::Local)
    }
}

/// Seeds that are run, and what came of them so far.
struct Course {
    start: Instant,
    seconds: Duration,
    /// Longest that a seed may take.
    longest: Duration,
    first: u64,
    end: u64,
    next: AtomicU64,
    done: Mutex<Done>,
}

/// Reports of the workers.
#[derive(Default)]
struct Done {
    tally: Tally,
    /// Seeds that run, and since when.
    busy: Vec<(u64, Instant)>,
    /// The first seed that failed, and why.
    failure: Option<(u64, String)>,
}

impl Course {
    fn new(args: &SoakArgs, first: u64, longest: Duration) -> Self {
        Self {
            start: Instant::now(),
            seconds: Duration::from_secs(args.seconds),
            longest,
            first,
            end: args
                .count
                .map_or(u64::MAX, |count| first.saturating_add(count)),
            next: AtomicU64::new(first),
            done: Mutex::default(),
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Done> {
        self.done
            .lock()
            .expect("no panic while holding what is done")
    }

    /// Whether neither the time is up nor a seed has failed.
    fn goes_on(&self) -> bool {
        self.start.elapsed() < self.seconds && self.lock().failure.is_none()
    }

    /// Runs seeds until the time is up or one fails.
    fn work(&self, run: impl FnMut(u64) -> Result<Tally, String>) {
        self.work_while(|| self.goes_on(), run);
    }

    /// Runs seeds for as long as `goes_on` says.
    fn work_while(
        &self,
        mut goes_on: impl FnMut() -> bool,
        mut run: impl FnMut(u64) -> Result<Tally, String>,
    ) {
        while goes_on() {
            let seed = self.next.fetch_add(1, Ordering::Relaxed);
            if seed >= self.end {
                return;
            }
            self.lock().busy.push((seed, Instant::now()));
            let outcome = run(seed);
            let mut done = self.lock();
            done.busy.retain(|&(other, _)| other != seed);
            match outcome {
                Ok(tally) => done.tally.add(&tally),
                Err(why) => done.failure = done.failure.take().or(Some((seed, why))),
            }
        }
    }

    /// Seeds that were begun: from the first, to this one.
    fn reached(&self) -> u64 {
        self.next.load(Ordering::Relaxed).min(self.end)
    }

    /// Says how far it is, if it `reports`, until all workers are done. Gives up on a seed that does not end:
    /// nobody can stop its worker, so the process ends.
    fn watch(&self, args: &SoakArgs, reports: bool, is_done: impl Fn() -> bool) {
        let mut said = Instant::now();
        while !is_done() {
            std::thread::sleep(Duration::from_millis(50));
            let done = self.lock();
            if let Some((seed, _)) = done
                .busy
                .iter()
                .find(|(_, since)| since.elapsed() > self.longest)
            {
                println!(
                    "FAIL seed {seed}: no end after {:?}\n{}",
                    self.longest,
                    rerun(args, *seed)
                );
                std::process::exit(1);
            }
            if reports && said.elapsed() >= PROGRESS {
                said = Instant::now();
                let seconds = self.start.elapsed().as_secs();
                println!(
                    "{seconds:>6} s: {} rounds of {} seeds",
                    done.tally.rounds(),
                    done.tally.seeds()
                );
            }
        }
    }
}

/// Tells how a seed is run again.
fn rerun(args: &SoakArgs, seed: u64) -> String {
    let mut on = String::new();
    if let Some(gpus) = args.gpus {
        on += &format!(" --gpus {gpus}");
    }
    if let Some(group) = args.group {
        on += &format!(" --group {}", group.name());
    }
    if let Some(ranks) = args.ranks {
        on += &format!(" --ranks {ranks}");
    }
    if let Some(node) = args.group_args.node {
        on += &format!(" --node {node}");
    }
    if args.group_args.share_gpus {
        on += " --share-gpus";
    }
    format!(
        "run it again: cargo xtask soak{on} --seed {seed} --count 1   \
         (or: ferry-tests soak{on} --seed {seed} --count 1)"
    )
}

/// Runs until the time is up. An error if a round was wrong.
pub fn run(args: &SoakArgs) -> Result<()> {
    let clock = SystemTime::now().duration_since(UNIX_EPOCH);
    let clock = clock.map_or(0, |since| since.as_secs());
    let first = args.seed.unwrap_or(clock * SEEDS_A_SECOND);
    if args.has_group() {
        return on_group::run(args, first);
    }
    let course = Course::new(args, first, LONGEST);
    let machine = simulated::run(&course, args);
    conclude(course, args, &machine)
}

/// Says what was run, and logs it. An error if a round was wrong.
fn conclude(course: Course, args: &SoakArgs, machine: &str) -> Result<()> {
    let (first, reached) = (course.first, course.reached());
    let seconds = course.start.elapsed().as_secs();
    let done = course.done.into_inner().expect("no worker panicked");
    print!("{}", done.tally.table());
    let (rounds, seeds) = (done.tally.rounds(), done.tally.seeds());
    println!("{machine}: {rounds} rounds of {seeds} seeds {first}..{reached} in {seconds} s");
    if let Some((seed, why)) = done.failure {
        println!("FAIL seed {seed}: {why}\n{}", rerun(args, seed));
        bail!("seed {seed} failed");
    }
    println!("every round as the oracle has it");
    let line = log::line(args, machine, (first..reached, seconds), &done.tally);
    match &args.log {
        Some(path) => log::append(path, &line),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(text: &str) -> SoakArgs {
        #[derive(clap::Parser)]
        struct Arguments {
            #[command(flatten)]
            soak: SoakArgs,
        }
        let words = text.split_whitespace();
        <Arguments as clap::Parser>::parse_from(std::iter::once("soak").chain(words)).soak
    }

    #[test]
    fn seeds_are_run_once_each_and_counted() {
        let course = Course::new(&args("--count 3"), 5, LONGEST);
        let mut seen = Vec::new();
        course.work(|seed| {
            seen.push(seed);
            Ok(Tally::of_round("Bf16", 2))
        });
        assert_eq!(seen, [5, 6, 7]);
        assert_eq!((course.reached(), course.lock().tally.rounds()), (8, 3));
    }

    #[test]
    fn the_first_failure_ends_it() {
        let course = Course::new(&args("--count 9"), 1, LONGEST);
        course.work(|seed| {
            if seed == 3 {
                Err("no".into())
            } else {
                Ok(Tally::default())
            }
        });
        assert_eq!(course.lock().failure, Some((3, "no".into())));
        assert_eq!(course.reached(), 4);
        let text = rerun(&args("--gpus 4"), 3);
        assert!(
            text.contains("cargo xtask soak --gpus 4 --seed 3 --count 1"),
            "{text}"
        );
        let text = rerun(&args("--group node --ranks 4 --node 2 --share-gpus"), 3);
        assert!(
            text.contains(
                "ferry-tests soak --group node --ranks 4 --node 2 --share-gpus --seed 3 --count 1"
            ),
            "{text}"
        );
    }

    #[test]
    fn ranks_of_a_node_are_those_of_a_group() {
        assert!(args("--node 2").has_group() && !args("--seed 2").has_group());
        let line = log::line(&args("--node 2"), "", (0..1, 7), &Tally::default());
        assert_eq!(line["node"], 2);
    }

    #[test]
    fn a_wrong_case_is_told_with_its_parameters() {
        let why = ferry_rig::caught(|| panic!("tokens differ: {}", 7)).unwrap_err();
        assert_eq!(why, "tokens differ: 7");
    }

    #[test]
    fn shapes_on_nodes_of_any_size_can_be_planned() {
        let group = ferry::Group::simulated(4, 0).unwrap();
        for seed in 0..500 {
            for node in [1, 2, 4] {
                let case = ferry_rig::some_keep_rows(ferry_rig::gpu_case(seed, 4, node));
                let plan = ferry::Plan::new(&group, case.config());
                assert!(plan.is_ok(), "{plan:?}: {case:?}");
            }
        }
    }

    #[test]
    fn rounds_on_a_group_are_compared() {
        let mut open =
            on_group::open_group(&args("--group simulated --ranks 2 --share-gpus")).unwrap();
        for node in [1, 2] {
            let tally = on_group::shape(&mut open, 11, node, 9).unwrap();
            assert_eq!(tally.rounds(), 9);
        }
    }
}
