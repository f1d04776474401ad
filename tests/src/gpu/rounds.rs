//! Many rounds without a reset, late ranks, and replayed graphs.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use ferry::{Capacity, CombineMode, Config, TokenFormat};
use ferry_reference::Problem;
use ferry_reference::workload::{Routing, WorkloadSpec, generate};

use super::{Outcome, Suite};
use crate::session::{Session, Settings, Turn};
use crate::verify::{Oracle, compare_rows};

/// Problems that rounds take turns with.
pub(super) const SLOTS: usize = 8;
/// Places that results take turns with: one fewer, so that a place never gets the same result
/// twice in a row, and a round that did not run, or did not write, is found out.
pub(super) const PLACES: usize = SLOTS - 1;

/// The turn of a round.
pub(super) const fn turn(round: usize) -> Turn {
    Turn {
        slot: round % SLOTS,
        into: round % PLACES,
    }
}

/// What decides a [`Turns`].
#[derive(Clone, Copy)]
pub(super) struct TurnsOf {
    pub(super) p2p_world_size: usize,
    pub(super) max_sms: Option<u32>,
    pub(super) seed: u64,
}

/// A session with a problem in each slot, and what each must give with experts that return what
/// they get.
pub(super) struct Turns {
    pub(super) session: Session,
    problems: Vec<Problem>,
    wanted: Vec<Vec<Vec<ferry_reference::bf16>>>,
}

impl Turns {
    fn new(suite: &mut Suite<'_>, p2p_world_size: usize) -> Result<Self> {
        let seed = suite.args.seed * 1000;
        Self::of(
            suite,
            TurnsOf {
                p2p_world_size,
                max_sms: None,
                seed,
            },
        )
    }

    /// Makes the session and works out what it must give. Collective.
    pub(super) fn of(suite: &mut Suite<'_>, of: TurnsOf) -> Result<Self> {
        let (tokens, hidden) = if suite.args.quick {
            (6, 128)
        } else {
            (64, 7168)
        };
        let problems: Vec<_> = (0..SLOTS as u64)
            .map(|slot| {
                generate(WorkloadSpec {
                    ranks: suite.ranks(),
                    experts: 64,
                    top_k: 8,
                    hidden,
                    // A different number on every rank and in every round.
                    tokens: (0..suite.ranks())
                        .map(|rank| tokens - (rank + slot as usize) % 5)
                        .collect(),
                    routing: Routing::Zipf { exponent: 0.5 },
                    seed: of.seed + slot,
                })
            })
            .collect();
        // All tokens to one rank: the graph is replayed with data that nobody has counted.
        let capacity = Capacity {
            rows: 8 * tokens * suite.ranks(),
            scale_blocks: 0,
        };
        let config = Config {
            p2p_world_size: Some(of.p2p_world_size),
            deadline: suite.deadline(),
            max_sms: of.max_sms,
            ..Config::new(64, 8, hidden, tokens)
        };
        let settings = Settings {
            config,
            capacity,
            split: false,
        };
        let group = suite.group().clone();
        let mut session = suite.session(&group, &settings, SLOTS)?;
        let mut slots = problems.iter().enumerate();
        let ready = slots
            .try_for_each(|(slot, problem)| session.upload(slot, problem))
            .and_then(|()| session.poison());
        suite.open.agree(ready.map_err(Into::into))?;
        let wanted = problems
            .iter()
            .map(|problem| {
                Oracle::new(problem, &[1.0; 64], TokenFormat::Bf16)
                    .combined(CombineMode::Reduced, true)
            })
            .collect();
        Ok(Self {
            session,
            problems,
            wanted,
        })
    }

    /// Compares what a round's combine gave; no later one may have had its place.
    pub(super) fn verify(&self, round: usize) -> Result<()> {
        let turn = turn(round);
        let (hidden, wanted) = (self.problems[turn.slot].hidden, &self.wanted[turn.slot]);
        for (rank, given) in self.session.combined(turn)? {
            compare_rows(rank, "combined", &wanted[rank], &given, hidden)
                .with_context(|| format!("round {round}"))?;
        }
        Ok(())
    }
}

/// Rounds of a test that has many.
pub(super) fn count(suite: &Suite<'_>) -> usize {
    match suite.args.quick {
        true => suite.args.rounds.min(40),
        false => suite.args.rounds,
    }
}

pub fn run(suite: &mut Suite<'_>) -> Result<()> {
    let rounds = count(suite);
    let ranks = suite.ranks();
    let nodes: &[usize] = if suite.group().reaches_other_nodes() && ranks > 1 {
        &[ranks, 1]
    } else {
        &[ranks]
    };
    for &p2p_world_size in nodes {
        suite.check(
            &format!("{rounds} rounds back to back, {p2p_world_size} a node"),
            |suite| back_to_back(suite, p2p_world_size, rounds),
        )?;
        suite.check(&format!("late ranks, {p2p_world_size} a node"), |suite| {
            late_ranks(suite, p2p_world_size)
        })?;
    }
    suite.check("a graph replayed 100 times with fresh data", replayed_graph)
}

