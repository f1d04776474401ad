//! Communicators and kernels that a graph needs stay until it is dropped.

use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use ferry::cuda::{CudaDevice, CudaGraph};
use ferry::{
    Activation, CloseError, CombineBuffers, CombineInput, Communicator, Config, DataType, Device,
    DevicePtr, DispatchBuffers, DispatchInput, Error, FusedSilu, Group, Plan, Tensor, TokenFormat,
};

use super::{Outcome, Suite};

const HIDDEN: usize = 8;
const COLUMNS: usize = 16;
const BF16_1: u16 = 0x3f80;
/// 0.7310586, rounded.
const BF16_SILU_OF_1: u16 = 0x3f3b;

pub fn run(suite: &mut Suite<'_>) -> Result<()> {
    suite.check("a communicator that a graph holds", |suite| {
        held_by_a_graph(suite)
    })?;
    suite.check("kernels of a device that was dropped", |suite| {
        outlive_their_device(suite)
    })
}

/// Drops a handle of a GPU while its kernel is in a graph of another handle and runs in that one's stream.
fn outlive_their_device(suite: &mut Suite<'_>) -> Result<Outcome> {
    let group = suite.group().clone();
    let Some(cuda) = cuda_devices(&group) else {
        return Ok(Outcome::Skipped("needs CUDA graphs".into()));
    };
    for cuda in cuda {
        let stays = CudaDevice::open(cuda.ordinal())?;
        let stream = stays.stream()?;
        let silu = ones(&stays)?;
        let enqueue = |device: &CudaDevice| (device as &dyn Device).fused_silu(stream, &silu, None);
        let computed = |what| -> Result<()> {
            stays.synchronize(stream)?;
            let rows: Vec<u16> = (&stays as &dyn Device).download_tensor(&silu.output)?;
            stays.fill(silu.output.at, 0xff, silu.output.bytes())?;
            ensure!(rows == [BF16_SILU_OF_1; COLUMNS], "{what}: {rows:04x?}");
            Ok(())
        };
        let goes = CudaDevice::open(cuda.ordinal())?;
        let mut graph = stays.capture(stream, || enqueue(&goes))?;
        enqueue(&goes)?;
        drop(goes);
        computed("at work")?;
        graph.launch(stream)?;
        computed("in a graph")?;
        drop(graph);
        // SAFETY: `stays` allocated all three; the stream has passed the kernels, and the graph is dropped.
        unsafe {
            stays.free(silu.input.at)?;
            stays.free(silu.row_offsets.at)?;
            stays.free(silu.output.at)?;
        }
    }
    Ok(Outcome::Passed)
}

/// Fused SiLU of one row of ones.
fn ones(device: &dyn Device) -> Result<FusedSilu> {
    let input = device.upload_tensor([1, 2 * COLUMNS], &[BF16_1; 2 * COLUMNS])?;
    Ok(FusedSilu {
        input,
        interleaved: false,
        row_offsets: device.upload_tensor([2], &[0_u32, 1])?,
        activation: Activation::Silu,
        format: TokenFormat::Bf16,
        input_scales: None,
        output: device.upload_tensor([1, COLUMNS], &[0_u16; COLUMNS])?,
        scales: None,
    })
}

/// CUDA devices of this process's ranks; `None` if one has another device.
fn cuda_devices(group: &Group) -> Option<Vec<Arc<CudaDevice>>> {
    let ranks = group.local_ranks();
    ranks.iter().map(|&rank| group.cuda(rank)).collect()
}

/// Captures a round without tokens on every rank through another handle of its GPU; no graph is launched.
fn held_by_a_graph(suite: &mut Suite<'_>) -> Result<Outcome> {
    let group = suite.group().clone();
    let config = Config {
        deadline: suite.deadline(),
        ..Config::new(suite.ranks(), 1, HIDDEN, 1)
    };
    let Some(cuda) = cuda_devices(&group) else {
        return Ok(Outcome::Skipped("needs CUDA graphs".into()));
    };
    let plan = Plan::new(&group, config)?;
    for (mut communicator, cuda) in Communicator::new(&group, &plan)?.into_iter().zip(cuda) {
        let other = Arc::new(CudaDevice::open(cuda.ordinal())?);
        let graph = capture(&other, &mut communicator)?;
        let communicator = not_closed(communicator)?;
        drop(graph);
        communicator
            .close()
            .context("after the graph was dropped")?;
    }
    Ok(Outcome::Passed)
}

/// Checks that a communicator cannot be closed while a graph holds it, and returns it.
fn not_closed(communicator: Communicator) -> Result<Communicator> {
    let Err(CloseError {
        error: Error::GraphsAlive { graphs, .. },
        communicator: Some(communicator),
    }) = communicator.close()
    else {
        bail!("closed although a graph has its calls");
    };
    ensure!(graphs == 1, "{graphs} graphs hold it");
    Ok(*communicator)
}

/// Captures a round without tokens.
fn capture(device: &Arc<CudaDevice>, communicator: &mut Communicator) -> Result<CudaGraph> {
    let (shared, plan): (Arc<dyn Device>, _) = (device.clone(), *communicator.plan());
    let rows = DispatchBuffers::new(&shared, &plan)?;
    let sums = CombineBuffers::new(&shared, &plan)?;
    let (output, combined) = (*rows.output(), sums.output(0)?);
    let input = DispatchInput::new(
        Tensor::contiguous(DevicePtr::NULL, DataType::Bf16, [0, HIDDEN]),
        Tensor::contiguous(DevicePtr::NULL, DataType::I32, [0, 1]),
    );
    let stream = device.stream()?;
    let graph = device.capture(stream, || {
        communicator.dispatch(stream, &input, &output)?;
        let rows = CombineInput::new(output.tokens.unwrap());
        communicator.combine(stream, &rows, &combined)
    })?;
    // SAFETY: only the graph uses the tensors, and it is never launched.
    unsafe {
        rows.free()?;
        sums.free()?;
    }
    Ok(graph)
}
