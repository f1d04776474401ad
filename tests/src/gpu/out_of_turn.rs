//! Graphs with a part of a round: in turn they make rounds, out of turn the device refuses them.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use ferry::cuda::CudaGraph;
use ferry::layout::Kernel;
use ferry::{CombineMode, Config, Error, Fault, FaultKind, Rank, Stream, TokenFormat};
use ferry_reference::Problem;
use ferry_reference::workload::{Routing, WorkloadSpec, generate};

use super::{Outcome, Suite};
use crate::session::{Session, Settings};
use crate::verify::{Oracle, capacity_for};

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
            suite.check(&name, |suite| in_turn(suite, tokens, split))?;
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
    /// The calls that it consists of: see [`Session::launch_half`].
    fn halves(self) -> std::ops::Range<usize> {
        match self {
            Self::Dispatch => 0..2,
            Self::Combine => 2..4,
        }
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

/// Graphs of a local rank.
struct Graphs {
    rank: usize,
    stream: Stream,
    dispatch: CudaGraph,
    combine: CudaGraph,
}

impl Graphs {
    /// Captures the graphs of each local rank; `None` if there is nothing to capture with.
    fn of(suite: &Suite<'_>, session: &mut Session) -> Result<Option<Vec<Self>>> {
        let mut graphs = Vec::new();
        for (index, rank) in session.local_ranks().into_iter().enumerate() {
            let Some(device) = suite.group().cuda(Rank(rank as u32)) else {
                return Ok(None);
            };
            let (_, stream) = session.local(index);
            let mut capture = |part: Part| {
                device.capture(stream, || {
                    let mut halves = part.halves();
                    halves.try_for_each(|half| session.launch_half(index, half, true))
                })
            };
            graphs.push(Self {
                rank,
                stream,
                dispatch: capture(Part::Dispatch)?,
                combine: capture(Part::Combine)?,
            });
        }
        Ok(Some(graphs))
    }

    fn launch(&mut self, part: Part) -> Result<(), Error> {
        match part {
            Part::Dispatch => self.dispatch.launch(self.stream),
            Part::Combine => self.combine.launch(self.stream),
        }
    }
}

/// Enqueues a part on every local rank.
fn launch_all(graphs: &mut [Graphs], part: Part) -> Result<(), Error> {
    graphs.iter_mut().try_for_each(|graphs| graphs.launch(part))
}

fn problem(suite: &Suite<'_>, tokens: usize, seed: u64) -> Problem {
    let ranks = suite.ranks();
    generate(WorkloadSpec {
        ranks,
        experts: EXPERTS / ranks * ranks,
        top_k: 8,
        hidden: if suite.args.quick { 256 } else { 7168 },
        tokens: vec![tokens; ranks],
        routing: Routing::Uniform,
        seed: suite.args.seed * 9000 + seed,
    })
}

fn settings(problems: &[Problem], tokens: usize, split: bool, deadline: Duration) -> Settings {
    let capacities = problems.iter().map(|p| capacity_for(p, TokenFormat::Bf16));
    let Problem {
        experts, hidden, ..
    } = problems[0];
    Settings {
        config: Config {
            deadline,
            ..Config::new(experts, 8, hidden, tokens)
        },
        capacity: capacities.fold(Default::default(), crate::formats::larger),
        split,
    }
}

/// Rounds whose dispatches and combines are graphs, with experts between them that the host plays,
/// and a round of calls now and then.
fn in_turn(suite: &mut Suite<'_>, tokens: usize, split: bool) -> Result<Outcome> {
    let problems: Vec<_> = (0..ROUNDS)
        .map(|seed| problem(suite, tokens, seed))
        .collect();
    let settings = settings(&problems, tokens, split, suite.deadline());
    let group = suite.group().clone();
    let mut session = suite.session(&group, &settings, 1)?;
    let result = rounds_in_turn(suite, &mut session, &problems);
    let outcome = result.as_ref().ok().copied();
    suite.conclude(session, result.map(drop))?;
    Ok(match outcome {
        Some(false) => Outcome::Skipped("needs CUDA graphs".into()),
        _ => Outcome::Passed,
    })
}

/// Whether there were graphs.
fn rounds_in_turn(suite: &Suite<'_>, session: &mut Session, problems: &[Problem]) -> Result<bool> {
    let scale = [1.5; EXPERTS];
    session.upload(0, &problems[0])?;
    let Some(mut graphs) = Graphs::of(suite, session)? else {
        return Ok(false);
    };
    for (round, problem) in problems.iter().enumerate() {
        let oracle = Oracle::new(problem, &scale, TokenFormat::Bf16);
        let outputs = if round % 3 == 2 {
            session.round(problem, &scale, true)?
        } else {
            session.upload(0, problem)?;
            session.poison()?;
            launch_all(&mut graphs, Part::Dispatch)?;
            session.synchronize()?;
            session.run_experts(problem, &scale)?;
            launch_all(&mut graphs, Part::Combine)?;
            session.synchronize()?;
            (0..graphs.len())
                .map(|local| session.outputs_on(local, true))
                .collect::<Result<_, _>>()?
        };
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
    let settings = settings(std::slice::from_ref(&problem), 128, split, SHORT_DEADLINE);
    let group = suite.group().clone();
    let mut session = suite.session(&group, &settings, 1)?;
    let result = refused(suite, &mut session, &problem, twice);
    let outcome = result.as_ref().ok().copied();
    // Not closed: that is collective, and they gave up.
    drop(session);
    suite.open.agree(result.map(drop))?;
    Ok(match outcome {
        Some(false) => Outcome::Skipped("needs CUDA graphs".into()),
        _ => Outcome::Passed,
    })
}

/// Whether there were graphs.
fn refused(
    suite: &Suite<'_>,
    session: &mut Session,
    problem: &Problem,
    twice: Twice,
) -> Result<bool> {
    let Twice { part, all, .. } = twice;
    session.upload(0, problem)?;
    let Some(mut graphs) = Graphs::of(suite, session)? else {
        return Ok(false);
    };
    for part in [Part::Dispatch, Part::Combine, Part::Dispatch] {
        launch_all(&mut graphs, part)?;
    }
    if part == Part::Combine {
        launch_all(&mut graphs, Part::Combine)?;
    }
    session.synchronize()?;
    let start = Instant::now();
    for graphs in &mut graphs {
        if all || graphs.rank == 0 {
            graphs.launch(part)?;
            continue;
        }
        if part == Part::Dispatch {
            graphs.launch(Part::Combine)?;
        }
        graphs.launch(Part::Dispatch)?;
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
