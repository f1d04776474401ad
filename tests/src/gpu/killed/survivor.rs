//! One of the processes: rounds until one fails, then what a survivor does: the steps of
//! the guide (`host/docs/recovery.md`).

use std::io::BufRead;
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use ferry::bootstrap::{Bootstrap, TcpBootstrap};
use ferry::error::BootstrapError;
use ferry::{CombineMode, Config, Error, FaultKind, Group, TokenFormat};
use ferry_reference::Problem;
use ferry_reference::workload::Routing;

use super::report::{Call, Report};
use super::{KilledArgs, READY, REPORT, now_ns};
use crate::group::{
    GroupArgs, GroupKind, GroupOptions, OpenGroup, bootstrap, meet, open, over, place_of,
};
use crate::kernel_files::KernelFiles;
use ferry_rig::verify::Oracle;
use ferry_rig::{Session, Settings, Turn};

/// Longest wait for the other survivors.
const MEET: Duration = Duration::from_secs(20);

/// Runs until a peer is lost, reports, and ends. The process that is killed never gets there.
pub(super) fn run(args: &KilledArgs, address: SocketAddr, rank: u32) -> Result<()> {
    let ranks = args.ranks.context("--rendezvous needs --ranks")?;
    let options = GroupOptions {
        kind: args.group,
        ranks,
        seed: args.seed,
        args: GroupArgs {
            share_gpus: args.share_gpus,
            rendezvous: Some(address),
            rank: Some(rank),
            rendezvous_key: args.rendezvous_key.clone(),
            ..GroupArgs::default()
        },
        files: KernelFiles::default(),
    };
    let mut open = join(&options)?;
    let group = open.group.clone();
    let (settings, problem) = prepare(args, &group);
    let session = set_up(&group, &settings, &problem);
    let mut session = open.agree(session)?;
    let is_simulated = args.group == GroupKind::Simulated;
    round(&mut session, &mut open, is_simulated)?;
    println!("{READY}");
    let (error, launched_ns, told_ns) = loop {
        let launched_ns = now_ns();
        if let Err(error) = round(&mut session, &mut open, is_simulated) {
            break (error, launched_ns, now_ns());
        }
    };
    let mut report = Report {
        rank,
        launched_ns,
        told_ns,
        ..told(&error)
    };
    report.close = call(|| Ok(session.close()?));
    if args.tries_again {
        report.communicator = Some(call(|| {
            Session::new(&group, &settings)?;
            Ok(())
        }));
    }
    report.leave_group = call(|| Ok(group.close()?));
    report.exchange = call(|| (open.gather)(&[]).map(drop));
    let mut others = None;
    report.meet = call(|| {
        let key = args.rendezvous_key.as_deref();
        others = Some(meet_again(rank, ranks as u32, key)?);
        Ok(())
    });
    if let Some(others) = others.filter(|_| args.group != GroupKind::Nvshmem) {
        report.again = Some(call(|| again(args, others, &options)));
    }
    report.recovery_ms = now_ns().saturating_sub(told_ns) / 1_000_000;
    println!("{REPORT}{}", serde_json::to_string(&report)?);
    Ok(())
}

/// The group and a way to talk. Simulated ranks have only the way: each is alone in a group of its own.
fn join(options: &GroupOptions) -> Result<OpenGroup> {
    if options.kind != GroupKind::Simulated {
        return open(options);
    }
    alone(options.seed, bootstrap(options)?)
}

/// A simulated rank in a group of its own, with a way to talk to the other processes.
fn alone(seed: u64, mut others: Box<dyn Bootstrap>) -> Result<OpenGroup> {
    let group = Group::simulated(1, seed)?;
    let gather = Box::new(move |bytes: &[u8]| Ok(others.all_gather(bytes)?));
    Ok(OpenGroup::new(group, gather))
}

