//! Calls of all local ranks at once: what they cost the host, and a launch that fails.

use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use ferry::error::LocalRanksError;
use ferry::{Config, Error, Rank};
use ferry_reference::Problem;

use super::{Outcome, Suite};
use ferry_rig::{Phases, Session, Settings};

const WARM_UP: usize = 10;
const ROUNDS: usize = 50;

pub fn run(suite: &mut Suite<'_>) -> Result<()> {
    suite.check("host time of a call of all ranks at once", host_time)
}

/// Leaves a communicator behind that gave up.
pub fn run_failing(suite: &mut Suite<'_>) -> Result<()> {
    suite.check("a launch that fails on one of all ranks", failing_launch)
}

fn problem(suite: &Suite<'_>) -> Problem {
    suite.uniform(16, [64, 8, 1024], suite.args.seed)
}

fn settings(suite: &Suite<'_>, problem: &Problem, deadline: Duration) -> Settings {
    let problems = std::slice::from_ref(problem);
    let config = Config {
        deadline,
        ..suite.config(problems)
    };
    Settings::of(config, problems)
}

/// The host's time for a rank's part of a call, of all ranks at once and of one after another.
fn host_time(suite: &mut Suite<'_>) -> Result<Outcome> {
    if suite.is_simulated() {
        return Ok(Outcome::Skipped("not on GPUs".into()));
    }
    let problem = problem(suite);
    let settings = settings(suite, &problem, suite.deadline());
    let figures = suite.with_session(&settings, 1, |_, session| measure(session, &problem))?;
    Ok(Outcome::Measured(figures))
}

fn measure(session: &mut Session, problem: &Problem) -> Result<String> {
    session.upload(0, problem)?;
    let ranks = session.local_ranks().len();
    let mut text = Vec::new();
    for (all_at_once, name) in [(true, "all at once"), (false, "one after another")] {
        session.call_all_at_once(all_at_once);
        let mut times = Vec::new();
        for round in 0..WARM_UP + ROUNDS {
            let time = session.host_time()?;
            if round >= WARM_UP {
                times.push(time);
            }
        }
        let median = |of: fn(&Phases) -> Duration| {
            let mut all: Vec<_> = times.iter().map(of).collect();
            all.sort();
            1e6 * all[all.len() / 2].as_secs_f64() / ranks as f64
        };
        text.push(format!(
            "{name}: dispatch {:.1} us, combine {:.1} us",
            median(|time| time.dispatch),
            median(|time| time.combine)
        ));
    }
    let text = text.join("; ");
    Ok(format!(
        "{text} (host, a rank of {ranks}, median of {ROUNDS})"
    ))
}

/// Whether the first two ranks do.
fn share_a_gpu(suite: &Suite<'_>) -> bool {
    let gpu = suite.group().gpu_ranks(Rank(0));
    gpu.is_some_and(|gpu| gpu.ranks().any(|rank| rank == Rank(1)))
}

/// The second rank is given the first one's stream, which its device refuses: both ranks know, and the first
/// one's kernel, whose peers never come, ends by the deadline.
fn failing_launch(suite: &mut Suite<'_>) -> Result<Outcome> {
    let locals = suite.group().local_ranks().len();
    if suite.is_simulated() || locals < suite.ranks() || locals < 2 {
        return Ok(Outcome::Skipped("needs a process with two GPUs".into()));
    }
    if share_a_gpu(suite) {
        let why = "ranks 0 and 1 share a GPU, which takes the streams of both";
        return Ok(Outcome::Skipped(why.into()));
    }
    let problem = problem(suite);
    let deadline = suite.short_deadline();
    let settings = settings(suite, &problem, deadline);
    let waited = suite.with_session(&settings, 1, |_, session| {
        session.upload(0, &problem)?;
        let first = session.local(0).1;
        let start = Instant::now();
        let refused = session.launch_at_once(0, |index, own| if index == 1 { first } else { own });
        told_of_the_launch(session, refused)?;
        Ok(start.elapsed())
    })?;
    ensure!(waited < 4 * deadline, "it took {waited:?}");
    Ok(Outcome::Passed)
}

/// Checks that each rank names the second one.
fn told_of_the_launch(session: &Session, refused: Result<(), Error>) -> Result<()> {
    let second = session.local_ranks()[1] as u32;
    match refused {
        Err(Error::LocalRanks(LocalRanksError::NotLaunched { rank, .. })) if rank.0 == second => {}
        other => bail!("the call: {other:?}"),
    }
    for (number, outcome) in session.outcomes() {
        match outcome {
            Err(Error::LocalRanks(LocalRanksError::Poisoned { rank })) if rank.0 == second => {}
            other => bail!("rank {number}: {other:?}"),
        }
    }
    Ok(())
}
