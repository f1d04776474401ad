//! Rounds whose rows stay as they came: every layout in every format, with all other choices drawn, in the
//! simulator on all processors.

mod choices;

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use clap::Args;

use choices::Counts;
use ferry_rig::{Case, ROW_FORMATS, ROW_LAYOUTS, Run, caught, rows_case};

/// Longest time of a case on a loaded machine: cases take milliseconds.
const LONGEST: Duration = Duration::from_secs(120);
/// Between lines that say how far it is.
const PROGRESS: Duration = Duration::from_secs(5);
/// Layouts times formats.
const KINDS: u64 = (ROW_LAYOUTS.len() * ROW_FORMATS.len()) as u64;

/// Run every layout of rows that stay as they came in every format, all else drawn, in the simulator
///
/// Each case is compared with the oracle, and each pair of values of two choices must have come --least
/// times. What failed is printed with its seed, which --only runs again. `cargo xtask test` runs the same
/// with fewer cases.
#[derive(Args)]
#[command(verbatim_doc_comment)]
pub struct RowsArgs {
    /// Cases of each layout in each format
    #[arg(long, default_value_t = 300)]
    pub each: u64,
    /// First seed
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Fewest cases with each pair of values of two choices
    #[arg(long, default_value_t = 50)]
    pub least: u64,
    /// Begin no case after so many seconds, and say how many were run
    #[arg(long, value_name = "N")]
    pub seconds: Option<u64>,
    /// Run the case of this seed alone, and print it
    #[arg(long, value_name = "SEED")]
    pub only: Option<u64>,
}

/// Case of a seed: kinds take turns.
pub fn case_of(seed: u64) -> Case {
    let kind = (seed % KINDS) as usize;
    let receive = ROW_LAYOUTS[kind % ROW_LAYOUTS.len()];
    rows_case(seed, receive, ROW_FORMATS[kind / ROW_LAYOUTS.len()])
}

/// Runs as many cases of each kind as `args` asks for, each compared with the oracle, and prints how often
/// each pair of values came.
///
/// # Errors
/// The first case that failed, with its seed, or the first pair that came too seldom.
pub fn run(args: &RowsArgs) -> Result<()> {
    if let Some(seed) = args.only {
        println!("{:?}", case_of(seed));
        return run_one(seed);
    }
    let seeds = args.seed..args.seed + KINDS * args.each;
    let mut counts = Counts::default();
    for seed in seeds.clone() {
        counts.add(&case_of(seed));
    }
    print!("{counts}");
    let (pair, count) = counts.least();
    ensure!(
        count >= args.least,
        "{pair} comes {count} times, --least is {}",
        args.least
    );
    println!("every pair of values at least {count} times: {pair}");
    let course = Course {
        start: Instant::now(),
        longest: args.seconds.map_or(Duration::MAX, Duration::from_secs),
        next: AtomicU64::new(seeds.start),
        run: AtomicU64::new(0),
        seeds,
        failed: Mutex::new(None),
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|_| scope.spawn(|| course.work()))
            .collect();
        course.watch(|| workers.iter().all(|worker| worker.is_finished()));
    });
    course.conclude()
}

/// Seeds that are run, and what came of them so far.
struct Course {
    start: Instant,
    /// Time after which no case begins.
    longest: Duration,
    seeds: Range<u64>,
    next: AtomicU64,
    /// Cases that ended well.
    run: AtomicU64,
    failed: Mutex<Option<anyhow::Error>>,
}

impl Course {
    /// Runs seeds until all are run or one fails.
    fn work(&self) {
        while self.start.elapsed() < self.longest {
            let seed = self.next.fetch_add(1, Ordering::Relaxed);
            if seed >= self.seeds.end {
                return;
            }
            let Err(error) = run_one(seed) else {
                self.run.fetch_add(1, Ordering::Relaxed);
                continue;
            };
            // Ends the other threads, too.
            self.next.fetch_max(self.seeds.end, Ordering::Relaxed);
            let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
            failed.get_or_insert(error);
        }
    }

    /// Says how far it is until all workers are done.
    fn watch(&self, is_done: impl Fn() -> bool) {
        let mut said = Instant::now();
        while !is_done() {
            std::thread::sleep(Duration::from_millis(20));
            if said.elapsed() >= PROGRESS {
                said = Instant::now();
                let seconds = self.start.elapsed().as_secs();
                let (run, all) = (self.run.load(Ordering::Relaxed), self.count());
                println!("{seconds:>6} s: {run} of {all} cases");
            }
        }
    }

    fn count(&self) -> u64 {
        self.seeds.end - self.seeds.start
    }

    fn conclude(&self) -> Result<()> {
        let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(error) = failed.take() {
            return Err(error);
        }
        let (seconds, run) = (
            self.start.elapsed().as_secs(),
            self.run.load(Ordering::Relaxed),
        );
        let (all, seeds) = (self.count(), &self.seeds);
        println!(
            "{run} of {all} cases of seeds {seeds:?} in {seconds} s: every round as the oracle has it"
        );
        if run < all {
            println!("{} not run: the time was over", all - run);
        }
        Ok(())
    }
}

/// Runs the case of a seed.
fn run_one(seed: u64) -> Result<()> {
    let (done, is_done) = channel();
    std::thread::spawn(move || {
        let outcome = caught(|| Run::of(&case_of(seed)).expect_success());
        // The receiver is gone if the case took too long.
        let _ = done.send(outcome);
    });
    match wait(&is_done) {
        Ok(()) => Ok(()),
        Err(why) => bail!("seed {seed}: {why}\nrun it again: ferry-tests rows --only {seed}"),
    }
}

fn wait(is_done: &Receiver<Result<(), String>>) -> Result<(), String> {
    match is_done.recv_timeout(LONGEST) {
        Ok(outcome) => outcome,
        Err(RecvTimeoutError::Timeout) => Err(format!("no end within {LONGEST:?}")),
        Err(RecvTimeoutError::Disconnected) => Err(String::from("its thread is gone")),
    }
}
