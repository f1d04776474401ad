//! One of the processes: rounds until one fails, then what a survivor does.

use std::io::BufRead;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use ferry::{Bootstrap, BootstrapError, Config, Error, FaultKind, Group, TcpBootstrap};
use ferry_reference::workload::{Routing, WorkloadSpec, generate};

use super::report::{Call, Report};
use super::{KilledArgs, READY, REPORT, now_ns};
use crate::group::{GroupKind, GroupOptions, OpenGroup, bootstrap, open};
use crate::session::{Session, Settings, Turn};
use crate::verify::capacity_for;

/// Longest wait for the other survivors.
const MEET: Duration = Duration::from_secs(20);

/// Runs until a peer is lost, reports, and ends. The process that is killed never gets there.
pub(super) fn run(args: &KilledArgs, address: SocketAddr, rank: u32) -> Result<()> {
    let ranks = args.ranks.context("--rendezvous needs --ranks")?;
    let mut open = join(args, address, rank, ranks)?;
    let group = open.group.clone();
    let settings = settings(args, &group);
    let session = set_up(&group, &settings, args.seed);
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
    report.meet = call(|| meet(rank, ranks as u32));
    println!("{REPORT}{}", serde_json::to_string(&report)?);
    Ok(())
}

/// The group and a way to talk. Simulated ranks have only the way: each is alone in a group of its own.
fn join(args: &KilledArgs, address: SocketAddr, rank: u32, ranks: usize) -> Result<OpenGroup> {
    let options = GroupOptions {
        kind: args.group,
        ranks,
        seed: args.seed,
        rendezvous: Some(address),
        rank: Some(rank),
    };
    if args.group != GroupKind::Simulated {
        return open(&options);
    }
    let mut others = bootstrap(&options)?;
    Ok(OpenGroup {
        group: Group::simulated(1, args.seed)?,
        gather: Box::new(move |bytes| Ok(others.all_gather(bytes)?)),
    })
}

fn settings(args: &KilledArgs, group: &Group) -> Settings {
    let config = Config {
        deadline: Duration::from_millis(args.deadline_ms),
        ..Config::new(8 * group.ranks() as usize, 8, 1024, 16)
    };
    Settings {
        config,
        capacity: ferry::Capacity::default(),
        split: false,
    }
}

fn set_up(group: &Group, settings: &Settings, seed: u64) -> Result<Session> {
    let config = &settings.config;
    let ranks = group.ranks() as usize;
    let problem = generate(WorkloadSpec {
        ranks,
        experts: config.experts,
        top_k: config.top_k,
        hidden: config.hidden,
        tokens: vec![config.max_tokens_per_rank; ranks],
        routing: Routing::Uniform,
        seed,
    });
    let settings = Settings {
        capacity: capacity_for(&problem, config.format),
        ..*settings
    };
    let mut session = Session::new(group, &settings)?;
    session.upload(0, &problem)?;
    Ok(session)
}

/// A round; between simulated processes, also a word with the others.
fn round(session: &mut Session, open: &mut OpenGroup, is_simulated: bool) -> Result<()> {
    session.launch_identity(Turn::FIRST, &[0], |_| ())?;
    session.synchronize()?;
    if is_simulated {
        (open.gather)(&[])?;
    }
    Ok(())
}

/// What the first error is.
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
fn meet(rank: u32, ranks: u32) -> Result<()> {
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line)?;
    let Some((victim, address)) = line.trim().split_once(' ') else {
        bail!("wanted a rank and an address, got {line:?}");
    };
    let (victim, address): (u32, SocketAddr) = (victim.parse()?, address.parse()?);
    let survivors: Vec<u32> = (0..ranks).filter(|&other| other != victim).collect();
    let place = survivors.iter().position(|&other| other == rank);
    let place = place.with_context(|| format!("rank {rank} was killed"))? as u32;
    let mut others = TcpBootstrap::connect(place, survivors.len() as u32, address, MEET)?;
    let all = others.all_gather(&rank.to_le_bytes())?;
    let wanted: Vec<Vec<u8>> = survivors.iter().map(|r| r.to_le_bytes().to_vec()).collect();
    ensure!(all == wanted, "survivors {survivors:?} told {all:?}");
    Ok(())
}
