//! Dispatch and combine where every rank has all tokens, beside reading and writing the same bytes at the
//! device memory's rate.

use anyhow::{Context, Result, ensure};
use ferry::{Capacity, Config, Device, TokenFormat};
use ferry_reference::workload::Routing;
use ferry_reference::{Problem, share_of};

use super::options::{BenchArgs, Choice};
use super::record::Limits;
use super::rig::{Repeats, Rig, Stage};
use ferry_rig::formats::Layout;
use ferry_rig::{Session, Settings, Turn};

/// A round's times, in microseconds.
#[derive(Clone, Debug, serde::Serialize)]
pub struct LocalTime {
    /// The format's name.
    pub format: &'static str,
    /// Tokens that every rank has.
    pub tokens: usize,
    /// Ranks that share the experts with each of these.
    pub share_of: u32,
    /// Medians of the slowest GPU, dispatch and combine, after the L2 cache was flushed.
    pub us: [f64; 2],
    /// Bytes that the busiest rank reads and writes, dispatch and combine.
    pub bytes: [u64; 2],
    /// These bytes at the copy's rate, and an empty call.
    pub floor_us: [f64; 2],
}

/// Times every format and every number of tokens.
pub fn measure(rig: &Rig, args: &BenchArgs, limits: &Limits) -> Result<Vec<LocalTime>> {
    let share_of_ranks = args.share_of as usize;
    let experts = args.experts / share_of_ranks;
    ensure!(
        args.top_k <= experts,
        "--share-of {share_of_ranks}: a token cannot name {} of the {experts} experts of a share",
        args.top_k
    );
    ensure!(
        args.experts.is_multiple_of(share_of_ranks * rig.ranks()),
        "--share-of {share_of_ranks}: {} experts cannot be divided among so many, and {} GPUs each",
        args.experts,
        rig.ranks()
    );
    let mut times = Vec::new();
    for &tokens in &args.tokens {
        let sizes = [args.experts, args.top_k, args.hidden];
        let all = ferry_rig::problem(vec![tokens], sizes, Routing::Uniform, args.seed);
        let problem = share_of(&all, share_of_ranks, 0);
        let mut formats: Vec<_> = args.kinds().into_iter().map(|(format, _)| format).collect();
        formats.dedup();
        for format in formats {
            times.push(time(rig, args, limits, &problem, format)?);
        }
    }
    Ok(times)
}

/// Prints them.
pub fn print(times: &[LocalTime]) {
    println!("\nskip_a2a (times the bytes at the device memory's rate and an empty call):");
    println!("{:16} tokens |  dispatch         |   combine", "format");
    for time in times {
        let [dispatch, combine] = time.us;
        let [dispatch_floor, combine_floor] = time.floor_us;
        println!(
            "{:16} {:6} | {dispatch:7.1} ({:5.2})   | {combine:7.1} ({:5.2})",
            time.format,
            time.tokens,
            dispatch / dispatch_floor,
            combine / combine_floor,
        );
    }
}

fn time(
    rig: &Rig,
    args: &BenchArgs,
    limits: &Limits,
    problem: &Problem,
    format: TokenFormat,
) -> Result<LocalTime> {
    let config = Config {
        format,
        skip_a2a: true,
        max_sms: args.max_sms,
        specialise: args.specialise != Choice::No,
        ..Config::new(
            problem.experts,
            args.top_k,
            args.hidden,
            problem.inputs[0].tokens,
        )
    };
    let shares: Vec<Problem> = (0..rig.ranks())
        .map(|rank| share_of(problem, rig.ranks(), rank))
        .collect();
    // All ranks have the same tokens.
    let all = Problem {
        ranks: rig.ranks(),
        inputs: vec![problem.inputs[0].clone(); rig.ranks()],
        ..*problem
    };
    let settings = Settings {
        input_scale: None,
        ..Settings::of(config, std::slice::from_ref(&all))
    };
    let mut session = Session::new(&rig.group, &settings)?;
    session.use_streams(rig.gpus.iter().map(|gpu| gpu.stream));
    session.upload(0, &all)?;
    for (index, gpu) in rig.gpus.iter().enumerate() {
        // Expert rows that are all alike.
        let rows = session.tensors(index, Turn::FIRST).expert_rows.expert_rows;
        gpu.device.fill(rows.at, 0x3c, rows.bytes())?;
    }
    let calls = session.each().map(|(communicator, rank)| {
        move |stage: usize, _iteration: u32| {
            Ok(rank.enqueue(communicator, Turn::FIRST, 2 * stage)?)
        }
    });
    let repeats = Repeats {
        warmup: args.warmup,
        iterations: args.iterations,
        flush: true,
        late: false,
    };
    let stages = [Stage::Aligned, Stage::Aligned];
    let timed = rig.time(repeats, &stages, calls.collect())?;
    session.synchronize()?;
    session.close()?;
    let busiest = shares.iter().map(|share| bytes(share, format));
    let busiest = busiest.reduce(|a, b| [a[0].max(b[0]), a[1].max(b[1])]);
    let bytes = busiest.context("a group has ranks")?;
    let floor = |bytes: u64| bytes as f64 / limits.hbm_gb_per_s / 1e3 + limits.empty_call.cold_us;
    Ok(LocalTime {
        format: format.name(),
        tokens: problem.inputs[0].tokens,
        share_of: args.share_of,
        us: [timed[0].gpu_us.median, timed[1].gpu_us.median],
        bytes,
        floor_us: bytes.map(floor),
    })
}

/// Bytes that a rank reads and writes: each token that has an expert here once, and its rows; these in BF16,
/// and all sums.
fn bytes(share: &Problem, format: TokenFormat) -> [u64; 2] {
    let tokens = share.inputs[0].topk_ids.chunks(share.top_k);
    let slots = tokens.map(|ids| ids.iter().filter(|&&id| id >= 0).count());
    let (mut here, mut rows) = (0, 0);
    for slots in slots {
        here += usize::from(slots > 0);
        rows += slots;
    }
    let layout = Layout {
        blocks: None,
        format,
        hidden: share.hidden,
        capacity: Capacity {
            rows: 128,
            scale_blocks: 1,
            ..Capacity::default()
        },
    };
    let scales = layout.scales_bytes() / 128;
    let row = 2 * share.hidden;
    let dispatch = here * row + rows * (layout.row_bytes() + scales);
    let combine = (rows + share.inputs[0].tokens) * row;
    [dispatch as u64, combine as u64]
}
