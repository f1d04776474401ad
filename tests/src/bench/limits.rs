//! Limits of the machine, measured in the same run.

use anyhow::Result;
use ferry::Rank;
use ferry::cuda::Grid;
use ferry::layout::Kernel;
use ferry_probes::ProbeArgs;

use super::options::BenchArgs;
use super::record::{CopyLimit, EmptyCall, Limits};
use super::rig::{Gpu, Repeats, Rig, Stage};
use super::traffic::touch_probability;
use crate::probes::Probe;
use crate::sharing;

/// Threads of a block of the copy with stores; two blocks fit on a multiprocessor.
const COPY_THREADS: u32 = 512;
/// Most parts of a row.
const MAX_PARTS: u32 = 8;
/// Bytes of the copy in device memory: several times the L2 cache.
const HBM_BYTES: u64 = 256 << 20;
/// Round trips in a launch.
const PINGS: u32 = 1000;
/// Empty kernels in a row.
const LAUNCHES: u32 = 100;
/// Tokens per rank that the largest copy has at least; the fastest copy is the wire's limit.
const WIRE_TOKENS: usize = 4096;
const REPEATS: Repeats = Repeats {
    warmup: 3,
    iterations: 20,
    flush: false,
    late: false,
};

/// Sizes that copies are measured for.
pub struct CopySizes<'a> {
    /// Tokens per rank.
    pub tokens: &'a [usize],
    /// Bytes of rows.
    pub row_bytes: &'a [u32],
    /// Experts of all ranks.
    pub experts: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// Most multiprocessors that a kernel occupies.
    pub max_sms: Option<u32>,
}

impl CopySizes<'_> {
    /// Rows that uniform routing sends from one rank to another.
    fn rows(&self, ranks: usize, tokens: usize) -> u32 {
        (tokens as f64 * touch_probability(ranks, self.experts, self.top_k))
            .round()
            .max(1.0) as u32
    }

    /// Bytes of probe memory that all copies need.
    pub fn memory(&self, ranks: usize) -> u64 {
        let tokens = self
            .tokens
            .iter()
            .chain([&WIRE_TOKENS])
            .max()
            .copied()
            .unwrap_or(0);
        let row_bytes = self.row_bytes.iter().max().copied().unwrap_or(0);
        let rows = u64::from(self.rows(ranks, tokens));
        (ranks as u64 * rows * u64::from(row_bytes)).max(HBM_BYTES)
    }
}

/// Measures all limits; those of several ranks only if there are several.
pub fn measure(rig: &Rig, sizes: &CopySizes, args: &BenchArgs) -> Result<Limits> {
    let mut limits = Limits {
        launch_us: launches(rig)?,
        empty_call: EmptyCall {
            cold_us: empty_call(rig, args, true)?,
            warm_us: empty_call(rig, args, false)?,
        },
        hbm_gb_per_s: device_memory(rig, args.max_sms)?,
        ..Limits::default()
    };
    if rig.ranks() < 2 {
        return Ok(limits);
    }
    limits.round_trip_us = round_trip(rig)?;
    let most = sizes.tokens.iter().max().copied().unwrap_or(0);
    let large = (most < WIRE_TOKENS).then_some(WIRE_TOKENS);
    for tokens in sizes.tokens.iter().copied().chain(large) {
        for &row_bytes in sizes.row_bytes {
            let copy = all_to_all(rig, sizes, tokens, row_bytes)?;
            limits.copies.push(copy);
        }
    }
    let speeds = limits
        .copies
        .iter()
        .map(|copy| copy.bytes as f64 / copy.best_us() / 1e3);
    limits.wire_gb_per_s = speeds.fold(0.0, f64::max);
    Ok(limits)
}

/// Kernels between two events.
#[derive(Clone, Copy)]
struct Kernels {
    probe: Probe,
    /// Launches in a row.
    times: u32,
    blocks: u32,
    threads: u32,
}

/// Returns the median GPU time of the slowest rank. `args` returns a rank's arguments, `None` if it is idle.
fn time(
    rig: &Rig,
    repeats: Repeats,
    kernels: Kernels,
    args: impl Fn(&Gpu) -> Option<ProbeArgs>,
) -> Result<f64> {
    let grid = Grid::new(kernels.blocks, kernels.threads);
    let each = rig.gpus.iter().map(|gpu| {
        let args = args(gpu);
        move |_stage: usize, _iteration: u32| {
            if let Some(args) = &args {
                for _ in 0..kernels.times {
                    // SAFETY: the addresses are the rig's, with room for the `CopySizes::memory` bytes that
                    // copies need; dropping a `Gpu` waits for its stream before its probes are unloaded.
                    unsafe { gpu.probes.launch(gpu.stream, kernels.probe, grid, args) }?;
                }
            }
            Ok(())
        }
    });
    Ok(rig.time(repeats, &[Stage::Aligned], each.collect())?[0]
        .gpu_us
        .median)
}

