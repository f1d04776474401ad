//! Graphs with a part of a round: in turn they make rounds, out of turn the device refuses them. Graphs of a
//! dispatch that is given up.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use ferry::layout::Kernel;
use ferry::{CombineMode, Config, Error, Fault, FaultKind, Rank, TokenFormat};
use ferry_reference::Problem;

use super::{Outcome, Suite};
use ferry_rig::verify::Oracle;
use ferry_rig::{Graphs, Session, Settings};

const EXPERTS: usize = 64;
/// Longest wait where a rank was refused.
const SHORT_DEADLINE: Duration = Duration::from_millis(500);
/// Rounds of graphs in turn.
const ROUNDS: u64 = 8;

pub fn run(suite: &mut Suite<'_>) -> Result<()> {
    for split in [false, true] {
        let calls = if split { "split" } else { "fused" };
        for tokens in [1, 128, 1024] {
            let name =
                format!("graphs of {calls} dispatches and combines in turn, {tokens} tokens");
            suite.check(&name, |suite| {
                with_graphs(suite, tokens, split, rounds_in_turn)
            })?;
            let name = format!("graphs of {calls} dispatches that are given up, {tokens} tokens");
            suite.check(&name, |suite| {
                with_graphs(suite, tokens, split, rounds_between)
            })?;
        }
        for part in [Part::Dispatch, Part::Combine] {
            for all in [false, true] {
                let ranks = if all { "all ranks" } else { "one rank" };
                let name = format!("a graph of a {calls} {part:?} launched twice on {ranks}");
                suite.check(&name, |suite| twice(suite, Twice { part, split, all }))?;
            }
        }
    }
    Ok(())
}

/// A half of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Dispatch,
    Combine,
}

impl Part {
    /// Captures the calls that it consists of on each local rank; `None` if there is nothing to capture with.
    fn capture(self, suite: &Suite<'_>, session: &mut Session) -> Result<Option<Graphs>> {
        let first = 2 * self as usize;
        Graphs::capture(suite.group(), session, |session, index| {
            (first..first + 2).try_for_each(|half| session.launch_half(index, half))
        })
    }

    /// Its first kernel and its last one.
    const fn kernels(self, split: bool) -> (Kernel, Kernel) {
        match (self, split) {
            (Self::Dispatch, false) => (Kernel::Dispatch, Kernel::Dispatch),
            (Self::Dispatch, true) => (Kernel::DispatchAsync, Kernel::DispatchWait),
            (Self::Combine, false) => (Kernel::Combine, Kernel::Combine),
            (Self::Combine, true) => (Kernel::CombineAsync, Kernel::CombineWait),
        }
    }
}

/// Graphs of both parts on the local ranks; `None` if there is nothing to capture with.
fn capture(suite: &Suite<'_>, session: &mut Session) -> Result<Option<[Graphs; 2]>> {
    let dispatch = Part::Dispatch.capture(suite, session)?;
    let combine = Part::Combine.capture(suite, session)?;
    Ok(dispatch
        .zip(combine)
        .map(|(dispatch, combine)| [dispatch, combine]))
}

/// Outcome of a test that has graphs, unless it is false.
fn outcome(had_graphs: bool) -> Outcome {
    if had_graphs {
        Outcome::Passed
    } else {
        Outcome::Skipped("needs CUDA graphs".into())
    }
}

fn problem(suite: &Suite<'_>, tokens: usize, seed: u64) -> Problem {
    let experts = EXPERTS / suite.ranks() * suite.ranks();
    let hidden = if suite.args.quick { 256 } else { 7168 };
    let seed = suite.args.seed * 9000 + seed;
    suite.uniform(tokens, [experts, 8, hidden], seed)
}

