//! Rounds back to back whose tensors are written by kernels of the same stream, right before what
//! reads them; and replays of graphs. Every output of every round is saved in the stream and
//! compared in the end.

mod rig;

use anyhow::{Context, Result};
use ferry::{Capacity, Config, TokenFormat};
use ferry_reference::Problem;
use ferry_reference::workload::{Routing, WorkloadSpec, generate};

use super::cases::scale;
use super::{Outcome, Suite};
use crate::formats;
use crate::session::{Session, Settings};
use crate::verify::{Oracle, capacity_for};
use rig::{Rig, Sources, Step};

const EXPERTS: usize = 64;
const TOP_K: usize = 8;

/// Problems that rounds take turns with.
const PROBLEMS: usize = 5;

/// What a test does.
#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    format: TokenFormat,
    tokens: usize,
    /// Whether a round is a replay.
    is_graph: bool,
    /// Rounds that are enqueued before the host waits.
    together: usize,
    /// How often.
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
    let (tokens, hidden) = match suite.args.quick {
        true => (case.tokens / 8, 128),
        false => (case.tokens, 7168),
    };
    generate(WorkloadSpec {
        ranks: suite.ranks(),
        experts: EXPERTS,
        top_k: TOP_K,
        hidden,
        // A replay has as many tokens as the others.
        tokens: (0..suite.ranks()).map(|rank| tokens - rank % 5).collect(),
        routing: Routing::Zipf { exponent: 0.5 },
        seed: suite.args.seed * 3000 + seed,
    })
}

fn settings(suite: &Suite<'_>, case: Case, problems: &[Problem]) -> Settings {
    let capacity = problems
        .iter()
        .map(|problem| capacity_for(problem, case.format))
        .fold(Capacity::default(), formats::larger);
    let tokens = problems[0].inputs.iter().map(|input| input.tokens).max();
    let config = Config {
        format: case.format,
        deadline: suite.deadline(),
        specialise: case.is_graph && !suite.args.general && !suite.args.quick,
        ..Config::new(EXPERTS, TOP_K, problems[0].hidden, tokens.unwrap_or(1))
    };
    Settings {
        config,
        capacity: Capacity {
            // All outputs are whole words.
            rows: (capacity.rows + 1).next_multiple_of(4),
            scale_blocks: capacity.scale_blocks + 1,
        },
        split: false,
    }
}

fn run_case(suite: &mut Suite<'_>, case: Case) -> Result<Outcome> {
    if case.is_graph && suite.is_simulated() {
        return Ok(Outcome::Skipped("only CUDA has graphs".into()));
    }
    let problems: Vec<Problem> = (0..PROBLEMS as u64)
        .map(|seed| problem(suite, case, seed))
        .collect();
    let scale = scale(EXPERTS);
    let oracles: Vec<Oracle> = problems
        .iter()
        .map(|problem| Oracle::new(problem, &scale, case.format))
        .collect();
    let settings = settings(suite, case, &problems);
    let group = suite.group().clone();
    // The first slot is what rounds read; the others are what is written there.
    let mut session = suite.session(&group, &settings, 1 + PROBLEMS)?;
    let sources = Sources {
        problems: &problems,
        scale: &scale,
        logs: case.together,
        #[cfg(feature = "cuda")]
        probes: &suite.probes,
    };
    let rigs = Rig::set_up(suite.group(), &mut session, &sources);
    let rigs = suite.open.agree(rigs)?;
    let mut rounds = Rounds {
        session,
        rigs,
        oracles,
        settings,
    };
    let result = rounds.run(case, suite.is_simulated());
    let freed = result.and_then(|()| rounds.free());
    suite.conclude(rounds.session, freed)?;
    let count = case.together * case.times;
    Ok(Outcome::Measured(format!("{count} rounds")))
}

/// A session whose tensors kernels write.
struct Rounds {
    session: Session,
    /// Of each local rank.
    rigs: Vec<Rig>,
    oracles: Vec<Oracle>,
    settings: Settings,
}

impl Rounds {
    fn run(&mut self, case: Case, is_simulated: bool) -> Result<()> {
        if case.is_graph {
            for (index, rig) in self.rigs.iter_mut().enumerate() {
                rig.capture(&mut self.session, index)?;
            }
        }
        for time in 0..case.times {
            let first = time * case.together;
            match is_simulated {
                true => self.enqueue_step_by_step(case, first)?,
                false => self.enqueue_rank_by_rank(case, first)?,
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

    /// All rounds of a rank at once, so that each kernel is enqueued while those before it wait.
    fn enqueue_rank_by_rank(&mut self, case: Case, first: usize) -> Result<()> {
        let ranks = self.rigs.len();
        // Another rank is the last one each time.
        for index in (0..ranks).map(|index| (index + first / case.together) % ranks) {
            for log in 0..case.together {
                for &step in steps(case, (first + log) % PROBLEMS, log).iter() {
                    self.rigs[index].perform(&mut self.session, index, step)?;
                }
            }
        }
        Ok(())
    }

    /// Each step of all ranks: the simulator has no kernel that writes, so the host waits for what
    /// is enqueued.
    fn enqueue_step_by_step(&mut self, case: Case, first: usize) -> Result<()> {
        for log in 0..case.together {
            for &step in steps(case, (first + log) % PROBLEMS, log).iter() {
                for (index, rig) in self.rigs.iter_mut().enumerate() {
                    rig.perform(&mut self.session, index, step)?;
                }
            }
        }
        Ok(())
    }

    /// Compares what was saved of a round.
    fn verify(&mut self, round: usize, log: usize) -> Result<()> {
        for (index, rig) in self.rigs.iter_mut().enumerate() {
            rig.perform(&mut self.session, index, Step::Restore(log))?;
        }
        self.session.synchronize()?;
        let outputs = (0..self.rigs.len())
            .map(|index| self.session.outputs_on(index, true))
            .collect::<Result<Vec<_>, _>>()?;
        let which = round % PROBLEMS;
        let mode = self.settings.config.combine;
        Ok(self.oracles[which].verify(mode, true, &outputs)?)
    }

    fn free(&mut self) -> Result<()> {
        self.rigs.drain(..).try_for_each(Rig::free)
    }
}

/// A round: everything that it reads and writes is written before, and what it wrote is saved.
fn steps(case: Case, problem: usize, log: usize) -> Vec<Step> {
    let before = [Step::Poison, Step::Stage(problem), Step::Inputs(problem)];
    let round: &[Step] = match case.is_graph {
        true => &[Step::Replay],
        false => &Step::ROUND,
    };
    [&before, round, &[Step::Save(log)]].concat()
}
