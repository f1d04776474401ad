//! A graph of ours holds the communicators whose calls it has: none of them is closed under it.

use anyhow::{Context, Result, bail, ensure};
use ferry::cuda::{CudaDevice, CudaGraph};
use ferry::{
    CombineInput, CombineMode, CombineOutput, CombineTensor, Config, Device, DevicePtr,
    DispatchInput, DispatchOutput, Error, ExpertParallel, Plan, Tensor, TokenFormat,
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
        experts: suite.ranks(),
        top_k: 1,
        hidden: HIDDEN,
        max_tokens_per_rank: 1,
        p2p_world_size: None,
        format: TokenFormat::Bf16,
        combine: CombineMode::Reduced,
        deadline: suite.deadline(),
        debug_checks: false,
        max_sms: None,
        specialise: false,
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
        let other = CudaDevice::open(cuda.ordinal())?;
        let graph = capture(&other, &mut communicator)?;
        let Err(Error::GraphsAlive {
            graphs,
            communicator,
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
fn capture(device: &CudaDevice, communicator: &mut ExpertParallel) -> Result<CudaGraph> {
    let rows = communicator.plan().max_rows();
    let experts = communicator.plan().local_experts();
    let mut memory = Vec::new();
    let mut alloc = |bytes: usize| -> Result<DevicePtr, Error> {
        let at = device.alloc(bytes as u64)?;
        memory.push(at);
        Ok(at)
    };
    let input = DispatchInput {
        x: Tensor::contiguous(alloc(16)?, [0, HIDDEN]),
        topk_ids: Tensor::contiguous(alloc(16)?, [0, 1]),
        topk_weights: None,
        input_scale: None,
    };
    let output = DispatchOutput {
        tokens: Tensor::contiguous(alloc(2 * rows * HIDDEN)?, [rows, HIDDEN]),
        scales: None,
        row_scales: None,
        row_offsets: Tensor::contiguous(alloc(4 * (experts + 1))?, [experts + 1]),
        expert_ids: Tensor::contiguous(alloc(4 * experts)?, [experts]),
        src_info: Tensor::contiguous(alloc(8 * rows)?, [rows, 2]),
    };
    let combined = CombineOutput {
        combined: CombineTensor::Summed(Tensor::contiguous(alloc(16)?, [0, HIDDEN])),
    };
    let stream = device.stream()?;
    let graph = device.capture(stream, || {
        let dispatched = communicator.dispatch(stream, &input, &output)?;
        let rows = CombineInput {
            expert_rows: output.tokens,
            topk_weights: None,
        };
        dispatched.combine(stream, &rows, &combined).map(|_| ())
    })?;
    for at in memory {
        // SAFETY: allocated here; the graph is never launched.
        unsafe { device.free(at)? };
    }
    Ok(graph)
}
