//! Times dispatch and combine.

use std::time::Duration;

use anyhow::{Context, Result};
use ferry::{Capacity, Config, Plan, ReceiveLayout, TokenFormat};
use ferry_reference::{Problem, bf16};

use super::options::BenchArgs;
use super::rig::{Repeats, Rig, Stage, Timed};
use super::statistics::Summary;
use super::traffic::{MemoryTraffic, Traffic};
use ferry_rig::formats::{
    self,
    given::{Given, Strides},
};
use ferry_rig::verify::{Compared, Groups, Placement, largest};
use ferry_rig::{Graphs, Session, Settings, Turn};

/// Problems that the calls rotate through, so that each finds new data.
const SETS: usize = 4;
/// Pairs of dispatch and combine in a graph.
const PAIRS: usize = 20;
/// Longest wait of a kernel, of ranks that have a GPU each.
const DEADLINE: Duration = Duration::from_secs(5);

/// Generates the problems of so many ranks, with the most tokens. Fewer tokens are the first ones of these.
pub fn sets(ranks: usize, args: &BenchArgs) -> Vec<Problem> {
    let most = args.tokens.last().copied().unwrap_or(0);
    let problem = |set| {
        ferry_rig::problem(
            vec![most; ranks],
            [args.experts, args.top_k, args.hidden],
            args.routing.0.clone(),
            args.seed.wrapping_mul(1000).wrapping_add(set as u64),
        )
    };
    (0..SETS).map(problem).collect()
}

/// Communicators of this process's ranks for one number of tokens, with their tensors.
pub struct Bench<'a> {
    rig: &'a Rig<'a>,
    sets: &'a [Problem],
    /// Plan under measurement.
    pub plan: Plan,
    /// Its slots have the sets.
    pub session: Session,
    tokens: usize,
    given: Given,
}

/// Options of a timed round.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub enum Options {
    /// Nothing: kernels without options.
    None,
    /// Nothing, and kernels with options are loaded.
    Loaded,
    /// The number of tokens, on the device.
    TokensOnDevice,
    /// A bias and a residual.
    Steps,
    /// Rows of a shared expert.
    SharedExpert,
}

impl Options {
    /// Every one, in the order of the table.
    pub const ALL: [Self; 5] = [
        Self::None,
        Self::Loaded,
        Self::TokensOnDevice,
        Self::Steps,
        Self::SharedExpert,
    ];
}

/// Input of dispatch, and its options.
#[derive(Clone, Copy)]
pub struct Input {
    /// Form of the tokens.
    pub given: Given,
    /// Places of their scales, if they are encoded.
    pub strides: Strides,
    /// Options.
    pub options: Options,
}

impl Input {
    /// Input that the command line asks for, without options.
    pub fn of(args: &BenchArgs, format: TokenFormat) -> Self {
        Self {
            given: args.given(format),
            strides: args.strides(),
            options: Options::None,
        }
    }
}

/// Calls of a set: BF16 rows go back as they came.
fn turn(set: usize, format: TokenFormat) -> Turn {
    Turn {
        returns: format == TokenFormat::Bf16,
        ..Turn::of(set, 0)
    }
}

/// Capacity of outputs for so many tokens of each rank.
fn capacity(plan: &Plan, sets: &[Problem], tokens: usize) -> Capacity {
    let config = plan.config();
    if config.receive.layout() != ReceiveLayout::ByExpert {
        return Capacity::max(plan);
    }
    if config.max_tokens_per_rank <= ANY_ROUTING_TOKENS {
        return Capacity {
            // The transposed scales want rows of 16 bytes.
            rows: plan.max_rows().next_multiple_of(16),
            scale_blocks: plan.max_scale_blocks(),
            ..Capacity::default()
        };
    }
    let needed = |problem| largest(&placements(problem, config, tokens));
    let needed = sets.iter().map(needed);
    let needed = needed.fold(Capacity::default(), formats::larger);
    Capacity {
        rows: needed.rows.next_multiple_of(16),
        ..needed
    }
}

/// Places of the first `tokens` tokens of every rank, on each rank.
fn placements(problem: &Problem, config: &Config, tokens: usize) -> Vec<Placement> {
    let compared = Compared {
        tokens,
        shared: config.shared_expert.then_some(1.0),
        groups: Groups::of(config),
        ..Compared::ALL
    };
    Placement::of(problem, config.format, compared)
}

/// Up to so many tokens outputs hold what any routing can bring, as in a captured graph; above, that would
/// be gigabytes, and they hold what the problems bring.
const ANY_ROUTING_TOKENS: usize = 1024;

