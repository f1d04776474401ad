//! Streams, buffers and contexts of the crate `cust`: a round in its memory, and what is refused.

use std::sync::Arc;

use anyhow::{Result, bail, ensure};
use cust::context::CurrentContext;
use cust::context::legacy::{Context, ContextFlags};
use cust::memory::DeviceBuffer;
use cust::stream::{Stream, StreamFlags};
use ferry::cuda::CudaDevice;
use ferry::{
    AsStream as _, CombineInput, CombineOutput, Communicator, Config, Device, DispatchInput,
    DispatchOutput, Error, InputReport, Lease, Plan,
};

use super::Suite;
use super::on_devices::{self, Case, Devices, require_refused};
use ferry_rig::strict;

const HIDDEN: usize = 8;
const TOKENS: usize = 3;
const TOP_K: usize = 2;
/// 1.0 and 2.0 as BF16.
const ONE: u16 = 0x3f80;
const TWO: u16 = 0x4000;

pub fn run(suite: &mut Suite<'_>) -> Result<()> {
    let cases: [(&str, Case); 3] = [
        ("a round in its memory, on its streams", round),
        ("a buffer that is too short", short_buffer),
        ("what is of another context or device", others),
    ];
    on_devices::check(suite, "cust", &cases)
}

/// Memory of a rank's round.
struct Memory {
    stream: Stream,
    x: DeviceBuffer<u16>,
    topk_ids: DeviceBuffer<i32>,
    tokens: DeviceBuffer<u16>,
    row_offsets: DeviceBuffer<u32>,
    expert_ids: DeviceBuffer<i32>,
    src_info: DeviceBuffer<i32>,
    combined: DeviceBuffer<u16>,
}

impl Memory {
    /// Allocates in the current context. Each token goes to two experts that stand side by side.
    fn new(plan: &Plan) -> Result<Self> {
        let (rows, local) = (plan.max_rows(), plan.local_experts());
        let experts = plan.config().experts;
        let ids = (0..TOKENS).flat_map(|token| [token % experts, (token + 1) % experts]);
        let ids: Vec<_> = ids.map(|expert| expert as i32).collect();
        let memory = Self {
            stream: Stream::new(StreamFlags::DEFAULT, None)?,
            x: DeviceBuffer::from_slice(&[ONE; TOKENS * HIDDEN])?,
            topk_ids: DeviceBuffer::from_slice(&ids)?,
            tokens: DeviceBuffer::zeroed(rows * HIDDEN)?,
            row_offsets: DeviceBuffer::zeroed(local + 1)?,
            expert_ids: DeviceBuffer::zeroed(local)?,
            src_info: DeviceBuffer::zeroed(rows * 2)?,
            combined: DeviceBuffer::zeroed(TOKENS * HIDDEN)?,
        };
        // A copy returns before its bytes are there, and other streams do not wait for it.
        CurrentContext::synchronize()?;
        Ok(memory)
    }

    /// Enqueues a round whose experts return what they get.
    fn enqueue(&mut self, rank: &mut Communicator) -> Result<ferry::Stream> {
        let plan = *rank.plan();
        let (rows, local) = (plan.max_rows(), plan.local_experts());
        // SAFETY: the round ends, and the communicator is closed, before these are used or dropped.
        let mut lease = unsafe { Lease::new(rank.device(), &self.stream)? };
        let x = lease.tensor(&self.x, [TOKENS, HIDDEN])?;
        let topk_ids = lease.tensor(&self.topk_ids, [TOKENS, TOP_K])?;
        let output = DispatchOutput::by_expert(
            lease.tensor(&mut self.tokens, [rows, HIDDEN])?,
            lease.tensor(&mut self.row_offsets, [local + 1])?,
            lease.tensor(&mut self.expert_ids, [local])?,
            lease.tensor(&mut self.src_info, [rows, 2])?,
        );
        let input = DispatchInput::new(x, topk_ids);
        let sums = lease.tensor(&mut self.combined, [TOKENS, HIDDEN])?;
        let stream = lease.stream();
        rank.dispatch(stream, &input, &output)?;
        let expert_rows = CombineInput::new(output.tokens.unwrap());
        rank.combine(stream, &expert_rows, &CombineOutput::Summed(sums))?;
        Ok(stream)
    }
}

