//! Tensors that Ferry refuses before it enqueues anything: each case ends with a good round.

use anyhow::{Result, bail, ensure};
use candle_core::{DType, Device as Gpu, Tensor};
use ferry::{Error, TokenFormat};
use ferry_reference::{CombineMode, Problem, bf16, combine, dispatch};

use super::{
    HIDDEN, Memory, Rank, TOP_K, Tokens, close, combine_of, dispatch_of, prepare, problem,
    run_round,
};
use crate::gpu::Suite;
use crate::gpu::on_devices::Devices;
use ferry_rig::verify::compare_rows;

/// Returns the text of an error, which must be about tensors or devices.
fn refusal(wanted: &str, result: Result<(), Error>) -> Result<String> {
    match result {
        Err(error @ (Error::Tensor(_) | Error::OtherDevice { .. })) => Ok(error.to_string()),
        Err(error) => bail!("{wanted}: {error}"),
        Ok(_) => bail!("{wanted}: nothing was refused"),
    }
}

/// Checks that `rank` refuses a dispatch of these tensors with an error that begins with `wanted`.
fn require_refused(
    rank: &mut Rank,
    tokens: &Tokens<'_>,
    rows: &[Tensor],
    wanted: &str,
) -> Result<()> {
    let result = dispatch_of(&mut rank.communicator, tokens, rows);
    let said = refusal(wanted, result)?;
    ensure!(said.starts_with(wanted), "wanted {wanted}, got {said}");
    Ok(())
}

/// Devices of `Device::new_cuda`, which has another default stream on each thread, are refused.
pub(super) fn stream_on_each_thread(suite: &Suite<'_>, devices: &Devices) -> Result<()> {
    let format = TokenFormat::Bf16;
    let problem = problem(suite.ranks());
    let mut ranks = prepare(suite, devices, &problem, format)?;
    for rank in &mut ranks {
        let (number, plan) = (rank.memory.number, *rank.communicator.plan());
        let (device, gpu) = (
            rank.memory.device.clone(),
            Gpu::new_cuda(rank.memory.device.ordinal())?,
        );
        let other = Memory::new(&device, gpu, &plan, number, &problem.inputs[number])?;
        let text = "tensor of candle: wanted a device of `Device::new_cuda_with_stream`";
        require_refused(rank, &other.tokens(), &other.rows, text)?;
        let (gpu, rows) = (rank.memory.gpu.clone(), rank.memory.rows.clone());
        let tokens = Tokens {
            gpu: &gpu,
            ..other.tokens()
        };
        require_refused(rank, &tokens, &rows, text)?;
    }
    run_round(&mut ranks, &problem, format)?;
    close(ranks)
}

/// Tensors of wrong types, shapes and memory are refused, and the communicator serves a round afterwards.
pub(super) fn wrong_tensors(suite: &Suite<'_>, devices: &Devices) -> Result<()> {
    let format = TokenFormat::Bf16;
    let problem = problem(suite.ranks());
    let mut ranks = prepare(suite, devices, &problem, format)?;
    for rank in &mut ranks {
        wrong_inputs(rank)?;
        wrong_rows(rank)?;
    }
    run_round(&mut ranks, &problem, format)?;
    wrong_expert_rows(&mut ranks, &problem)?;
    run_round(&mut ranks, &problem, format)?;
    close(ranks)
}

fn wrong_inputs(rank: &mut Rank) -> Result<()> {
    let memory = &rank.memory;
    let (rows, gpu, count) = (memory.rows.clone(), &memory.gpu, memory.x.dim(0)?);
    let [x, topk_ids, weights] =
        [&memory.x, &memory.topk_ids, &memory.topk_weights].map(Tensor::clone);
    let own = gpu.clone();
    let good = Tokens {
        gpu: &own,
        x: &x,
        topk_ids: &topk_ids,
        topk_weights: Some(&weights),
    };
    let wrong_x = [
        (
            Tensor::zeros((count, HIDDEN), DType::F32, gpu)?,
            "tensor x: wanted elements of bf16",
        ),
        (
            Tensor::zeros((HIDDEN, count), DType::BF16, gpu)?.t()?,
            "tensor of candle: wanted no gaps",
        ),
        (
            Tensor::zeros((count, HIDDEN, 1), DType::BF16, gpu)?,
            "tensor of candle: wanted shape",
        ),
        (
            Tensor::zeros((count, HIDDEN / 2), DType::BF16, gpu)?,
            "tensor of candle: wanted shape",
        ),
        (
            Tensor::zeros((count, HIDDEN), DType::BF16, &Gpu::Cpu)?,
            "tensor of candle: wanted memory of a GPU",
        ),
    ];
    for (x, text) in &wrong_x {
        require_refused(rank, &Tokens { x, ..good }, &rows, text)?;
    }
    let gpu = &rank.memory.gpu.clone();
    for (element, text) in [
        (
            DType::F64,
            "tensor of candle: wanted BF16, F16, F32, I32, I64, U32 or U8",
        ),
        (DType::I64, "tensor topk_ids: wanted elements of i32"),
    ] {
        let tokens = Tokens {
            topk_ids: &Tensor::zeros((count, TOP_K), element, gpu)?,
            ..good
        };
        require_refused(rank, &tokens, &rows, text)?;
    }
    let elsewhere = Gpu::new_cuda_with_stream(rank.memory.device.ordinal())?;
    let other_stream = Tensor::zeros((count, TOP_K), DType::I32, &elsewhere)?;
    let tokens = Tokens {
        topk_ids: &other_stream,
        ..good
    };
    let text = "tensor of candle: wanted a tensor of the lease's candle device";
    require_refused(rank, &tokens, &rows, text)?;
    let wrong_weights = Tensor::zeros((count, TOP_K), DType::BF16, gpu)?;
    let tokens = Tokens {
        topk_weights: Some(&wrong_weights),
        ..good
    };
    require_refused(
        rank,
        &tokens,
        &rows,
        "tensor topk_weights: wanted elements of f32",
    )
}

