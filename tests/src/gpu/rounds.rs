//! Many rounds without a reset, late ranks, and replayed graphs.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use ferry::{Capacity, CombineMode, Config, TokenFormat};
use ferry_reference::workload::Routing;
use ferry_reference::{Problem, bf16};

use super::{Outcome, Suite};
use ferry_rig::verify::{Oracle, compare_rows};
use ferry_rig::{Dice, Graphs, Session, Settings, Turn};

/// Problems that rounds take turns with.
pub(super) const SLOTS: usize = 8;
/// Places that results take turns with: one fewer, so that a place never gets the same result
/// twice in a row, and a round that did not run, or did not write, is found out.
pub(super) const PLACES: usize = SLOTS - 1;

/// The turn of a round.
pub(super) const fn turn(round: usize) -> Turn {
    Turn::of(round % SLOTS, round % PLACES)
}

/// Parameters of a [`Turns`].
#[derive(Clone, Copy)]
pub(super) struct TurnsOf {
    pub(super) p2p_world_size: usize,
    /// Tokens of each rank in all rounds, instead of other numbers in each.
    pub(super) tokens: Option<usize>,
    pub(super) max_sms: Option<u32>,
    pub(super) seed: u64,
}

impl TurnsOf {
    pub(super) fn new(suite: &Suite<'_>, p2p_world_size: usize) -> Self {
        Self {
            p2p_world_size,
            tokens: None,
            max_sms: None,
            seed: suite.args.seed * 1000,
        }
    }
}

/// A session with a problem in each slot, and what each must give with experts that return what
/// they get.
pub(super) struct Turns {
    pub(super) session: Session,
    problems: Vec<Problem>,
    wanted: Vec<Vec<Vec<bf16>>>,
}

/// Results of a problem whose experts return the rows, by rank.
pub(super) fn returned(problem: &Problem) -> Vec<Vec<bf16>> {
    Oracle::new(problem, &vec![1.0; problem.experts], TokenFormat::Bf16)
        .combined(CombineMode::Reduced, true)
}

/// Compares the results of a turn on all local ranks.
pub(super) fn compare(session: &Session, turn: Turn, wanted: &[Vec<bf16>]) -> Result<()> {
    let hidden = session.plan().config().hidden;
    for (rank, given) in session.combined(turn)? {
        compare_rows(rank, "combined", &wanted[rank], &given, hidden)?;
    }
    Ok(())
}

impl Turns {
    fn new(suite: &mut Suite<'_>, p2p_world_size: usize) -> Result<Self> {
        Self::of(suite, TurnsOf::new(suite, p2p_world_size))
    }

    /// Makes the session and works out what it must give. Collective.
    pub(super) fn of(suite: &mut Suite<'_>, of: TurnsOf) -> Result<Self> {
        let (tokens, hidden) = if suite.args.quick {
            (6, 128)
        } else {
            (64, 7168)
        };
        let problem = |slot: usize| {
            // A different number on every rank and in every round.
            let fewer = |rank| tokens - (rank + slot) % 5;
            let tokens = (0..suite.ranks()).map(|rank| of.tokens.unwrap_or_else(|| fewer(rank)));
            let routing = Routing::Zipf { exponent: 0.5 };
            let seed = of.seed + slot as u64;
            ferry_rig::problem(tokens.collect(), [64, 8, hidden], routing, seed)
        };
        let problems: Vec<_> = (0..SLOTS).map(problem).collect();
        // All tokens to one rank: the graph is replayed with data that nobody has counted.
        let capacity = Capacity {
            rows: 8 * tokens * suite.ranks(),
            ..Capacity::default()
        };
        let config = Config {
            p2p_world_size: Some(of.p2p_world_size),
            deadline: suite.deadline(),
            max_sms: of.max_sms,
            ..Config::new(64, 8, hidden, tokens)
        };
        let settings = Settings {
            capacity,
            ..Settings::of(config, &[])
        };
        let group = suite.group().clone();
        let mut session = suite.session(&group, &settings, SLOTS)?;
        let mut slots = problems.iter().enumerate();
        let ready = slots
            .try_for_each(|(slot, problem)| session.upload(slot, problem))
            .and_then(|()| session.poison());
        suite.open.agree(ready.map_err(Into::into))?;
        Ok(Self {
            session,
            wanted: problems.iter().map(returned).collect(),
            problems,
        })
    }

