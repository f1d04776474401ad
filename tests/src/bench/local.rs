//! Dispatch and combine where every rank has all tokens, beside reading and writing the same bytes at the
//! device memory's rate.

use anyhow::{Context, Result, ensure};
use ferry::{
    Capacity, CombineBuffers, CombineInput, Communicator, Config, DataType, DevicePtr,
    DispatchBuffers, DispatchInput, Plan, Stream, Tensor, TokenFormat,
};
use ferry_reference::workload::{Routing, WorkloadSpec, generate};
use ferry_reference::{Problem, share_of};

use super::options::BenchArgs;
use super::record::Limits;
use super::rig::{Repeats, Rig, Stage};
use crate::formats::Layout;
use crate::session::strict;
use crate::verify::capacity_for;

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

/// A rank at work.
struct RankBench {
    ep: Communicator,
    stream: Stream,
    input: DispatchInput,
    rows: DispatchBuffers,
    expert_rows: Tensor<2>,
    sums: CombineBuffers,
    /// What was allocated for it alone.
    memory: Vec<DevicePtr>,
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
        let all = generate(WorkloadSpec {
            ranks: 1,
            experts: args.experts,
            top_k: args.top_k,
            hidden: args.hidden,
            tokens: vec![tokens],
            routing: Routing::Uniform,
            seed: args.seed,
        });
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
        specialise: !args.general,
        ..Config::new(
            problem.experts,
            args.top_k,
            args.hidden,
            problem.inputs[0].tokens,
        )
    };
    let plan = Plan::new(&rig.group, config)?;
    let shares: Vec<Problem> = (0..rig.ranks())
        .map(|rank| share_of(problem, rig.ranks(), rank))
        .collect();
    let eps = Communicator::new(&rig.group, &plan)?.into_iter();
    let mut ranks: Vec<RankBench> = eps
        .zip(&rig.gpus)
        .map(|(ep, gpu)| RankBench::new(ep, gpu.stream, problem, &shares[gpu.rank]))
        .collect::<Result<_>>()?;
    let calls = ranks.iter_mut().map(|rank| {
        move |stage: usize, _iteration: u32| match stage {
            0 => rank.dispatch(),
            _ => rank.combine(),
        }
    });
    let repeats = Repeats {
        warmup: args.warmup,
        iterations: args.iterations,
        flush: true,
    };
    let stages = [Stage::Aligned, Stage::Aligned];
    let timed = rig.time(repeats, &stages, calls.collect())?;
    for rank in ranks {
        rank.close()?;
    }
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

/// What a rank reads and writes: each token that has an expert here once, and its rows; these in BF16, and
/// all sums.
fn bytes(share: &Problem, format: TokenFormat) -> [u64; 2] {
    let tokens = share.inputs[0].topk_ids.chunks(share.top_k);
    let slots = tokens.map(|ids| ids.iter().filter(|&&id| id >= 0).count());
    let (mut here, mut rows) = (0, 0);
    for slots in slots {
        here += usize::from(slots > 0);
        rows += slots;
    }
    let layout = Layout {
        format,
        hidden: share.hidden,
        capacity: Capacity {
            rows: 128,
            scale_blocks: 1,
        },
    };
    let scales = layout.scales_bytes() / 128;
    let row = 2 * share.hidden;
    let dispatch = here * row + rows * (layout.row_bytes() + scales);
    let combine = (rows + share.inputs[0].tokens) * row;
    [dispatch as u64, combine as u64]
}

impl RankBench {
    fn new(ep: Communicator, stream: Stream, all: &Problem, share: &Problem) -> Result<Self> {
        let (device, plan, given) = (ep.device().clone(), *ep.plan(), &all.inputs[0]);
        let tokens = given.tokens;
        let capacity = capacity_for(share, plan.config().format);
        let x = device.upload_tensor([tokens, all.hidden], &given.x)?;
        let topk_ids = device.upload_tensor([tokens, all.top_k], &given.topk_ids)?;
        let weights = device.upload_tensor([tokens, all.top_k], &given.topk_weights)?;
        let bytes = 2 * (capacity.rows * all.hidden) as u64;
        let expert_rows = device.alloc(bytes)?;
        device.fill(expert_rows, 0x3c, bytes)?;
        Ok(Self {
            input: DispatchInput {
                topk_weights: Some(weights),
                ..DispatchInput::new(x, topk_ids)
            },
            rows: DispatchBuffers::with_capacity(&device, &plan, capacity)?,
            expert_rows: Tensor::contiguous(
                expert_rows,
                DataType::Bf16,
                [capacity.rows, all.hidden],
            ),
            sums: CombineBuffers::new(&device, &plan)?,
            memory: vec![x.at, topk_ids.at, weights.at, expert_rows],
            ep,
            stream,
        })
    }

    fn dispatch(&mut self) -> Result<()> {
        Ok((self.ep).dispatch(self.stream, &self.input, self.rows.output())?)
    }

    /// Of expert rows that are all alike.
    fn combine(&mut self) -> Result<()> {
        let output = self.sums.output(self.input.x.dims[0])?;
        let input = CombineInput::new(self.expert_rows);
        Ok(self.ep.combine(self.stream, &input, &output)?)
    }

    fn close(self) -> Result<()> {
        strict(self.ep.synchronize(self.stream))?;
        let device = self.ep.device().clone();
        self.ep.close()?;
        for at in self.memory {
            // SAFETY: the communicator is closed, so nothing uses it.
            unsafe { device.free(at) }?;
        }
        // SAFETY: as above.
        unsafe { self.rows.free() }?;
        // SAFETY: as above.
        Ok(unsafe { self.sums.free() }?)
    }
}