/// A new group of the survivors, in processes that have lost one; a round in it, which is compared;
/// and its end. Each has the GPU that it had as a rank of the group of these options.
fn again(args: &KilledArgs, others: TcpBootstrap, lost: &GroupOptions) -> Result<()> {
    let others = Box::new(others);
    let mut open = match lost.kind {
        GroupKind::Simulated => alone(args.seed, others)?,
        _ => {
            let place = place_of(lost.args.rank.unwrap_or(0));
            over(lost, others, place)?
        }
    };
    let group = open.group.clone();
    let (settings, problem) = prepare(args, &group);
    let session = set_up(&group, &settings, &problem);
    let mut session = open.agree(session)?;
    let scale = vec![1.5; problem.experts];
    let outputs = session.round(&problem, &scale);
    let oracle = Oracle::new(&problem, &scale, TokenFormat::Bf16);
    let verified = outputs
        .map_err(anyhow::Error::from)
        .and_then(|outputs| Ok(oracle.verify(CombineMode::Reduced, true, &outputs)?));
    open.agree(verified)?;
    session.close()?;
    Ok(group.close()?)
}

fn prepare(args: &KilledArgs, group: &Group) -> (Settings, Problem) {
    let ranks = group.ranks() as usize;
    let config = Config {
        deadline: Duration::from_millis(args.deadline_ms),
        p2p_world_size: args.node,
        ..Config::new(8 * ranks, 8, 1024, 16)
    };
    let sizes = [config.experts, config.top_k, config.hidden];
    let problem = ferry_rig::problem(vec![16; ranks], sizes, Routing::Uniform, args.seed);
    (
        Settings::of(config, std::slice::from_ref(&problem)),
        problem,
    )
}

fn set_up(group: &Group, settings: &Settings, problem: &Problem) -> Result<Session> {
    let mut session = Session::new(group, settings)?;
    session.upload(0, problem)?;
    Ok(session)
}

/// A round; between simulated processes, also a word with the others.
fn round(session: &mut Session, open: &mut OpenGroup, is_simulated: bool) -> Result<()> {
    session.launch(0, Turn::RETURNED)?;
    session.synchronize()?;
    if is_simulated {
        (open.gather)(&[])?;
    }
    Ok(())
}

/// Tells what the first error is.
fn told(error: &anyhow::Error) -> Report {
    let (is_typed, named) = match (error.downcast_ref(), error.downcast_ref()) {
        (Some(Error::Fault(fault)), _) => {
            let is_timeout = fault.kind == FaultKind::PeerTimeout;
            (is_timeout, is_timeout.then_some(fault.culprit.0))
        }
        (_, Some(error)) => (true, BootstrapError::lost_rank(error)),
        _ => (false, None),
    };
    Report {
        is_typed,
        named,
        error: format!("{error:#}"),
        ..Report::default()
    }
}

fn call(call: impl FnOnce() -> Result<()>) -> Call {
    let start = Instant::now();
    let error = call().err();
    Call {
        ms: start.elapsed().as_millis() as u64,
        error: error.map(|error| format!("{error:#}")).unwrap_or_default(),
    }
}

/// Meets the other survivors where the one who killed says.
fn meet_again(rank: u32, ranks: u32, key: Option<&Path>) -> Result<TcpBootstrap> {
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line)?;
    let Some((victim, address)) = line.trim().split_once(' ') else {
        bail!("wanted a rank and an address, got {line:?}");
    };
    let (victim, address): (u32, SocketAddr) = (victim.parse()?, address.parse()?);
    let survivors: Vec<u32> = (0..ranks).filter(|&other| other != victim).collect();
    let place = survivors.iter().position(|&other| other == rank);
    let place = place.with_context(|| format!("rank {rank} was killed"))? as u32;
    let mut others = meet(place, survivors.len() as u32, address, MEET, key)?;
    let all = others.all_gather(&rank.to_le_bytes())?;
    let wanted: Vec<Vec<u8>> = survivors.iter().map(|r| r.to_le_bytes().to_vec()).collect();
    ensure!(all == wanted, "survivors {survivors:?} told {all:?}");
    Ok(others)
}