fn round(suite: &Suite<'_>, devices: &Devices) -> Result<()> {
    let group = suite.group();
    let plan = Plan::new(
        group,
        Config {
            deadline: suite.deadline(),
            ..Config::new(2 * suite.ranks(), TOP_K, HIDDEN, TOKENS)
        },
    )?;
    let mut ranks = Communicator::new(group, &plan)?;
    let mut memory = Vec::new();
    for device in devices {
        let _current = device.enter()?;
        ferry::cust::require_current(device)?;
        memory.push(Memory::new(&plan)?);
    }
    let mut streams = Vec::new();
    for (rank, memory) in ranks.iter_mut().zip(&mut memory) {
        streams.push(memory.enqueue(rank)?);
    }
    for (rank, stream) in ranks.into_iter().zip(streams) {
        strict(rank.synchronize(stream).map(InputReport::fault))?;
        rank.close()?;
    }
    for (device, memory) in devices.iter().zip(memory) {
        let _current = device.enter()?;
        let combined = memory.combined.as_host_vec()?;
        ensure!(combined == [TWO; TOKENS * HIDDEN], "combined {combined:x?}");
        drop(memory);
    }
    Ok(())
}

fn short_buffer(_: &Suite<'_>, devices: &Devices) -> Result<()> {
    for device in devices {
        let _current = device.enter()?;
        let buffer = DeviceBuffer::from_slice(&[ONE; TOKENS * HIDDEN])?;
        let device: Arc<dyn Device> = device.clone();
        // SAFETY: nothing is enqueued.
        let mut lease = unsafe { Lease::new(&device, &ferry::Stream::DEFAULT)? };
        let tensor = lease.tensor(&buffer, [TOKENS + 1, HIDDEN]);
        let Err(Error::Tensor(error)) = tensor else {
            bail!("a tensor is longer than its buffer: {tensor:?}");
        };
        ensure!(error.given == (TOKENS * HIDDEN).to_string(), "{error}");
    }
    Ok(())
}

fn others(_: &Suite<'_>, devices: &Devices) -> Result<()> {
    let Some(first) = devices.first() else {
        return Ok(());
    };
    of_another_context(first)?;
    // Ranks that share a GPU have one context, too.
    for other in devices
        .iter()
        .filter(|other| other.ordinal() != first.ordinal())
    {
        let _current = first.enter()?;
        let stream = Stream::new(StreamFlags::DEFAULT, None)?;
        let buffer = DeviceBuffer::from_slice(&[ONE; HIDDEN])?;
        require_refused("a context", ferry::cust::require_current(other))?;
        let [first, other]: [Arc<dyn Device>; 2] = [first.clone(), other.clone()];
        // SAFETY: nothing is enqueued.
        let (mut own, mut elsewhere, refused) = unsafe {
            (
                Lease::new(&first, &stream)?,
                Lease::new(&other, &ferry::Stream::DEFAULT)?,
                Lease::new(&other, &stream),
            )
        };
        own.tensor(&buffer, [HIDDEN])?;
        require_refused("a stream", refused)?;
        require_refused("memory", elsewhere.tensor(&buffer, [HIDDEN]))?;
    }
    Ok(())
}

/// A context of `cust`'s own on the same device.
fn of_another_context(device: &CudaDevice) -> Result<()> {
    let ordinal = u32::try_from(device.ordinal())?;
    let number = cust::device::Device::get_device(ordinal)?;
    let context = Context::create_and_push(ContextFlags::SCHED_AUTO, number)?;
    let stream = Stream::new(StreamFlags::DEFAULT, None)?;
    // SAFETY: nothing is enqueued.
    let taken = unsafe { stream.as_stream(device) };
    let current = ferry::cust::require_current(device);
    drop(stream);
    drop(context);
    require_refused("another context's stream", taken)?;
    require_refused("another context", current)
}