/// Multiprocessors that a rank's calls occupy on the first rank's GPU: no other GPU has more ranks.
fn multiprocessors(rig: &Rig, max_sms: Option<u32>) -> u32 {
    let gpu = &rig.gpus[0];
    let rank = Rank(gpu.rank as u32);
    sharing::multiprocessors(&rig.group, rank, gpu.device.multiprocessors(), max_sms)
}

/// Times one empty kernel in place of a call, with a call's blocks and threads.
fn empty_call(rig: &Rig, args: &BenchArgs, flush: bool) -> Result<f64> {
    let kernels = Kernels {
        probe: Probe::Empty,
        times: 1,
        blocks: multiprocessors(rig, args.max_sms),
        threads: Kernel::Dispatch.threads_per_block(),
    };
    let repeats = Repeats {
        warmup: args.warmup,
        iterations: args.iterations,
        flush,
        late: false,
    };
    time(rig, repeats, kernels, |gpu| Some(rig.probe_args(gpu)))
}

fn launches(rig: &Rig) -> Result<f64> {
    let kernels = Kernels {
        probe: Probe::Empty,
        times: LAUNCHES,
        blocks: multiprocessors(rig, None),
        threads: COPY_THREADS,
    };
    let us = time(rig, REPEATS, kernels, |gpu| Some(rig.probe_args(gpu)))?;
    Ok(us / f64::from(LAUNCHES))
}

fn round_trip(rig: &Rig) -> Result<f64> {
    let args = |gpu: &Gpu| ProbeArgs {
        repeats: PINGS,
        ..rig.probe_args(gpu)
    };
    let kernels = Kernels {
        probe: Probe::Ping,
        times: 1,
        blocks: 1,
        threads: 32,
    };
    let us = time(rig, REPEATS, kernels, |gpu| {
        (gpu.rank < 2).then(|| args(gpu))
    })?;
    Ok(us / f64::from(PINGS))
}

fn device_memory(rig: &Rig, max_sms: Option<u32>) -> Result<f64> {
    const ROW_BYTES: u32 = 16 << 10;
    let kernels = Kernels {
        probe: Probe::Copy,
        times: 1,
        blocks: 2 * multiprocessors(rig, max_sms),
        threads: COPY_THREADS,
    };
    let args = |gpu: &Gpu| ProbeArgs {
        // Each GPU is a group of its own.
        peers: rig.peers_from(gpu),
        rank: 0,
        ranks: 1,
        first_peer: 0,
        peer_count: 1,
        row_bytes: ROW_BYTES,
        rows: (HBM_BYTES / u64::from(ROW_BYTES)) as u32,
        ..rig.probe_args(gpu)
    };
    let us = time(rig, REPEATS, kernels, |gpu| Some(args(gpu)))?;
    Ok(2.0 * HBM_BYTES as f64 / us / 1e3)
}

fn all_to_all(rig: &Rig, sizes: &CopySizes, tokens: usize, row_bytes: u32) -> Result<CopyLimit> {
    let sms = multiprocessors(rig, sizes.max_sms);
    let peers = rig.ranks() as u32 - 1;
    let rows = sizes.rows(rig.ranks(), tokens);
    let spread =
        |workers: u32| (workers / (rows * peers)).clamp(1, MAX_PARTS.min(row_bytes / 512).max(1));
    let args = |gpu: &Gpu, parts| ProbeArgs {
        row_bytes,
        rows,
        parts,
        ..rig.probe_args(gpu)
    };

    let blocks = 2 * sms;
    let parts = spread(blocks * COPY_THREADS / 32);
    let kernels = Kernels {
        probe: Probe::Copy,
        times: 1,
        blocks,
        threads: COPY_THREADS,
    };
    let stores_us = time(rig, REPEATS, kernels, |gpu| Some(args(gpu, parts)))?;
    let mut bulk_us = 0.0;
    if rig.gpus.iter().all(|gpu| gpu.probes.has(Probe::BulkCopy)) {
        // Four blocks fill a multiprocessor's shared memory.
        let blocks = 4 * sms;
        let parts = spread(blocks).max(row_bytes.div_ceil(ProbeArgs::BULK_BYTES - 16));
        let kernels = Kernels {
            probe: Probe::BulkCopy,
            times: 1,
            blocks,
            threads: 32,
        };
        bulk_us = time(rig, REPEATS, kernels, |gpu| Some(args(gpu, parts)))?;
    }
    let bytes = u64::from(rows * peers) * u64::from(row_bytes);
    Ok(CopyLimit {
        tokens,
        row_bytes,
        bytes,
        stores_us,
        bulk_us,
    })
}