impl<'a> Bench<'a> {
    /// Makes communicators and outputs. Collective, as all calls below that time or close.
    pub fn new(
        rig: &'a Rig<'a>,
        sets: &'a [Problem],
        config: Config,
        tokens: usize,
        input: Input,
    ) -> Result<Self> {
        let config = Config {
            deadline: rig.scaled(DEADLINE),
            ..config
        };
        let plan = Plan::new(&rig.group, config)?;
        let settings = Settings {
            capacity: capacity(&plan, sets, tokens),
            input_scale: None,
            counted: input.options == Options::TokensOnDevice,
            given: input.given,
            strides: input.strides,
            ..Settings::of(config, &[])
        };
        let mut session = Session::with_slots(&rig.group, &settings, SETS)?;
        session.use_streams(rig.gpus.iter().map(|gpu| gpu.stream));
        for (set, problem) in sets.iter().enumerate() {
            session.upload_first(set, problem, tokens)?;
        }
        if ferry_rig::takes_weights(&config) {
            // All sets get those of the first: values do not change the time.
            let placements = placements(&sets[0], &config, tokens);
            session.give_weights(&sets[0], &placements)?;
        }
        if input.options == Options::Steps {
            let zeros = vec![bf16::ZERO; tokens * config.hidden];
            session.add_steps(&vec![zeros; rig.ranks()], true)?;
        }
        Ok(Self {
            rig,
            sets,
            plan,
            session,
            tokens,
            given: input.given,
        })
    }

    /// Tokens of each rank.
    pub const fn tokens(&self) -> usize {
        self.tokens
    }

    /// The kind of the group.
    pub fn group_name(&self) -> &'static str {
        self.rig.group.name()
    }

    /// Most ranks that have one GPU.
    pub const fn ranks_per_gpu(&self) -> usize {
        self.rig.ranks_per_gpu
    }

    /// Traffic on the wire, of the first set.
    pub fn traffic(&self) -> Traffic {
        Traffic::of(&self.sets[0], self.plan.shape(), self.tokens)
    }

    /// Traffic of device memory, of the first set, if all ranks share one GPU.
    pub fn memory_traffic(&self) -> Option<MemoryTraffic> {
        let of = || MemoryTraffic::of(&self.sets[0], &self.plan, self.given, self.tokens);
        let ranks = self.rig.ranks();
        (ranks > 1 && self.rig.ranks_per_gpu == ranks).then(of)
    }

    fn time(&mut self, repeats: Repeats, split: bool) -> Result<Vec<Timed>> {
        let halves: &[usize] = if split { &[0, 1, 2, 3] } else { &[0, 2] };
        let stages = halves.iter().map(|half| match half % 2 {
            0 => Stage::Aligned,
            _ => Stage::Following,
        });
        let stages: Vec<Stage> = stages.collect();
        let format = self.plan.config().format;
        let each = self.session.each().map(|(communicator, rank)| {
            move |stage: usize, iteration: u32| {
                let tensors = rank.tensors(turn(iteration as usize % SETS, format));
                Ok(tensors.enqueue(communicator, rank.stream, halves[stage], split)?)
            }
        });
        let timed = self.rig.time(repeats, &stages, each.collect())?;
        self.session.synchronize()?;
        Ok(timed)
    }

    /// Dispatch and combine.
    pub fn fused(&mut self, repeats: Repeats) -> Result<[Timed; 2]> {
        let mut timed = self.time(repeats, false)?.into_iter();
        Ok([(); 2].map(|()| timed.next().unwrap_or_default()))
    }

    /// Their halves: sending and waiting of dispatch, then of combine.
    pub fn halves(&mut self, repeats: Repeats) -> Result<[Timed; 4]> {
        let mut timed = self.time(repeats, true)?.into_iter();
        Ok([(); 4].map(|()| timed.next().unwrap_or_default()))
    }

    /// The period of pairs, in microseconds, replayed as a graph back to back: of each replay the mean of its
    /// pairs. Each pair has other inputs than the one before; the last has the first set.
    pub fn pair(&mut self, replays: u32) -> Result<Summary> {
        let format = self.plan.config().format;
        let pairs = |session: &mut Session, index| {
            let mut sets = (0..PAIRS).rev().map(|pair| pair % SETS);
            sets.try_for_each(|set| session.launch(index, turn(set, format)))
        };
        let graphs = Graphs::capture(&self.rig.group, &mut self.session, pairs)?;
        let mut graphs = graphs.context("not CUDA devices")?;
        self.rig.processes.meet()?;
        // The first launch of a graph does more than the later ones.
        graphs.launch_all()?;
        self.session.synchronize()?;
        let each = graphs.each().map(|(graph, stream)| {
            move |_stage: usize, _iteration: u32| Ok(graph.launch(*stream)?)
        });
        let repeats = Repeats {
            warmup: 2,
            iterations: replays,
            flush: false,
            late: false,
        };
        let timed = self.rig.time(repeats, &[Stage::Aligned], each.collect())?;
        self.session.synchronize()?;
        Ok(timed[0].gpu_us.over(PAIRS as f64))
    }

    /// Makes one round of the first set, untimed, on outputs full of poison.
    pub fn once(&mut self) -> Result<()> {
        self.session.poison()?;
        self.rig.processes.meet()?;
        let first = turn(0, self.plan.config().format);
        for half in [0, 2] {
            for (communicator, rank) in self.session.each() {
                rank.tensors(first)
                    .enqueue(communicator, rank.stream, half, false)?;
            }
        }
        Ok(self.session.synchronize()?)
    }

    /// Frees everything, once no process has failed.
    pub fn close(self) -> Result<()> {
        self.rig.processes.meet()?;
        Ok(self.session.close()?)
    }
}
