//! Tokens that the device counts: one graph, or one call where there are none, with many numbers of them.

use anyhow::{Context, Result};
use ferry::{CombineMode, Config, Receive, ReceiveLayout, TokenFormat};
use ferry_reference::Problem;
use ferry_reference::workload::Routing;

use super::{Outcome, Suite};
use ferry_rig::verify::Oracle;
use ferry_rig::{Graphs, ROW_LAYOUTS, Session, Settings, Turn};

const EXPERTS: usize = 64;
/// Tokens of the first rank; each other one has that of the number before. Few are numbered in blocks, many
/// in tiles, and some rows are cut.
const COUNTS: [usize; 20] = [
    128, 0, 1, 2, 3, 5, 8, 16, 31, 32, 33, 64, 100, 127, 128, 300, 511, 512, 700, 1024,
];

pub fn run(suite: &mut Suite<'_>) -> Result<()> {
    let most = if suite.args.quick { 33 } else { 1024 };
    let name =
        format!("tokens counted on the device, at most {most}, a graph replayed with each number");
    suite.check(&name, |suite| replay(suite, most))?;
    for receive in ROW_LAYOUTS {
        let name =
            format!("tokens counted on the device, graphs of dispatch and of combine, {receive}");
        suite.check(&name, |suite| replay_rows(suite, most, receive))?;
    }
    Ok(())
}

fn problem(suite: &Suite<'_>, most: usize, index: usize) -> Problem {
    let ranks = suite.ranks();
    let count = |rank: usize| {
        let index = (index + COUNTS.len() - rank % COUNTS.len()) % COUNTS.len();
        COUNTS[index].min(most)
    };
    let hidden = if suite.args.quick { 64 } else { 7168 };
    ferry_rig::problem(
        (0..ranks).map(count).collect(),
        [EXPERTS / ranks * ranks, 8, hidden],
        Routing::Uniform,
        suite.args.seed * 7000 + index as u64,
    )
}

fn problems(suite: &Suite<'_>, most: usize) -> Vec<Problem> {
    (0..COUNTS.len())
        .map(|index| problem(suite, most, index))
        .collect()
}

fn replay(suite: &mut Suite<'_>, most: usize) -> Result<Outcome> {
    let problems = problems(suite, most);
    let config = Config {
        options: true,
        ..suite.config(&problems)
    };
    let settings = Settings {
        counted: true,
        ..Settings::of(config, &problems)
    };
    suite.with_session(&settings, 1, |suite, session| {
        replay_all(suite, session, &problems)
    })?;
    Ok(Outcome::Passed)
}

fn replay_all(suite: &Suite<'_>, session: &mut Session, problems: &[Problem]) -> Result<()> {
    let enqueue = |session: &mut Session, index| session.launch(index, Turn::RETURNED);
    let mut graphs = Graphs::capture(suite.group(), session, enqueue)?;
    for (index, problem) in problems.iter().enumerate() {
        session.upload(0, problem)?;
        session.poison()?;
        match &mut graphs {
            Some(graphs) => graphs.launch_all()?,
            None => session.launch_all(Turn::RETURNED)?,
        }
        session.synchronize()?;
        let scale = vec![1.0; problem.experts];
        Oracle::new(problem, &scale, TokenFormat::Bf16)
            .verify(CombineMode::Reduced, true, &session.outputs()?)
            .with_context(|| format!("number {index}"))?;
    }
    Ok(())
}

fn replay_rows(suite: &mut Suite<'_>, most: usize, receive: ReceiveLayout) -> Result<Outcome> {
    let problems = problems(suite, most);
    let config = Config {
        receive: Receive::of(receive),
        ..suite.config(&problems)
    };
    let settings = Settings {
        counted: true,
        ..Settings::of(config, &problems)
    };
    suite.with_session(&settings, 1, |suite, session| {
        let mut graphs = Vec::new();
        for halves in [0..2, 2..4] {
            let enqueue = |session: &mut Session, index| {
                (halves.clone()).try_for_each(|half| session.launch_half(index, half))
            };
            graphs.push(Graphs::capture(suite.group(), session, enqueue)?);
        }
        (problems.iter().enumerate()).try_for_each(|(index, problem)| {
            replay_parts(session, &mut graphs, problem).with_context(|| format!("number {index}"))
        })
    })?;
    Ok(Outcome::Passed)
}

/// A round whose dispatch and combine are graphs, if there are any, with experts on the host between them.
fn replay_parts(
    session: &mut Session,
    graphs: &mut [Option<Graphs>],
    problem: &Problem,
) -> Result<()> {
    let scale = ferry_rig::factors(problem.experts, 0);
    session.upload(0, problem)?;
    session.poison()?;
    for (graphs, halves) in graphs.iter_mut().zip([0..2, 2..4]) {
        if halves.start == 2 {
            session.run_experts(problem, &scale)?;
        }
        match graphs {
            Some(graphs) => graphs.launch_all()?,
            None => session.launch_halves(halves)?,
        }
        session.synchronize()?;
    }
    Oracle::new(problem, &scale, TokenFormat::Bf16)
        .verify(CombineMode::Reduced, true, &session.outputs()?)
        .map_err(Into::into)
}
