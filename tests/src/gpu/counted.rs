//! Tokens that the device counts: one graph, or one call where there are none, with many numbers of them.

use anyhow::{Context, Result};
use ferry::{Capacity, CombineMode, Config, TokenFormat};
use ferry_reference::Problem;
use ferry_reference::workload::{Routing, WorkloadSpec, generate};

use super::{Outcome, Suite};
use crate::formats;
use crate::session::{Session, Settings, Turn};
use crate::verify::{Oracle, capacity_for};

const EXPERTS: usize = 64;
/// Of the first rank; each other one has that of the number before. Few are numbered in blocks, many in
/// tiles, and some rows are cut.
const COUNTS: [usize; 20] = [
    128, 0, 1, 2, 3, 5, 8, 16, 31, 32, 33, 64, 100, 127, 128, 300, 511, 512, 700, 1024,
];

pub fn run(suite: &mut Suite<'_>) -> Result<()> {
    let most = match suite.args.quick {
        true => 33,
        false => 1024,
    };
    let name =
        format!("tokens counted on the device, at most {most}, a graph replayed with each number");
    suite.check(&name, |suite| replay(suite, most))
}

fn problem(suite: &Suite<'_>, most: usize, index: usize) -> Problem {
    let ranks = suite.ranks();
    let count = |rank: usize| {
        let index = (index + COUNTS.len() - rank % COUNTS.len()) % COUNTS.len();
        COUNTS[index].min(most)
    };
    generate(WorkloadSpec {
        ranks,
        experts: EXPERTS / ranks * ranks,
        top_k: 8,
        hidden: if suite.args.quick { 64 } else { 7168 },
        tokens: (0..ranks).map(count).collect(),
        routing: Routing::Uniform,
        seed: suite.args.seed * 7000 + index as u64,
    })
}

fn replay(suite: &mut Suite<'_>, most: usize) -> Result<Outcome> {
    let problems: Vec<Problem> = (0..COUNTS.len())
        .map(|index| problem(suite, most, index))
        .collect();
    let capacity = problems
        .iter()
        .map(|problem| capacity_for(problem, TokenFormat::Bf16))
        .fold(Capacity::default(), formats::larger);
    let config = Config {
        deadline: suite.deadline(),
        options: true,
        ..Config::new(problems[0].experts, 8, problems[0].hidden, most)
    };
    let settings = Settings {
        config,
        capacity,
        split: false,
    };
    let group = suite.group().clone();
    let mut session = suite.session(&group, &settings, 1)?;
    session.count_on_device();
    let result = replay_all(suite, &mut session, &problems);
    suite.conclude(session, result)?;
    Ok(Outcome::Passed)
}

fn replay_all(suite: &Suite<'_>, session: &mut Session, problems: &[Problem]) -> Result<()> {
    let mut launches = Launches::of(suite, session)?;
    for (index, problem) in problems.iter().enumerate() {
        session.upload(0, problem)?;
        session.poison()?;
        launches.launch(session)?;
        session.synchronize()?;
        let scale = vec![1.0; problem.experts];
        let locals = 0..session.local_ranks().len();
        let outputs: Result<Vec<_>, _> = locals
            .map(|local| session.outputs_on(local, true))
            .collect();
        Oracle::new(problem, &scale, TokenFormat::Bf16)
            .verify(CombineMode::Reduced, true, &outputs?)
            .with_context(|| format!("number {index}"))?;
    }
    Ok(())
}

/// A round on every local rank: captured once, where there is something to capture with.
struct Launches {
    #[cfg(feature = "cuda")]
    graphs: Vec<(ferry::cuda::CudaGraph, ferry::Stream)>,
}

impl Launches {
    #[cfg(feature = "cuda")]
    fn of(suite: &Suite<'_>, session: &mut Session) -> Result<Self> {
        let mut graphs = Vec::new();
        for (index, rank) in session.local_ranks().into_iter().enumerate() {
            let Some(device) = suite.group().cuda(ferry::Rank(rank as u32)) else {
                continue;
            };
            let (_, stream) = session.local(index);
            let graph =
                device.capture(stream, || session.launch_identity_on(index, Turn::FIRST))?;
            graphs.push((graph, stream));
        }
        Ok(Self { graphs })
    }

    #[cfg(not(feature = "cuda"))]
    fn of(_: &Suite<'_>, _: &mut Session) -> Result<Self> {
        Ok(Self {})
    }

    fn launch(&mut self, session: &mut Session) -> Result<()> {
        #[cfg(feature = "cuda")]
        if !self.graphs.is_empty() {
            for (graph, stream) in &mut self.graphs {
                graph.launch(*stream)?;
            }
            return Ok(());
        }
        for index in 0..session.local_ranks().len() {
            session.launch_identity_on(index, Turn::FIRST)?;
        }
        Ok(())
    }
}