/// Makes rounds on a session with some problems. Returns whether there were graphs.
type Rounds = fn(&Suite<'_>, &mut Session, &[Problem]) -> Result<bool>;

fn with_graphs(
    suite: &mut Suite<'_>,
    tokens: usize,
    split: bool,
    rounds: Rounds,
) -> Result<Outcome> {
    let problems: Vec<_> = (0..ROUNDS)
        .map(|seed| problem(suite, tokens, seed))
        .collect();
    let settings = Settings {
        split,
        ..Settings::of(suite.config(&problems), &problems)
    };
    let had_graphs = suite.with_session(&settings, 1, |suite, session| {
        rounds(suite, session, &problems)
    })?;
    Ok(outcome(had_graphs))
}

/// Makes rounds whose dispatches and combines are graphs, with experts between them that the host plays, and
/// a round of calls now and then. Returns whether there were graphs.
fn rounds_in_turn(suite: &Suite<'_>, session: &mut Session, problems: &[Problem]) -> Result<bool> {
    let scale = [1.5; EXPERTS];
    session.upload(0, &problems[0])?;
    let Some(mut graphs) = capture(suite, session)? else {
        return Ok(false);
    };
    for (round, problem) in problems.iter().enumerate() {
        let oracle = Oracle::new(problem, &scale, TokenFormat::Bf16);
        let outputs = if round % 3 == 2 {
            session.round(problem, &scale)?
        } else {
            session.upload(0, problem)?;
            session.poison()?;
            graphs[0].launch_all()?;
            session.synchronize()?;
            session.run_experts(problem, &scale)?;
            graphs[1].launch_all()?;
            session.synchronize()?;
            session.outputs()?
        };
        oracle
            .verify(CombineMode::Reduced, true, &outputs)
            .with_context(|| format!("round {round}"))?;
    }
    Ok(true)
}

/// Makes rounds of calls, with graphs between them of a dispatch and its end without a combine. Returns
/// whether there were graphs.
fn rounds_between(suite: &Suite<'_>, session: &mut Session, problems: &[Problem]) -> Result<bool> {
    let scale = [1.5; EXPERTS];
    session.upload(0, &problems[0])?;
    let graphs = Graphs::capture(suite.group(), session, |session, index| {
        (0..2).try_for_each(|half| session.launch_half(index, half))?;
        let (rank, stream) = session.local(index);
        rank.give_up(stream)
    })?;
    let Some(mut graphs) = graphs else {
        return Ok(false);
    };
    for (round, problem) in problems.iter().enumerate() {
        let oracle = Oracle::new(problem, &scale, TokenFormat::Bf16);
        (0..round % 4).try_for_each(|_| graphs.launch_all())?;
        session.synchronize()?;
        let outputs = session.round(problem, &scale)?;
        oracle
            .verify(CombineMode::Reduced, true, &outputs)
            .with_context(|| format!("round {round}"))?;
    }
    Ok(true)
}

/// A part that is launched twice.
#[derive(Clone, Copy)]
struct Twice {
    part: Part,
    split: bool,
    /// Whether on all ranks, or on the first alone.
    all: bool,
}

impl Twice {
    /// Requires that a rank was refused the part's first kernel, after the part's last one in round 2.
    fn named_itself(self, fault: &Fault) -> Result<()> {
        let Self { part, split, .. } = self;
        let (kernel, last) = part.kernels(split);
        let epoch = if part == Part::Dispatch { 2 } else { 3 };
        ensure!(fault.kind == FaultKind::OutOfTurn, "{fault}");
        let own = (fault.rank, fault.rank);
        ensure!((fault.peer, fault.culprit) == own, "{fault}");
        ensure!((fault.kernel, fault.epoch) == (kernel, epoch), "{fault}");
        ensure!(fault.last_launch() == Some((last, 2)), "{fault}");
        Ok(())
    }
}

/// Launches a part twice: whoever does is refused at once, and the others name it by their deadline.
fn twice(suite: &mut Suite<'_>, twice: Twice) -> Result<Outcome> {
    let Twice { split, all, .. } = twice;
    if !all && suite.ranks() == 1 {
        return Ok(Outcome::Skipped("needs two ranks".into()));
    }
    let problem = problem(suite, 128, 100);
    let problems = std::slice::from_ref(&problem);
    let config = Config {
        deadline: SHORT_DEADLINE,
        ..suite.config(problems)
    };
    let settings = Settings {
        split,
        ..Settings::of(config, problems)
    };
    let group = suite.group().clone();
    let mut session = suite.session(&group, &settings, 1)?;
    let result = refused(suite, &mut session, &problem, twice);
    // Not closed: that is collective, and they gave up.
    drop(session);
    Ok(outcome(suite.open.agree(result)?))
}

/// Returns whether there were graphs.
fn refused(
    suite: &Suite<'_>,
    session: &mut Session,
    problem: &Problem,
    twice: Twice,
) -> Result<bool> {
    let Twice { part, all, .. } = twice;
    session.upload(0, problem)?;
    let Some(mut graphs) = capture(suite, session)? else {
        return Ok(false);
    };
    for part in [Part::Dispatch, Part::Combine, Part::Dispatch] {
        graphs[part as usize].launch_all()?;
    }
    if part == Part::Combine {
        graphs[1].launch_all()?;
    }
    session.synchronize()?;
    let start = Instant::now();
    for (index, rank) in session.local_ranks().into_iter().enumerate() {
        if all || rank == 0 {
            graphs[part as usize].launch(index)?;
            continue;
        }
        if part == Part::Dispatch {
            graphs[1].launch(index)?;
        }
        graphs[0].launch(index)?;
    }
    let outcomes = session.outcomes();
    let waited = start.elapsed();
    for (rank, outcome) in outcomes {
        let Err(Error::Fault(fault)) = outcome else {
            bail!("rank {rank}: {outcome:?}");
        };
        if all || rank == 0 {
            twice.named_itself(&fault)?;
        } else {
            let named = (fault.kind, fault.culprit);
            ensure!(
                named == (FaultKind::PeerTimeout, Rank(0)),
                "rank {rank}: {fault}"
            );
        }
    }
    let most = if all {
        SHORT_DEADLINE
    } else {
        4 * SHORT_DEADLINE
    };
    ensure!(waited < most, "the faults came after {waited:?}");
    Ok(true)
}
