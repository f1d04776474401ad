//! Rounds back to back whose tensors are written by kernels of the same stream, right before what
//! reads them; and replays of graphs. Every output of every round is saved in the stream and
//! compared in the end.

mod copies;

use anyhow::{Context, Result};
use ferry::{Config, Error, TokenFormat};
use ferry_reference::Problem;
use ferry_reference::workload::Routing;

use super::{Outcome, Suite};
use copies::{Copies, Sources, Step};
use ferry_rig::verify::Oracle;
use ferry_rig::{Graphs, Session, Settings, factors};

const EXPERTS: usize = 64;
const TOP_K: usize = 8;

/// Problems that rounds take turns with.
const PROBLEMS: usize = 5;

/// Test.
#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    format: TokenFormat,
    tokens: usize,
    /// Whether a round is a replay.
    is_graph: bool,
    /// Rounds that are enqueued before the host waits.
    together: usize,
    /// Number of times.
    times: usize,
}

const BF16: TokenFormat = TokenFormat::Bf16;
const NVFP4: TokenFormat = TokenFormat::Nvfp4(ferry::ScaleLayout::Tiled);

/// Name, format, tokens, whether a round is a replay.
#[rustfmt::skip]
const CASES: [(&str, TokenFormat, usize, bool); 5] = [
    ("inputs that a kernel writes right before each round, BF16, 64 tokens", BF16, 64, false),
    ("inputs that a kernel writes right before each round, BF16, 512 tokens", BF16, 512, false),
    ("inputs that a kernel writes right before each round, NVFP4, 64 tokens", NVFP4, 64, false),
    ("graph replays back to back, every output, BF16, 64 tokens", BF16, 64, true),
    ("graph replays back to back, every output, NVFP4, 64 tokens", NVFP4, 64, true),
];

pub fn run(suite: &mut Suite<'_>) -> Result<()> {
    for (name, format, tokens, is_graph) in CASES {
        let (together, times) = match (suite.args.quick, tokens > 64) {
            (true, _) => (PROBLEMS + 1, 1),
            (false, true) => (PROBLEMS + 1, 3),
            (false, false) => (2 * PROBLEMS, 10),
        };
        let case = Case {
            name,
            format,
            tokens,
            is_graph,
            together,
            times,
        };
        suite.check(case.name, |suite| run_case(suite, case))?;
    }
    Ok(())
}

fn problem(suite: &Suite<'_>, case: Case, seed: u64) -> Problem {
    let (tokens, hidden) = if suite.args.quick {
        (case.tokens / 8, 128)
    } else {
        (case.tokens, 7168)
    };
    // A replay has as many tokens as the others.
    let tokens = (0..suite.ranks()).map(|rank| tokens - rank % 5);
    let routing = Routing::Zipf { exponent: 0.5 };
    let seed = suite.args.seed * 3000 + seed;
    ferry_rig::problem(tokens.collect(), [EXPERTS, TOP_K, hidden], routing, seed)
}

fn settings(suite: &Suite<'_>, case: Case, problems: &[Problem]) -> Settings {
    let config = Config {
        format: case.format,
        specialise: case.is_graph && !suite.args.general && !suite.args.quick,
        ..suite.config(problems)
    };
    let mut settings = Settings::of(config, problems).with_spare(1, 1);
    // All outputs are whole words.
    settings.capacity.rows = settings.capacity.rows.next_multiple_of(4);
    settings
}

fn run_case(suite: &mut Suite<'_>, case: Case) -> Result<Outcome> {
    if case.is_graph && suite.is_simulated() {
        return Ok(Outcome::Skipped("only CUDA has graphs".into()));
    }
    let problems: Vec<Problem> = (0..PROBLEMS as u64)
        .map(|seed| problem(suite, case, seed))
        .collect();
    let scale = factors(EXPERTS, 0);
    let oracle = |problem| Oracle::new(problem, &scale, case.format);
    let oracles: Vec<Oracle> = problems.iter().map(oracle).collect();
    let settings = settings(suite, case, &problems);
    let group = suite.group().clone();
    // The first slot is what rounds read; the others are what is written there.
    let mut session = suite.session(&group, &settings, 1 + PROBLEMS)?;
    let sources = Sources {
        problems: &problems,
        oracles: &oracles,
        scale: &scale,
        logs: case.together,
        #[cfg(feature = "cuda")]
        probes: &suite.probes,
    };
    let copies = set_up(suite, &mut session, &sources);
    let copies = suite.open.agree(copies)?;
    let mut rounds = Rounds {
        session,
        copies,
        graphs: None,
        oracles,
    };
    let result = rounds.run(suite, case);
    let Rounds {
        session,
        copies,
        graphs,
        oracles: _,
    } = rounds;
    // A communicator that a graph holds is not closed.
    drop(graphs);
    let freed = result.and_then(|()| copies.into_iter().try_for_each(Copies::free));
    suite.conclude(session, freed)?;
    let count = case.together * case.times;
    Ok(Outcome::Measured(format!("{count} rounds")))
}

