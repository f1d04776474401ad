//! A rank whose experts all do not exist: its round ends as soon as another, and nobody else is harmed.

use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use ferry::{Fault, FaultKind, InputFault};
use ferry_reference::{Problem, bf16};

use super::rounds::{compare, returned};
use super::{Outcome, Suite};
use ferry_rig::{Session, Settings, Turn};

const EXPERTS: usize = 64;
const TOP_K: usize = 8;

/// A round with many faults takes at most so many times as long as one without, and so much where ranks have
/// a GPU each.
const MOST_TIMES: u32 = 3;
const MOST_MORE: Duration = Duration::from_millis(5);

pub fn run(suite: &mut Suite<'_>) -> Result<()> {
    suite.check(
        "a rank with 4096 tokens and no expert that exists",
        |suite| no_expert(suite),
    )
}

fn problem(suite: &Suite<'_>) -> Problem {
    let (tokens, hidden) = if suite.args.quick {
        (128, 128)
    } else {
        (4096, 2048)
    };
    suite.uniform(tokens, [EXPERTS, TOP_K, hidden], suite.args.seed * 77 + 9)
}

/// Ids around all that exist, -1 left out: it means that an entry is not routed.
fn id_of_none(entry: usize) -> i32 {
    let entry = entry as i32;
    match entry % 4 {
        0 => EXPERTS as i32 + entry,
        1 => -2 - entry,
        2 => i32::MAX - entry,
        _ => i32::MIN + entry,
    }
}

/// A problem, the same with a rank that has no expert, and what that must give.
struct Problems {
    lost: usize,
    good: Problem,
    bad: Problem,
    wanted: Vec<Vec<bf16>>,
    wanted_of_bad: Vec<Vec<bf16>>,
}

impl Problems {
    fn of(suite: &Suite<'_>) -> Self {
        let lost = suite.ranks() - 1;
        let good = problem(suite);
        let (mut bad, mut as_routed) = (good.clone(), good.clone());
        let ids = bad.inputs[lost].topk_ids.iter_mut().enumerate();
        ids.for_each(|(entry, id)| *id = id_of_none(entry));
        as_routed.inputs[lost].topk_ids.fill(-1);
        Self {
            lost,
            wanted: returned(&good),
            wanted_of_bad: returned(&as_routed),
            good,
            bad,
        }
    }
}

fn no_expert(suite: &mut Suite<'_>) -> Result<Outcome> {
    let problems = Problems::of(suite);
    let good = std::slice::from_ref(&problems.good);
    let settings = Settings::of(suite.config(good), good);
    let figures = suite.with_session(&settings, 2, |suite, session| {
        let more = suite.open.scaled(MOST_MORE);
        rounds(session, &problems, more, suite.is_simulated())
    })?;
    Ok(Outcome::Measured(figures))
}

/// The slots with the good and the bad inputs, and the place where the results of both go.
const GOOD: Turn = Turn::of(0, 1);
const BAD: Turn = Turn::of(1, 1);

/// Good rounds, bad ones, and a good one again.
fn rounds(
    session: &mut Session,
    problems: &Problems,
    more: Duration,
    is_simulated: bool,
) -> Result<String> {
    session.upload(GOOD.slot, &problems.good)?;
    session.upload(BAD.slot, &problems.bad)?;
    session.poison()?;
    let mut usual = Duration::ZERO;
    // The first one loads code.
    for round in 0..4 {
        let took = timed(session, GOOD)?;
        session.synchronize()?;
        usual = if round == 0 { usual } else { usual.max(took) };
    }
    compare(session, GOOD, &problems.wanted)?;
    let most = MOST_TIMES * usual + more;
    let (mut slowest, mut epoch) = (Duration::ZERO, 0);
    for round in 0..3 {
        let took = timed(session, BAD)?;
        if let Some(fault) = told(session, problems)? {
            ensure!(
                fault.epoch > epoch,
                "bad round {round} tells of round {}, the one before of {epoch}: {fault}",
                fault.epoch
            );
            epoch = fault.epoch;
        }
        compare(session, GOOD, &problems.wanted_of_bad)?;
        // The simulator's time is not a GPU's.
        ensure!(
            is_simulated || took <= most,
            "a round without experts took {took:?}, others {usual:?}; at most {most:?}"
        );
        slowest = slowest.max(took);
    }
    session.launch_all(GOOD)?;
    session.synchronize()?;
    compare(session, GOOD, &problems.wanted)?;
    Ok(format!(
        "{slowest:?} without experts, others {usual:?}, host wall time"
    ))
}

/// A round's wall time, until the last local rank is done. All ranks begin together, because each
/// has just ended a good round. What they say is not asked for.
fn timed(session: &mut Session, turn: Turn) -> Result<Duration> {
    session.launch_all(GOOD)?;
    wait(session)?;
    let start = Instant::now();
    session.launch_all(turn)?;
    wait(session)?;
    Ok(start.elapsed())
}

/// Waits for the streams of all local ranks, and asks the devices nothing else.
pub(super) fn wait(session: &mut Session) -> Result<()> {
    for index in 0..session.local_ranks().len() {
        let (ep, stream) = session.local(index);
        ep.device().synchronize(stream)?;
    }
    Ok(())
}

/// The fault of the rank without experts, if it is here. The others have none.
fn told(session: &Session, problems: &Problems) -> Result<Option<Fault>> {
    let mut told = None;
    for (rank, outcome) in session.outcomes() {
        match outcome {
            Ok(Some(InputFault(fault))) if rank == problems.lost => {
                ensure!(fault.kind == FaultKind::InvalidExpert, "{fault}");
                let entry = fault.index as usize * TOP_K + fault.peer.0 as usize;
                let id = problems.bad.inputs[rank].topk_ids.get(entry);
                ensure!(
                    id.is_some_and(|&id| id == fault.saw as u32 as i32),
                    "{fault}; entry {entry} is {id:?}"
                );
                told = Some(fault);
            }
            Ok(None) if rank != problems.lost => {}
            other => bail!("rank {rank}: {other:?}"),
        }
    }
    Ok(told)
}