fn back_to_back(suite: &mut Suite<'_>, p2p_world_size: usize, rounds: usize) -> Result<Outcome> {
    let mut turns = Turns::new(suite, p2p_world_size)?;
    let result = enqueue_rounds(&mut turns, rounds);
    let us = result.as_ref().copied().unwrap_or_default().as_secs_f64() * 1e6 / rounds as f64;
    suite.conclude(turns.session, result.map(drop))?;
    Ok(Outcome::Measured(format!(
        "{us:.0} us a round, host wall time"
    )))
}

/// Time of all rounds, verification left out.
fn enqueue_rounds(turns: &mut Turns, rounds: usize) -> Result<Duration> {
    let order: Vec<usize> = (0..turns.session.local_ranks().len()).collect();
    let mut busy = Duration::ZERO;
    let mut start = Instant::now();
    for round in 0..rounds {
        turns
            .session
            .launch_identity(turn(round), &order, |_| ())
            .with_context(|| format!("round {round}"))?;
        if (round + 1) % (4 * SLOTS) == 0 || round + 1 == rounds {
            turns.session.synchronize()?;
            busy += start.elapsed();
            // The last result of every place.
            ((round + 1).saturating_sub(PLACES)..=round).try_for_each(|last| turns.verify(last))?;
            start = Instant::now();
        }
    }
    Ok(busy)
}

/// Knuth's MMIX generator.
pub(super) struct Dice(pub(super) u64);

impl Dice {
    pub(super) const fn below(&mut self, end: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }

    pub(super) fn shuffle<T>(&mut self, items: &mut [T]) {
        for index in (1..items.len()).rev() {
            items.swap(index, self.below(index as u64 + 1) as usize);
        }
    }
}

/// Ranks start in random order, each up to 3 ms after the one before.
fn late_ranks(suite: &mut Suite<'_>, p2p_world_size: usize) -> Result<Outcome> {
    let mut turns = Turns::new(suite, p2p_world_size)?;
    let result = start_late(&mut turns, suite.args.seed);
    suite.conclude(turns.session, result)?;
    Ok(Outcome::Passed)
}

fn start_late(turns: &mut Turns, seed: u64) -> Result<()> {
    let locals = turns.session.local_ranks();
    let mut dice = Dice(seed + locals[0] as u64);
    for round in 0..40 {
        let mut order: Vec<usize> = (0..locals.len()).collect();
        dice.shuffle(&mut order);
        turns.session.launch_identity(turn(round), &order, |_| {
            std::thread::sleep(Duration::from_micros(dice.below(3000)));
        })?;
        turns.session.synchronize()?;
        turns.verify(round)?;
    }
    Ok(())
}

#[cfg(not(feature = "cuda"))]
fn replayed_graph(_: &mut Suite<'_>) -> Result<Outcome> {
    Ok(Outcome::Skipped("only CUDA has graphs".into()))
}

#[cfg(feature = "cuda")]
fn replayed_graph(suite: &mut Suite<'_>) -> Result<Outcome> {
    use ferry::Rank;
    let mut turns = Turns::new(suite, suite.ranks())?;
    let locals = turns.session.local_ranks();
    let devices: Option<Vec<_>> = locals
        .iter()
        .map(|&rank| suite.group().cuda(Rank(rank as u32)))
        .collect();
    let Some(devices) = devices else {
        turns.session.close()?;
        return Ok(Outcome::Skipped("only CUDA has graphs".into()));
    };
    let result = replay_graphs(&mut turns, &devices, suite.args.seed);
    suite.conclude(turns.session, result)?;
    Ok(Outcome::Passed)
}

#[cfg(feature = "cuda")]
fn replay_graphs(
    turns: &mut Turns,
    devices: &[std::sync::Arc<ferry::cuda::CudaDevice>],
    seed: u64,
) -> Result<()> {
    let mut graphs = Vec::new();
    for (index, device) in devices.iter().enumerate() {
        let (_, stream) = turns.session.local(index);
        let session = &mut turns.session;
        let graph = device.capture(stream, || session.launch_identity_on(index, Turn::FIRST))?;
        graphs.push((graph, stream));
    }
    for replay in 0..100 {
        // New contents in the captured tensors; the number of tokens is captured, too.
        let mut fresh = turns.problems[0].clone();
        fresh.inputs = generate(WorkloadSpec {
            ranks: fresh.ranks,
            experts: fresh.experts,
            top_k: fresh.top_k,
            hidden: fresh.hidden,
            tokens: fresh.inputs.iter().map(|input| input.tokens).collect(),
            routing: Routing::Uniform,
            seed: seed * 10_000 + replay,
        })
        .inputs;
        turns.session.upload(0, &fresh)?;
        for (graph, stream) in &mut graphs {
            graph.launch(*stream)?;
        }
        turns.session.synchronize()?;
        let wanted =
            Oracle::new(&fresh, &[1.0; 64], TokenFormat::Bf16).combined(CombineMode::Reduced, true);
        for (rank, given) in turns.session.combined(Turn::FIRST)? {
            compare_rows(rank, "combined", &wanted[rank], &given, fresh.hidden)
                .with_context(|| format!("replay {replay}"))?;
        }
    }
    Ok(())
}