/// Uploads the problems into the session's slots from 1 on, and allocates what it lacks.
fn set_up(suite: &Suite<'_>, session: &mut Session, sources: &Sources<'_>) -> Result<Vec<Copies>> {
    // The first one says how many tokens there are.
    session.upload(0, &sources.problems[0])?;
    for (slot, problem) in (1..).zip(sources.problems) {
        session.upload(slot, problem)?;
    }
    let ranks = 0..session.local_ranks().len();
    ranks
        .map(|index| Copies::new(suite.group(), session, index, sources))
        .collect()
}

/// A session whose tensors kernels write.
struct Rounds {
    session: Session,
    /// Memory beside each local rank's session.
    copies: Vec<Copies>,
    graphs: Option<Graphs>,
    oracles: Vec<Oracle>,
}

/// Enqueues a step on a local rank.
fn perform(
    session: &mut Session,
    copies: &[Copies],
    index: usize,
    step: Step,
) -> Result<(), Error> {
    match step {
        Step::Dispatch => session.launch_half(index, 0),
        Step::Combine => session.launch_half(index, 2),
        _ => copies[index].write(step),
    }
}

impl Rounds {
    fn run(&mut self, suite: &Suite<'_>, case: Case) -> Result<()> {
        if case.is_graph {
            let copies = &self.copies;
            let round = |session: &mut Session, index| {
                let mut steps = Step::ROUND.into_iter();
                steps.try_for_each(|step| perform(session, copies, index, step))
            };
            self.graphs = Graphs::capture(suite.group(), &mut self.session, round)?;
        }
        let ranks = self.copies.len();
        for time in 0..case.times {
            let first = time * case.together;
            // Another rank is the last one each time.
            let order = (0..ranks).map(|index| (index + time) % ranks);
            let order: Vec<usize> = order.collect();
            if suite.is_simulated() {
                self.enqueue_step_by_step(case, first, &order)?;
            } else {
                self.enqueue_rank_by_rank(case, first, &order)?;
            }
            self.session
                .synchronize()
                .with_context(|| format!("rounds {first} and up"))?;
            for log in 0..case.together {
                let round = first + log;
                self.verify(round, log)
                    .with_context(|| format!("round {round}"))?;
            }
        }
        Ok(())
    }

    fn perform(&mut self, index: usize, step: Step) -> Result<(), Error> {
        match (step, &mut self.graphs) {
            (Step::Replay, Some(graphs)) => graphs.launch(index),
            _ => perform(&mut self.session, &self.copies, index, step),
        }
    }

    /// All rounds of a rank at once, so that each kernel is enqueued while those before it wait.
    fn enqueue_rank_by_rank(&mut self, case: Case, first: usize, order: &[usize]) -> Result<()> {
        for &index in order {
            for log in 0..case.together {
                for step in steps(case, (first + log) % PROBLEMS, log) {
                    self.perform(index, step)?;
                }
            }
        }
        Ok(())
    }

    /// Each step of all ranks: the simulator has no kernel that writes, so the host waits for what
    /// is enqueued.
    fn enqueue_step_by_step(&mut self, case: Case, first: usize, order: &[usize]) -> Result<()> {
        for log in 0..case.together {
            for step in steps(case, (first + log) % PROBLEMS, log) {
                for &index in order {
                    self.perform(index, step)?;
                }
            }
        }
        Ok(())
    }

    /// Compares what was saved of a round.
    fn verify(&mut self, round: usize, log: usize) -> Result<()> {
        for copies in &self.copies {
            copies.write(Step::Restore(log))?;
        }
        self.session.synchronize()?;
        let outputs = self.session.outputs()?;
        let mode = self.session.plan().config().combine;
        Ok(self.oracles[round % PROBLEMS].verify(mode, true, &outputs)?)
    }
}

/// A round: everything that it reads and writes is written before, and what it wrote is saved.
fn steps(case: Case, problem: usize, log: usize) -> Vec<Step> {
    let before = [Step::Poison, Step::Stage(problem), Step::Inputs(problem)];
    let round: &[Step] = if case.is_graph {
        &[Step::Replay]
    } else {
        &Step::ROUND
    };
    [&before, round, &[Step::Save(log)]].concat()
}
