//! Streams and memory of the crate `cudarc`: a round in its memory, a captured one, and what is refused.

use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, CudaGraph, CudaSlice, CudaStream};
use ferry::{
    CloseError, CombineInput, CombineOutput, Communicator, Config, Device, DispatchInput,
    DispatchOutput, Error, Lease, Plan,
};
use ferry_reference::workload::Routing;
use ferry_reference::{CombineMode, Dispatched, RankInput, bf16, combine, dispatch};

use super::Suite;
use super::on_devices::{self, Case, Devices, require_refused};

const HIDDEN: usize = 256;
const TOKENS: usize = 24;
const TOP_K: usize = 3;
const REPLAYS: usize = 3;

pub fn run(suite: &mut Suite<'_>) -> Result<()> {
    let cases: [(&str, Case); 4] = [
        ("a round in its memory, on its streams", round),
        ("a round that its stream captured, three times", captured),
        ("a slice that is too short", short_slice),
        ("what is of another device or context", others),
    ];
    on_devices::check(suite, "cudarc", &cases)
}

/// A rank, and what its rounds use.
struct Rank {
    number: usize,
    communicator: Communicator,
    stream: Arc<CudaStream>,
    memory: Memory,
}

struct Memory {
    x: CudaSlice<bf16>,
    topk_ids: CudaSlice<i32>,
    topk_weights: CudaSlice<f32>,
    tokens: CudaSlice<bf16>,
    row_offsets: CudaSlice<u32>,
    expert_ids: CudaSlice<i32>,
    src_info: CudaSlice<i32>,
    combined: CudaSlice<bf16>,
}

impl Memory {
    fn new(stream: &Arc<CudaStream>, plan: &Plan, input: &RankInput) -> Result<Self> {
        let (rows, groups) = (plan.max_rows(), plan.groups());
        Ok(Self {
            x: stream.clone_htod(&input.x)?,
            topk_ids: stream.clone_htod(&input.topk_ids)?,
            topk_weights: stream.clone_htod(&input.topk_weights)?,
            tokens: stream.alloc_zeros(rows * HIDDEN)?,
            row_offsets: stream.alloc_zeros(groups + 1)?,
            expert_ids: stream.alloc_zeros(groups)?,
            src_info: stream.alloc_zeros(rows * 2)?,
            combined: stream.alloc_zeros(TOKENS * HIDDEN)?,
        })
    }
}

impl Rank {
    /// Enqueues a round whose experts return what they get.
    fn enqueue(&mut self) -> Result<()> {
        let plan = *self.communicator.plan();
        let (rows, groups, memory) = (plan.max_rows(), plan.groups(), &mut self.memory);
        // SAFETY: the tensors are used until the lease is dropped; graphs are dropped before the slices, and
        // captured by this thread.
        let mut lease = unsafe { Lease::new(self.communicator.device(), &self.stream)? };
        let input = DispatchInput {
            topk_weights: Some(lease.tensor(&memory.topk_weights, [TOKENS, TOP_K])?),
            ..DispatchInput::new(
                lease.tensor(&memory.x, [TOKENS, HIDDEN])?,
                lease.tensor(&memory.topk_ids, [TOKENS, TOP_K])?,
            )
        };
        let output = DispatchOutput::by_expert(
            lease.tensor(&mut memory.tokens, [rows, HIDDEN])?,
            lease.tensor(&mut memory.row_offsets, [groups + 1])?,
            lease.tensor(&mut memory.expert_ids, [groups])?,
            lease.tensor(&mut memory.src_info, [rows, 2])?,
        );
        let sums = CombineOutput::Summed(lease.tensor(&mut memory.combined, [TOKENS, HIDDEN])?);
        let stream = lease.stream();
        self.communicator.dispatch(stream, &input, &output)?;
        self.communicator
            .combine(stream, &CombineInput::new(output.tokens.unwrap()), &sums)?;
        Ok(())
    }

    /// Waits, and compares rows and sums.
    fn verify(&self, expected: &Expected) -> Result<()> {
        self.stream.synchronize()?;
        let (rows, sums) = (
            &expected.dispatched[self.number],
            &expected.combined[self.number],
        );
        let offsets = self.stream.clone_dtoh(&self.memory.row_offsets)?;
        ensure!(offsets == rows.row_offsets, "row_offsets {offsets:?}");
        let tokens = self.stream.clone_dtoh(&self.memory.tokens)?;
        ensure!(tokens[..rows.tokens.len()] == rows.tokens, "tokens differ");
        let info = self.stream.clone_dtoh(&self.memory.src_info)?;
        let wanted = rows.src_info.as_flattened();
        ensure!(info[..wanted.len()] == *wanted, "src_info differs");
        let combined = self.stream.clone_dtoh(&self.memory.combined)?;
        ensure!(combined == *sums, "combined differs");
        Ok(())
    }
}

/// Outputs by the oracle.
struct Expected {
    dispatched: Vec<Dispatched>,
    combined: Vec<Vec<bf16>>,
}

