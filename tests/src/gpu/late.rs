//! A late rank, under calls' own deadlines.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use ferry::{Config, Error, FaultKind, Rank};
use ferry_reference::Problem;

use super::rounds::{compare, returned};
use super::{Outcome, Suite};
use ferry_rig::{Graphs, Session, Settings, Turn};

/// Time by which the last rank is late: within a call's deadline, and far beyond the plan's.
#[derive(Clone, Copy)]
struct Times {
    plan: Duration,
    late: Duration,
    call: Duration,
}

impl Times {
    /// 1, 5 and 10 seconds; a fiftieth in the simulator, whose ranks are never lost while one may come.
    fn of(suite: &Suite<'_>) -> Self {
        let second = match suite.is_simulated() {
            true => Duration::from_millis(20),
            false => Duration::from_secs(1),
        };
        Self {
            plan: second,
            late: 5 * second,
            call: 10 * second,
        }
    }
}

pub fn run(suite: &mut Suite<'_>) -> Result<()> {
    if suite.ranks() == 1 {
        return Ok(());
    }
    suite.check("a late rank, within the deadline of its call", eager)?;
    suite.check(
        "a graph of a late rank, within the deadline that it was captured with",
        within,
    )
}

/// Leaves a communicator behind that gave up.
pub fn run_failing(suite: &mut Suite<'_>) -> Result<()> {
    if suite.ranks() == 1 {
        return Ok(());
    }
    suite.check(
        "a graph of a late rank, beyond the deadline that it was captured with",
        beyond,
    )
}

/// A problem, and the session of a plan with the short deadline. Collective.
fn prepared(suite: &mut Suite<'_>, times: Times) -> Result<(Problem, Session)> {
    let problem = suite.uniform(16, [64, 8, 1024], suite.args.seed * 77 + 5);
    let config = Config {
        deadline: times.plan,
        ..suite.config(std::slice::from_ref(&problem))
    };
    let settings = Settings::of(config, std::slice::from_ref(&problem));
    let session = suite.session(&suite.group().clone(), &settings, 1)?;
    Ok((problem, session))
}

/// Launches the ranks, the last one of the group late, and compares what they return.
fn round(
    session: &mut Session,
    problem: &Problem,
    times: Times,
    mut launch: impl FnMut(&mut Session, usize) -> Result<(), Error>,
) -> Result<()> {
    let last = problem.inputs.len() - 1;
    session.upload(0, problem)?;
    session.poison()?;
    session.synchronize()?;
    for (index, rank) in session.local_ranks().into_iter().enumerate() {
        if rank == last {
            thread::sleep(times.late);
        }
        launch(session, index)?;
    }
    session.synchronize()?;
    compare(session, Turn::RETURNED, &returned(problem))
}

fn eager(suite: &mut Suite<'_>) -> Result<Outcome> {
    let times = Times::of(suite);
    let (problem, mut session) = prepared(suite, times)?;
    let result = session.set_deadlines(|| times.call).map_err(Into::into);
    let result = result.and_then(|()| {
        round(&mut session, &problem, times, |session, index| {
            session.launch(index, Turn::RETURNED)
        })
    });
    suite.conclude(session, result)?;
    Ok(Outcome::Passed)
}

/// Runs a test on graphs of a round that are captured under one deadline, while later calls have another.
/// Skipped where there are no graphs.
fn on_graphs(
    suite: &Suite<'_>,
    session: &mut Session,
    [graphs, later]: [Duration; 2],
    test: impl FnOnce(&mut Session, &mut Graphs) -> Result<()>,
) -> Result<Outcome> {
    session.set_deadlines(|| graphs)?;
    let graphs = Graphs::capture(suite.group(), session, |session, index| {
        session.launch(index, Turn::RETURNED)
    })?;
    session.set_deadlines(|| later)?;
    let Some(mut graphs) = graphs else {
        return Ok(Outcome::Skipped("only CUDA has graphs".into()));
    };
    test(session, &mut graphs)?;
    Ok(Outcome::Passed)
}

fn within(suite: &mut Suite<'_>) -> Result<Outcome> {
    let times = Times::of(suite);
    let (problem, mut session) = prepared(suite, times)?;
    let deadlines = [times.call, times.plan];
    let result = on_graphs(suite, &mut session, deadlines, |session, graphs| {
        round(session, &problem, times, |_, index| graphs.launch(index))
    });
    suite.conclude(session, result)
}

fn beyond(suite: &mut Suite<'_>) -> Result<Outcome> {
    let times = Times::of(suite);
    let (problem, mut session) = prepared(suite, times)?;
    let (deadlines, last) = ([times.plan, times.call], suite.ranks() - 1);
    let result = on_graphs(suite, &mut session, deadlines, |session, graphs| {
        session.upload(0, &problem)?;
        told(session, graphs, (last, times))
    });
    // Not closed: that is collective, and the ranks gave up. The windows stay.
    drop(session);
    suite.open.agree(result)
}

/// All ranks but the last launch their graphs, and name it within the deadline of the graphs.
fn told(session: &Session, graphs: &mut Graphs, (last, times): (usize, Times)) -> Result<()> {
    let start = Instant::now();
    let locals = session.local_ranks();
    let mut others = (0..locals.len()).filter(|&index| locals[index] != last);
    others.try_for_each(|index| graphs.launch(index))?;
    for (rank, outcome) in session.outcomes() {
        match outcome {
            Ok(None) | Err(Error::PeerGaveUp { .. }) if rank == last => {}
            Err(Error::Fault(fault)) if rank != last => {
                ensure!(fault.kind == FaultKind::PeerTimeout, "rank {rank}: {fault}");
                ensure!(fault.culprit == Rank(last as u32), "rank {rank}: {fault}");
            }
            other => bail!("rank {rank}: {other:?}"),
        }
    }
    let waited = start.elapsed();
    ensure!(
        (times.plan..times.late).contains(&waited),
        "the faults came after {waited:?}"
    );
    Ok(())
}
