//! Bad input and lost peers.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use ferry::{Capacity, CombineMode, Config, Error, FaultKind, Rank, TokenFormat};
use ferry_reference::workload::{Routing, WorkloadSpec, generate};
use ferry_reference::{Problem, bf16};

use super::{Outcome, Suite};
use crate::session::{Session, Settings, Turn};
use crate::verify::{Compared, Oracle, Placement, capacity_for, compare_rows, without_overflow};

pub fn run(suite: &mut Suite<'_>) -> Result<()> {
    suite.check("an expert that does not exist", invalid_expert)?;
    suite.check("outputs that are too small", small_output)?;
    suite.check("a peer that never arrives", lost_peer)?;
    suite.check("the devices work afterwards", works_again)
}

fn problem(suite: &Suite<'_>, seed: u64) -> Problem {
    generate(WorkloadSpec {
        ranks: suite.ranks(),
        experts: 64,
        top_k: 8,
        hidden: 1024,
        tokens: vec![16; suite.ranks()],
        routing: Routing::Uniform,
        seed: suite.args.seed * 77 + seed,
    })
}

fn settings(capacity: Capacity, deadline: Duration) -> Settings {
    let config = Config {
        debug_checks: true,
        deadline,
        ..Config::new(64, 8, 1024, 16)
    };
    Settings {
        config,
        capacity,
        split: false,
    }
}

fn compare(session: &Session, wanted: &[Vec<bf16>]) -> Result<()> {
    for (rank, given) in session.combined(Turn::FIRST)? {
        compare_rows(rank, "combined", &wanted[rank], &given, 1024)?;
    }
    Ok(())
}

/// The rank with the bad id is told which; the entry counts as not routed; the next round works.
fn invalid_expert(suite: &mut Suite<'_>) -> Result<Outcome> {
    let good = problem(suite, 1);
    let (mut bad, mut as_routed) = (good.clone(), good.clone());
    let entry = 5 * 8 + 2;
    bad.inputs[0].topk_ids[entry] = 64;
    as_routed.inputs[0].topk_ids[entry] = -1;
    let settings = settings(capacity_for(&good, TokenFormat::Bf16), suite.deadline());
    let group = suite.group().clone();
    let mut session = suite.session(&group, &settings, 1)?;
    let result = round_of(&mut session, &bad)
        .and_then(|()| told_of_the_expert(&session))
        .and_then(|()| compare(&session, &identity(&as_routed)))
        .and_then(|()| round_of(&mut session, &good))
        .and_then(|()| Ok(session.synchronize()?))
        .and_then(|()| compare(&session, &identity(&good)));
    suite.conclude(session, result)?;
    Ok(Outcome::Passed)
}

/// Enqueues a round on every local rank, into outputs that hold nothing of an earlier one.
fn round_of(session: &mut Session, problem: &Problem) -> Result<()> {
    let order: Vec<usize> = (0..session.local_ranks().len()).collect();
    session.upload(0, problem)?;
    session.poison()?;
    Ok(session.launch_identity(Turn::FIRST, &order, |_| ())?)
}

/// What combine gives where experts return what they get.
fn identity(problem: &Problem) -> Vec<Vec<bf16>> {
    Oracle::new(problem, &[1.0; 64], TokenFormat::Bf16).combined(CombineMode::Reduced, true)
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
    let group = suite.group().clone();
    let capacity = Capacity {
        rows: 7,
        scale_blocks: 0,
    };
    let placements = Placement::of(&problem, TokenFormat::Bf16, Compared::ALL);
    let capacities = vec![capacity; suite.ranks()];
    let held = without_overflow(&problem, TokenFormat::Bf16, &placements, &capacities);
    for combine in [CombineMode::Reduced, CombineMode::Exact] {
        let mut settings = settings(capacity, suite.short_deadline());
        settings.config.combine = combine;
        let mut session = suite.session(&group, &settings, 1)?;
        let oracle = Oracle::new(&held, &[1.0; 64], TokenFormat::Bf16);
        let wanted = oracle.combined(combine, true);
        let result = (0..2).try_for_each(|_| {
            round_of(&mut session, &problem)
                .and_then(|()| told_of_the_size(&session))
                .and_then(|()| compare(&session, &wanted))
        });
        suite.conclude(session, result)?;
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
    let capacity = capacity_for(&problem, TokenFormat::Bf16);
    let group = suite.group().clone();
    let deadline = suite.short_deadline();
    let mut session = suite.session(&group, &settings(capacity, deadline), 1)?;
    let result = leave_out(&mut session, lost, &problem);
    // Not closed: that is collective, and only some of the processes gave up. The windows stay.
    drop(session);
    suite.open.agree(result)?;
    Ok(Outcome::Passed)
}

fn leave_out(session: &mut Session, lost: usize, problem: &Problem) -> Result<()> {
    let locals = session.local_ranks();
    let order: Vec<usize> = (0..locals.len())
        .filter(|&index| locals[index] != lost)
        .collect();
    session.upload(0, problem)?;
    let deadline = session.plan().config().deadline;
    let start = Instant::now();
    session.launch_identity(Turn::FIRST, &order, |_| ())?;
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
    let settings = settings(capacity_for(&problem, TokenFormat::Bf16), suite.deadline());
    let group = suite.group().clone();
    let mut session = suite.session(&group, &settings, 1)?;
    let oracle = Oracle::new(&problem, &[1.5; 64], TokenFormat::Bf16);
    let outputs = session.round(&problem, &[1.5; 64], true);
    let result = outputs
        .map_err(anyhow::Error::from)
        .and_then(|outputs| Ok(oracle.verify(settings.config.combine, true, &outputs)?));
    suite.conclude(session, result)?;
    Ok(Outcome::Passed)
}
