//! Many rounds without a reset, late ranks, and replayed graphs.

use std::time::{Duration, Instant};

use anyhow::Result;
use ferry::{CombineMode, Config, TokenFormat};
use ferry_reference::Problem;
use ferry_reference::workload::{Routing, WorkloadSpec, generate};

use super::cases::DEADLINE;
use super::{Outcome, Suite};
use crate::session::{Session, Settings};
use crate::verify::{Oracle, capacity_for, compare_rows};

/// Problems that rounds take turns with.
const SLOTS: usize = 8;

/// A session with a problem in each slot, and what each must give with experts that return what
/// they get.
struct Turns {
    session: Session,
    problems: Vec<Problem>,
    wanted: Vec<Vec<Vec<ferry_reference::bf16>>>,
}

impl Turns {
    fn new(suite: &Suite<'_>, p2p_world_size: usize) -> Result<Self> {
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
                    seed: suite.args.seed * 1000 + slot,
                })
            })
            .collect();
        let capacity = problems
            .iter()
            .map(|p| capacity_for(p, TokenFormat::Bf16))
            .max()
            .unwrap_or(0);
        let config = Config {
            experts: 64,
            top_k: 8,
            hidden,
            max_tokens_per_rank: tokens,
            p2p_world_size: Some(p2p_world_size),
            format: TokenFormat::Bf16,
            combine: CombineMode::Reduced,
            deadline: DEADLINE,
            debug_checks: false,
            max_sms: None,
        };
        let settings = Settings {
            config,
            capacity,
            split: false,
        };
        let mut session = Session::with_slots(suite.group(), &settings, SLOTS)?;
        for (slot, problem) in problems.iter().enumerate() {
            session.upload(slot, problem)?;
        }
        let wanted = problems
            .iter()
            .map(|problem| {
                Oracle::new(problem, &[1.0; 64], TokenFormat::Bf16).combined(
                    problem,
                    CombineMode::Reduced,
                    true,
                )
            })
            .collect();
        Ok(Self {
            session,
            problems,
            wanted,
        })
    }

    fn verify(&self, slot: usize) -> Result<()> {
        let hidden = self.problems[slot].hidden;
        for (rank, given) in self.session.combined(slot)? {
            compare_rows(rank, "combined", &self.wanted[slot][rank], &given, hidden)?;
        }
        Ok(())
    }
}

pub fn run(suite: &mut Suite<'_>) -> Result<()> {
    let rounds = if suite.args.quick {
        suite.args.rounds.min(40)
    } else {
        suite.args.rounds
    };
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

fn back_to_back(suite: &Suite<'_>, p2p_world_size: usize, rounds: usize) -> Result<Outcome> {
    let mut turns = Turns::new(suite, p2p_world_size)?;
    let order: Vec<usize> = (0..turns.session.local_ranks().len()).collect();
    let mut busy = Duration::ZERO;
    let mut start = Instant::now();
    for round in 0..rounds {
        turns
            .session
            .launch_identity(round % SLOTS, &order, |_| ())?;
        if (round + 1) % (4 * SLOTS) == 0 || round + 1 == rounds {
            turns.session.synchronize()?;
            busy += start.elapsed();
            (0..SLOTS.min(round + 1)).try_for_each(|slot| turns.verify(slot))?;
            start = Instant::now();
        }
    }
    turns.session.close()?;
    let us = busy.as_secs_f64() * 1e6 / rounds as f64;
    Ok(Outcome::Measured(format!(
        "{us:.0} us a round, host wall time"
    )))
}

/// Ranks start in random order, each up to 3 ms after the one before.
fn late_ranks(suite: &Suite<'_>, p2p_world_size: usize) -> Result<Outcome> {
    let mut turns = Turns::new(suite, p2p_world_size)?;
    let locals = turns.session.local_ranks();
    let mut state = suite.args.seed + locals[0] as u64;
    let mut random = move |below: u64| {
        // Knuth's MMIX generator.
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    for round in 0..40 {
        let mut order: Vec<usize> = (0..locals.len()).collect();
        for index in (1..order.len()).rev() {
            order.swap(index, random(index as u64 + 1) as usize);
        }
        turns.session.launch_identity(round % SLOTS, &order, |_| {
            std::thread::sleep(Duration::from_micros(random(3000)));
        })?;
        turns.session.synchronize()?;
        turns.verify(round % SLOTS)?;
    }
    turns.session.close()?;
    Ok(Outcome::Passed)
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
    let mut graphs = Vec::new();
    for (index, &rank) in locals.iter().enumerate() {
        let Some(device) = suite.group().cuda(Rank(rank as u32)) else {
            return Ok(Outcome::Skipped("only CUDA has graphs".into()));
        };
        let (_, stream) = turns.session.local(index);
        let graph = device.capture(stream, || turns.session.launch_identity_on(index, 0))?;
        graphs.push((graph, stream));
    }
    for replay in 0..100 {
        // New contents in the captured tensors; the number of tokens is captured, too.
        let mut fresh = turns.problems[0].clone();
        let other = generate(WorkloadSpec {
            ranks: suite.ranks(),
            experts: 64,
            top_k: 8,
            hidden: fresh.hidden,
            tokens: fresh.inputs.iter().map(|input| input.tokens).collect(),
            routing: Routing::Uniform,
            seed: suite.args.seed * 10_000 + replay,
        });
        fresh.inputs = other.inputs;
        turns.session.upload(0, &fresh)?;
        for (graph, stream) in &mut graphs {
            graph.launch(*stream)?;
        }
        turns.session.synchronize()?;
        let wanted = Oracle::new(&fresh, &[1.0; 64], TokenFormat::Bf16).combined(
            &fresh,
            CombineMode::Reduced,
            true,
        );
        for (rank, given) in turns.session.combined(0)? {
            compare_rows(rank, "combined", &wanted[rank], &given, fresh.hidden)?;
        }
    }
    drop(graphs);
    turns.session.close()?;
    Ok(Outcome::Passed)
}