    /// Compares what a round's combine gave; no later one may have had its place.
    pub(super) fn verify(&self, round: usize) -> Result<()> {
        let turn = turn(round);
        compare(&self.session, turn, &self.wanted[turn.slot])
            .with_context(|| format!("round {round}"))
    }
}

/// Rounds of a test that has many.
pub(super) fn count(suite: &Suite<'_>) -> usize {
    let most = if suite.args.quick { 40 } else { usize::MAX };
    suite.args.rounds.min(most)
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
            |suite| back_to_back(suite, TurnsOf::new(suite, p2p_world_size), rounds),
        )?;
        let of_one_token =
            format!("{rounds} rounds of 1 token back to back, {p2p_world_size} a node");
        suite.check(&of_one_token, |suite| {
            let turns = TurnsOf {
                tokens: Some(1),
                ..TurnsOf::new(suite, p2p_world_size)
            };
            back_to_back(suite, turns, rounds)
        })?;
        suite.check(&format!("late ranks, {p2p_world_size} a node"), |suite| {
            late_ranks(suite, p2p_world_size)
        })?;
    }
    suite.check("a graph replayed 100 times with fresh data", replayed_graph)
}

fn back_to_back(suite: &mut Suite<'_>, turns: TurnsOf, rounds: usize) -> Result<Outcome> {
    let mut turns = Turns::of(suite, turns)?;
    let result = enqueue_rounds(&mut turns, rounds);
    let busy = suite.conclude(turns.session, result)?;
    let us = busy.as_secs_f64() * 1e6 / rounds as f64;
    Ok(Outcome::Measured(format!(
        "{us:.0} us a round, host wall time"
    )))
}

/// Time of all rounds, verification left out.
fn enqueue_rounds(turns: &mut Turns, rounds: usize) -> Result<Duration> {
    let mut busy = Duration::ZERO;
    let mut start = Instant::now();
    for round in 0..rounds {
        turns
            .session
            .launch_all(turn(round))
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

/// Ranks start in random order, each up to 3 ms after the one before.
fn late_ranks(suite: &mut Suite<'_>, p2p_world_size: usize) -> Result<Outcome> {
    let mut turns = Turns::new(suite, p2p_world_size)?;
    let result = start_late(&mut turns, suite.args.seed);
    suite.conclude(turns.session, result)?;
    Ok(Outcome::Passed)
}

fn start_late(turns: &mut Turns, seed: u64) -> Result<()> {
    let locals = turns.session.local_ranks();
    let mut dice = Dice::new(seed + locals[0] as u64);
    for round in 0..40 {
        let mut order: Vec<usize> = (0..locals.len()).collect();
        dice.shuffle(&mut order);
        for index in order {
            std::thread::sleep(Duration::from_micros(dice.below(3000) as u64));
            turns.session.launch(index, turn(round))?;
        }
        turns.session.synchronize()?;
        turns.verify(round)?;
    }
    Ok(())
}

fn replayed_graph(suite: &mut Suite<'_>) -> Result<Outcome> {
    let mut turns = Turns::new(suite, suite.ranks())?;
    let result = replay_graphs(suite, &mut turns);
    suite.conclude(turns.session, result)
}

fn replay_graphs(suite: &Suite<'_>, turns: &mut Turns) -> Result<Outcome> {
    let (session, first) = (&mut turns.session, &turns.problems[0]);
    let enqueue = |session: &mut Session, index| session.launch(index, Turn::RETURNED);
    let Some(mut graphs) = Graphs::capture(suite.group(), session, enqueue)? else {
        return Ok(Outcome::Skipped("only CUDA has graphs".into()));
    };
    for replay in 0..100 {
        // New contents in the captured tensors; the number of tokens is captured, too.
        let fresh = ferry_rig::problem(
            first.inputs.iter().map(|input| input.tokens).collect(),
            [first.experts, first.top_k, first.hidden],
            Routing::Uniform,
            suite.args.seed * 10_000 + replay,
        );
        session.upload(0, &fresh)?;
        graphs.launch_all()?;
        session.synchronize()?;
        compare(session, Turn::RETURNED, &returned(&fresh))
            .with_context(|| format!("replay {replay}"))?;
    }
    Ok(Outcome::Passed)
}
