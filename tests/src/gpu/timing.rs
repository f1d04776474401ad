//! First figures: GPU time of dispatch and combine, in rounds that follow each other.

use std::sync::Arc;

use anyhow::Result;
use ferry::cuda::{CudaDevice, CudaEvent};
use ferry::{Config, TokenFormat};
use ferry_reference::Problem;
use ferry_reference::workload::{Routing, WorkloadSpec, generate};

use super::{Outcome, Suite};
use crate::session::{Session, Settings};
use crate::verify::capacity_for;

const WARM_UP: usize = 10;
const ROUNDS: usize = 50;

pub fn run(suite: &mut Suite<'_>) -> Result<()> {
    for tokens in [1, 128, 1024, 4096] {
        suite.check(&format!("time of {tokens} tokens, BF16"), |suite| {
            time(suite, tokens)
        })?;
    }
    Ok(())
}

/// Every rank enqueues all rounds; a round's halves are timed between events of its stream. The
/// ranks keep step because each round waits for all.
fn time(suite: &mut Suite<'_>, tokens: usize) -> Result<Outcome> {
    let problem = generate(WorkloadSpec {
        ranks: suite.ranks(),
        experts: 256,
        top_k: 8,
        hidden: 7168,
        tokens: vec![tokens; suite.ranks()],
        routing: Routing::Uniform,
        seed: suite.args.seed,
    });
    let config = Config {
        deadline: suite.deadline(),
        ..Config::new(256, 8, 7168, tokens)
    };
    let capacity = capacity_for(&problem, TokenFormat::Bf16);
    let settings = Settings {
        config,
        capacity,
        split: false,
    };
    let locals = suite.group().local_ranks();
    let devices: Option<Vec<_>> = locals
        .iter()
        .map(|&rank| suite.group().cuda(rank))
        .collect();
    let Some(devices) = devices else {
        return Ok(Outcome::Skipped("not on GPUs".into()));
    };
    let group = suite.group().clone();
    let mut session = suite.session(&group, &settings, 1)?;
    let result = measure(&mut session, &devices, &problem);
    let figures = result.as_ref().cloned().unwrap_or_default();
    suite.conclude(session, result.map(drop))?;
    Ok(Outcome::Measured(figures))
}

fn measure(
    session: &mut Session,
    devices: &[Arc<CudaDevice>],
    problem: &Problem,
) -> Result<String> {
    session.upload(0, problem)?;
    let mut events: Vec<Vec<[CudaEvent; 3]>> = Vec::new();
    for device in devices {
        let three = || Ok::<_, ferry::Error>([device.event()?, device.event()?, device.event()?]);
        events.push((0..ROUNDS).map(|_| three()).collect::<Result<_, _>>()?);
    }
    for round in 0..WARM_UP + ROUNDS {
        for (index, events) in events.iter().enumerate() {
            let events = round.checked_sub(WARM_UP).map(|round| &events[round]);
            session.launch_timed(index, events)?;
        }
    }
    session.synchronize()?;
    let mut times = [Vec::new(), Vec::new()];
    for round in 0..ROUNDS {
        for (half, times) in times.iter_mut().enumerate() {
            let of = |events: &Vec<[CudaEvent; 3]>| {
                events[round][half + 1].elapsed_ms_since(&events[round][half])
            };
            let all: Vec<f32> = events.iter().map(of).collect::<Result<_, _>>()?;
            times.push(1000.0 * all.into_iter().fold(0.0, f32::max));
        }
    }
    let median = |times: &mut Vec<f32>| {
        times.sort_by(f32::total_cmp);
        times[times.len() / 2]
    };
    let [dispatch, combine] = &mut times;
    Ok(format!(
        "dispatch {:.1} us, combine {:.1} us (median of {ROUNDS}, slowest local rank)",
        median(dispatch),
        median(combine)
    ))
}
