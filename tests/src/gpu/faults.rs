//! Bad input and lost peers.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use ferry::{Capacity, CombineMode, Config, Error, FaultKind, Rank, TokenFormat};
use ferry_reference::Problem;

use super::rounds::{compare, returned};
use super::{Outcome, Suite};
use ferry_rig::verify::{Compared, Oracle, Placement, without_overflow};
use ferry_rig::{Session, Settings, Turn};

pub fn run(suite: &mut Suite<'_>) -> Result<()> {
    suite.check("an expert that does not exist", invalid_expert)?;
    suite.check("outputs that are too small", small_output)?;
    suite.check("a peer that never arrives", lost_peer)?;
    suite.check("the devices work afterwards", works_again)
}

fn problem(suite: &Suite<'_>, seed: u64) -> Problem {
    suite.uniform(16, [64, 8, 1024], suite.args.seed * 77 + seed)
}

fn settings(problem: &Problem, deadline: Duration) -> Settings {
    let config = Config {
        debug_checks: true,
        deadline,
        ..Config::new(64, 8, 1024, 16)
    };
    Settings::of(config, std::slice::from_ref(problem))
}

/// The rank with the bad id is told which; the entry counts as not routed; the next round works.
fn invalid_expert(suite: &mut Suite<'_>) -> Result<Outcome> {
    let good = problem(suite, 1);
    let (mut bad, mut as_routed) = (good.clone(), good.clone());
    let entry = 5 * 8 + 2;
    bad.inputs[0].topk_ids[entry] = 64;
    as_routed.inputs[0].topk_ids[entry] = -1;
    suite.with_session(&settings(&good, suite.deadline()), 1, |_, session| {
        round_of(session, &bad)?;
        told_of_the_expert(session)?;
        compare(session, Turn::RETURNED, &returned(&as_routed))?;
        round_of(session, &good)?;
        session.synchronize()?;
        compare(session, Turn::RETURNED, &returned(&good))
    })?;
    Ok(Outcome::Passed)
}

/// Enqueues a round on every local rank, into outputs that hold nothing of an earlier one.
fn round_of(session: &mut Session, problem: &Problem) -> Result<()> {
    session.upload(0, problem)?;
    session.poison()?;
    Ok(session.launch_all(Turn::RETURNED)?)
}

fn told_of_the_expert(session: &Session) -> Result<()> {
    for (rank, outcome) in session.outcomes() {
        match outcome {
            Ok(Some(fault)) if rank == 0 => {
                ensure!(fault.kind == FaultKind::InvalidExpert, "{fault}");
                ensure!(
                    (fault.rank, fault.index, fault.saw) == (Rank(0), 5, 64),
                    "{fault}"
                );
                ensure!(
                    fault
                        .to_string()
                        .contains("rank 0, token 5, slot 2: expert id 64"),
                    "{fault}"
                );
            }
            Ok(None) if rank != 0 => {}
            other => bail!("rank {rank}: {other:?}"),
        }
    }
    Ok(())
}

/// Every rank whose outputs are too small says so, and gives what its first rows come to; nobody hangs.
fn small_output(suite: &mut Suite<'_>) -> Result<Outcome> {
    let problem = problem(suite, 2);
    let capacity = Capacity {
        rows: 7,
        ..Capacity::default()
    };
    let placements = Placement::of(&problem, TokenFormat::Bf16, Compared::ALL);
    let capacities = vec![capacity; suite.ranks()];
    let held = without_overflow(&problem, TokenFormat::Bf16, &placements, &capacities);
    for combine in [CombineMode::Reduced, CombineMode::Exact] {
        let mut settings = settings(&problem, suite.short_deadline());
        settings.capacity = capacity;
        settings.config.combine = combine;
        let oracle = Oracle::new(&held, &[1.0; 64], TokenFormat::Bf16);
        let wanted = oracle.combined(combine, true);
        suite.with_session(&settings, 1, |_, session| {
            (0..2).try_for_each(|_| {
                round_of(session, &problem)?;
                told_of_the_size(session)?;
                compare(session, Turn::RETURNED, &wanted)
            })
        })?;
    }
    Ok(Outcome::Passed)
}

fn told_of_the_size(session: &Session) -> Result<()> {
    for (rank, outcome) in session.outcomes() {
        match outcome {
            Ok(Some(fault)) => ensure!(
                fault.kind == FaultKind::OutputTooSmall && fault.wanted == 7,
                "rank {rank}: {fault}"
            ),
            other => bail!("rank {rank}: {other:?}"),
        }
    }
    Ok(())
}

/// The last rank does not launch: all others name it, within their deadline, and it learns that they did.
fn lost_peer(suite: &mut Suite<'_>) -> Result<Outcome> {
    let lost = suite.ranks() - 1;
    if lost == 0 {
        return Ok(Outcome::Skipped("needs two ranks".into()));
    }
    let problem = problem(suite, 3);
    let group = suite.group().clone();
    let settings = settings(&problem, suite.short_deadline());
    let mut session = suite.session(&group, &settings, 1)?;
    let result = leave_out(&mut session, lost, &problem);
    // Not closed: that is collective, and only some of the processes gave up. The windows stay.
    drop(session);
    suite.open.agree(result)?;
    Ok(Outcome::Passed)
}

fn leave_out(session: &mut Session, lost: usize, problem: &Problem) -> Result<()> {
    let locals = session.local_ranks();
    session.upload(0, problem)?;
    let deadline = session.plan().config().deadline;
    let start = Instant::now();
    let mut others = (0..locals.len()).filter(|&index| locals[index] != lost);
    others.try_for_each(|index| session.launch(index, Turn::RETURNED))?;
    for (rank, outcome) in session.outcomes() {
        match outcome {
            Ok(None) if rank == lost => {}
            Err(Error::PeerGaveUp { .. }) if rank == lost => {}
            Err(Error::Fault(fault)) if rank != lost => {
                ensure!(fault.kind == FaultKind::PeerTimeout, "rank {rank}: {fault}");
                ensure!(fault.culprit == Rank(lost as u32), "rank {rank}: {fault}");
            }
            other => bail!("rank {rank}: {other:?}"),
        }
    }
    let waited = start.elapsed();
    ensure!(waited < 4 * deadline, "the faults came after {waited:?}");
    if locals.contains(&lost) {
        // Of ranks in other processes nothing else says that they have given up.
        thread::sleep(2 * deadline);
        let told = session
            .outcomes()
            .into_iter()
            .find(|(rank, _)| *rank == lost);
        ensure!(
            matches!(told, Some((_, Err(Error::PeerGaveUp { .. })))),
            "rank {lost} came late: {told:?}"
        );
    }
    Ok(())
}

/// A new communicator on the same group, in the same contexts.
fn works_again(suite: &mut Suite<'_>) -> Result<Outcome> {
    let problem = problem(suite, 4);
    let settings = settings(&problem, suite.deadline());
    suite.with_session(&settings, 1, |_, session| {
        let outputs = session.round(&problem, &[1.5; 64])?;
        let oracle = Oracle::new(&problem, &[1.5; 64], TokenFormat::Bf16);
        Ok(oracle.verify(settings.config.combine, true, &outputs)?)
    })?;
    Ok(Outcome::Passed)
}
