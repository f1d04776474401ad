//! First figures: GPU time of dispatch and combine, in rounds that follow each other; host time of what each
//! launch asks the driver.

use std::ffi::{c_uint, c_void};
use std::ptr::null_mut;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Result, ensure};
use ferry::Device;
use ferry::cuda::{CudaDevice, CudaEvent};
use ferry_reference::Problem;

use super::{Outcome, Suite};
use ferry_rig::{HALVES, Session, Settings, Turn};

const WARM_UP: usize = 10;
const ROUNDS: usize = 50;
/// Calls of the driver.
const CALLS: u32 = 100_000;
const RUNS: usize = 10;

pub fn run(suite: &mut Suite<'_>) -> Result<()> {
    for tokens in [1, 128, 1024, 4096] {
        suite.check(&format!("time of {tokens} tokens, BF16"), |suite| {
            time(suite, tokens)
        })?;
    }
    suite.check("time of asking whether a stream is captured", questions)
}

/// Host time of asking for the capture that a stream is in, as each launch does, and of the driver's shorter
/// question: nanoseconds, the best of some runs.
fn questions(suite: &mut Suite<'_>) -> Result<Outcome> {
    type CaptureInfo = unsafe extern "C" fn(
        u64,
        *mut c_uint,
        *mut u64,
        *mut *mut c_void,
        *mut *const c_void,
        *mut usize,
    ) -> c_uint;
    type IsCapturing = unsafe extern "C" fn(u64, *mut c_uint) -> c_uint;
    let group = suite.group();
    let rank = group.local_ranks()[0];
    let Some(device) = group.cuda(rank) else {
        return Ok(Outcome::Skipped("not on GPUs".into()));
    };
    let stream = device.stream()?.handle();
    let _current = device.enter()?;
    // SAFETY: the driver, which is loaded already, has these functions of these types.
    let (driver, info, is_capturing) = unsafe {
        let driver = libloading::Library::new("libcuda.so.1")?;
        let info = *driver.get::<CaptureInfo>("cuStreamGetCaptureInfo_v2")?;
        let is_capturing = *driver.get::<IsCapturing>("cuStreamIsCapturing")?;
        (driver, info, is_capturing)
    };
    let (mut status, mut number) = (0, 0);
    let (graph, nodes, count) = (null_mut(), null_mut(), null_mut());
    let info = best_ns(|| {
        // SAFETY: the stream lives, and both numbers; the driver takes null for what is not wanted.
        unsafe { info(stream, &mut status, &mut number, graph, nodes, count) }
    })?;
    // SAFETY: the stream lives, and the number.
    let is_capturing = best_ns(|| unsafe { is_capturing(stream, &mut status) })?;
    drop(driver);
    Ok(Outcome::Measured(format!(
        "cuStreamGetCaptureInfo {info:.0} ns, cuStreamIsCapturing {is_capturing:.0} ns"
    )))
}

/// Nanoseconds that a call of the driver takes.
fn best_ns(mut call: impl FnMut() -> c_uint) -> Result<f64> {
    let mut best = f64::INFINITY;
    for _ in 0..RUNS {
        let start = Instant::now();
        for _ in 0..CALLS {
            let code = call();
            ensure!(code == 0, "the driver refuses: {code}");
        }
        best = best.min(start.elapsed().as_nanos() as f64 / f64::from(CALLS));
    }
    Ok(best)
}

/// Every rank enqueues all rounds; a round's halves are timed between events of its stream. The
/// ranks keep step because each round waits for all.
fn time(suite: &mut Suite<'_>, tokens: usize) -> Result<Outcome> {
    let locals = suite.group().local_ranks();
    let devices: Option<Vec<_>> = locals
        .iter()
        .map(|&rank| suite.group().cuda(rank))
        .collect();
    let Some(devices) = devices else {
        return Ok(Outcome::Skipped("not on GPUs".into()));
    };
    let problem = suite.uniform(tokens, [256, 8, 7168], suite.args.seed);
    let problems = std::slice::from_ref(&problem);
    let settings = Settings::of(suite.config(problems), problems);
    let figures = suite.with_session(&settings, 1, |_, session| {
        measure(session, &devices, &problem)
    })?;
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
            let stream = session.local(index).1;
            let record = |which: usize| match events {
                Some(events) => events[which].record(stream),
                None => Ok(()),
            };
            for half in 0..HALVES {
                if half % 2 == 0 {
                    record(half / 2)?;
                }
                session.launch_in(index, stream, Turn::RETURNED, half)?;
            }
            record(2)?;
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
    let [dispatch, combine] = &times;
    let pairs = dispatch.iter().zip(combine);
    let longest = pairs.fold(0.0, |most, (dispatch, combine)| {
        f32::max(most, dispatch + combine)
    });
    let median = |times: &mut Vec<f32>| {
        times.sort_by(f32::total_cmp);
        times[times.len() / 2]
    };
    let [dispatch, combine] = &mut times;
    Ok(format!(
        "dispatch {:.1} us, combine {:.1} us (median of {ROUNDS}, slowest local rank), longest pair \
         {longest:.1} us",
        median(dispatch),
        median(combine)
    ))
}
