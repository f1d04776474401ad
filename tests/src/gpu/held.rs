//! A graph of ours holds the communicators whose calls it has: none of them is closed under it.

use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use ferry::cuda::{CudaDevice, CudaGraph};
use ferry::{
    CloseError, CombineBuffers, CombineInput, Config, DataType, Device, DevicePtr, DispatchBuffers,
    DispatchInput, Error, ExpertParallel, Plan, Tensor,
};

use super::{Outcome, Suite};

const HIDDEN: usize = 8;

pub fn run(suite: &mut Suite<'_>) -> Result<()> {
    suite.check("a communicator that a graph holds", |suite| {
        held_by_a_graph(suite)
    })
}

/// Captures a round without tokens on every rank, through another handle of its GPU, and launches none.
fn held_by_a_graph(suite: &mut Suite<'_>) -> Result<Outcome> {
    let group = suite.group().clone();
    let config = Config {
        deadline: suite.deadline(),
        ..Config::new(suite.ranks(), 1, HIDDEN, 1)
    };
    let ranks = group.local_ranks();
    let Some(cuda) = ranks
        .iter()
        .map(|&rank| group.cuda(rank))
        .collect::<Option<Vec<_>>>()
    else {
        return Ok(Outcome::Skipped("needs CUDA graphs".into()));
    };
    let plan = Plan::new(&group, config)?;
    for (mut communicator, cuda) in ExpertParallel::new(&group, &plan)?.into_iter().zip(cuda) {
        let other = Arc::new(CudaDevice::open(cuda.ordinal())?);
        let graph = capture(&other, &mut communicator)?;
        let Err(CloseError {
            error: Error::GraphsAlive { graphs, .. },
            communicator: Some(communicator),
        }) = communicator.close()
        else {
            bail!("closed although a graph has calls of it");
        };
        ensure!(graphs == 1, "{graphs} graphs hold it");
        drop(graph);
        communicator
            .close()
            .context("after the graph was dropped")?;
    }
    Ok(Outcome::Passed)
}

/// A round of no tokens as a graph.
fn capture(device: &Arc<CudaDevice>, communicator: &mut ExpertParallel) -> Result<CudaGraph> {
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
        let dispatched = communicator.dispatch(stream, &input, &output)?;
        let rows = CombineInput::new(output.tokens);
        dispatched.combine(stream, &rows, &combined).map(|_| ())
    })?;
    // SAFETY: the graph is never launched.
    unsafe {
        rows.free()?;
        sums.free()?;
    }
    Ok(graph)
}