fn wrong_rows(rank: &mut Rank) -> Result<()> {
    let (good, gpu) = (rank.memory.rows.clone(), rank.memory.gpu.clone());
    let [tokens, row_offsets, expert_ids, src_info] = &good[..] else {
        bail!("{} outputs by expert", good.len());
    };
    let (capacity, groups) = (src_info.dim(0)?, expert_ids.dim(0)?);
    let codes = Tensor::zeros((capacity, HIDDEN), DType::U8, &gpu)?;
    let scales = Tensor::zeros((HIDDEN / 128, capacity), DType::F32, &gpu)?;
    let offsets = Tensor::zeros(groups, DType::U32, &gpu)?;
    let others = [row_offsets, expert_ids, src_info];
    let wrong = [
        (
            [&[&codes][..], &others].concat(),
            "tensor tokens: wanted BF16",
        ),
        (
            [&[tokens, &scales][..], &others].concat(),
            "tensor output: wanted an address for each of tokens, row_offsets, expert_ids, src_info",
        ),
        (
            vec![tokens, row_offsets, expert_ids],
            "tensor output: wanted an address for each of tokens, row_offsets, expert_ids, src_info",
        ),
        (
            vec![tokens, &offsets, expert_ids, src_info],
            "tensor row_offsets: wanted U32",
        ),
    ];
    let [x, topk_ids] = [&rank.memory.x, &rank.memory.topk_ids].map(Tensor::clone);
    let given = Tokens {
        gpu: &gpu,
        x: &x,
        topk_ids: &topk_ids,
        topk_weights: None,
    };
    for (rows, text) in wrong {
        let rows: Vec<_> = rows.into_iter().cloned().collect();
        require_refused(rank, &given, &rows, text)?;
    }
    Ok(())
}

/// Repeats a refused combine with the right rows.
fn wrong_expert_rows(ranks: &mut [Rank], problem: &Problem) -> Result<()> {
    ranks.iter_mut().try_for_each(Rank::dispatch)?;
    let mut results = Vec::new();
    for Rank {
        communicator,
        memory,
    } in &mut *ranks
    {
        let (rows, sums) = (&memory.rows[0], memory.x.zeros_like()?);
        let wrong = Tensor::zeros(rows.shape(), DType::F32, &memory.gpu)?;
        let result = combine_of(communicator, memory, &wrong, &sums);
        let said = refusal("expert rows", result)?;
        ensure!(
            said.starts_with("tensor expert_rows: wanted elements of bf16"),
            "{said}"
        );
        combine_of(communicator, memory, rows, &sums)?;
        results.push(sums);
    }
    let rows = dispatch(problem).into_iter().map(|rank| rank.tokens);
    let sums = combine(problem, &rows.collect::<Vec<_>>(), CombineMode::Reduced);
    for (Rank { memory, .. }, result) in ranks.iter().zip(results) {
        let result: Vec<bf16> = result.flatten_all()?.to_vec1()?;
        compare_rows(memory.number, "sums", &sums[memory.number], &result, HIDDEN)?;
    }
    Ok(())
}

/// Tensors of another GPU are refused, if this process has several.
pub(super) fn other_gpus(suite: &Suite<'_>, devices: &Devices) -> Result<()> {
    let format = TokenFormat::Bf16;
    let problem = problem(suite.ranks());
    let mut ranks = prepare(suite, devices, &problem, format)?;
    for other in 1..ranks.len() {
        let [rank, other] = ranks.get_disjoint_mut([other - 1, other])?;
        let (own, rows) = (rank.memory.topk_ids.clone(), rank.memory.rows.clone());
        let all = other.memory.tokens();
        require_refused(rank, &all, &other.memory.rows, "the stream")?;
        let x = rank.memory.x.clone();
        let gpu = rank.memory.gpu.clone();
        let weights = Tokens {
            gpu: &gpu,
            x: &x,
            topk_ids: &own,
            ..all
        };
        require_refused(rank, &weights, &rows, "the memory")?;
        let own = Tokens {
            topk_weights: None,
            ..weights
        };
        require_refused(rank, &own, &other.memory.rows, "the memory")?;
    }
    run_round(&mut ranks, &problem, format)?;
    close(ranks)
}