/// The ranks of this process, and what their rounds must give.
fn prepare(suite: &Suite<'_>, devices: &Devices, track: bool) -> Result<(Vec<Rank>, Expected)> {
    let group = suite.group();
    let experts = 4 * suite.ranks();
    let routing = Routing::Holes { probability: 0.1 };
    let tokens = vec![TOKENS; suite.ranks()];
    let problem = ferry_rig::problem(tokens, [experts, TOP_K, HIDDEN], routing, 5);
    let plan = Plan::new(
        group,
        Config {
            deadline: suite.deadline(),
            ..Config::new(experts, TOP_K, HIDDEN, TOKENS)
        },
    )?;
    let communicators = Communicator::new(group, &plan)?;
    let mut ranks = Vec::new();
    for (communicator, device) in communicators.into_iter().zip(devices) {
        let context = CudaContext::new(device.ordinal())?;
        ferry::cudarc::require_context(device, &context)?;
        if !track {
            // SAFETY: each rank has one stream, which allocates, uses and frees its memory.
            unsafe { context.disable_event_tracking() };
        }
        let stream = context.new_stream()?;
        let number = communicator.rank().0 as usize;
        ranks.push(Rank {
            memory: Memory::new(&stream, &plan, &problem.inputs[number])?,
            number,
            communicator,
            stream,
        });
    }
    let dispatched = dispatch(&problem);
    let rows: Vec<_> = dispatched.iter().map(|rank| rank.tokens.clone()).collect();
    let combined = combine(&problem, &rows, CombineMode::Reduced);
    Ok((
        ranks,
        Expected {
            dispatched,
            combined,
        },
    ))
}

fn close(ranks: Vec<Rank>) -> Result<()> {
    for rank in ranks {
        rank.communicator.close()?;
    }
    Ok(())
}

fn round(suite: &Suite<'_>, devices: &Devices) -> Result<()> {
    let (mut ranks, expected) = prepare(suite, devices, true)?;
    ranks.iter_mut().try_for_each(Rank::enqueue)?;
    ranks.iter().try_for_each(|rank| rank.verify(&expected))?;
    close(ranks)
}

fn captured(suite: &Suite<'_>, devices: &Devices) -> Result<()> {
    let (mut ranks, expected) = prepare(suite, devices, false)?;
    let graphs = ranks.iter_mut().map(capture).collect::<Result<Vec<_>>>()?;
    for _ in 0..REPLAYS {
        for rank in &mut ranks {
            rank.stream.memset_zeros(&mut rank.memory.tokens)?;
            rank.stream.memset_zeros(&mut rank.memory.combined)?;
        }
        graphs.iter().try_for_each(CudaGraph::launch)?;
        ranks.iter().try_for_each(|rank| rank.verify(&expected))?;
    }
    drop(graphs);
    for rank in ranks {
        let Err(CloseError {
            error: Error::ForeignGraphs { .. },
            communicator: Some(mut communicator),
        }) = rank.communicator.close()
        else {
            bail!("closed although cudarc may have a graph of it");
        };
        // SAFETY: the graphs are gone, and `verify` has waited for each replay.
        unsafe { communicator.assume_no_foreign_graphs() };
        communicator.close()?;
    }
    Ok(())
}

fn capture(rank: &mut Rank) -> Result<CudaGraph> {
    rank.stream.synchronize()?;
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    rank.stream.begin_capture(mode)?;
    let enqueued = rank.enqueue();
    // SAFETY: 0 is no flag at all, a value that the driver takes.
    let flags: CUgraphInstantiate_flags = unsafe { std::mem::zeroed() };
    let graph = rank.stream.end_capture(flags);
    enqueued?;
    graph?.context("an empty capture")
}

fn short_slice(_: &Suite<'_>, devices: &Devices) -> Result<()> {
    for device in devices {
        let stream = CudaContext::new(device.ordinal())?.new_stream()?;
        let slice = stream.clone_htod(&[bf16::ONE; TOKENS])?;
        let device: Arc<dyn Device> = device.clone();
        // SAFETY: nothing is enqueued.
        let mut lease = unsafe { Lease::new(&device, &stream)? };
        let tensor = lease.tensor(&slice, [TOKENS, 2]);
        let Err(Error::Tensor(error)) = tensor else {
            bail!("a tensor is longer than its slice: {tensor:?}");
        };
        ensure!(error.given == TOKENS.to_string(), "{error}");
    }
    Ok(())
}

fn others(_: &Suite<'_>, devices: &Devices) -> Result<()> {
    let Some(first) = devices.first() else {
        return Ok(());
    };
    let context = CudaContext::new(first.ordinal())?;
    let (stream, default) = (context.new_stream()?, context.default_stream());
    let slice = stream.clone_htod(&[bf16::ONE; HIDDEN])?;
    let leased: Arc<dyn Device> = first.clone();
    // SAFETY: nothing is enqueued.
    drop(unsafe { Lease::new(&leased, &default)? });
    // Ranks that share a GPU have one context, too.
    for other in devices
        .iter()
        .filter(|other| other.ordinal() != first.ordinal())
    {
        require_refused("a context", ferry::cudarc::require_context(other, &context))?;
        let own = CudaContext::new(other.ordinal())?.new_stream()?;
        let other: Arc<dyn Device> = other.clone();
        // SAFETY: nothing is enqueued.
        require_refused("a stream", unsafe { Lease::new(&other, &stream) })?;
        // SAFETY: nothing is enqueued.
        let mut lease = unsafe { Lease::new(&other, &own)? };
        require_refused("memory", lease.tensor(&slice, [HIDDEN]))?;
    }
    Ok(())
}
