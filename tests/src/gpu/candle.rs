//! Tensors of the crate `candle-core`: rounds in them, and what is refused.
//!
//! All but one of the cases launch no kernel of candle: vectors become tensors, tensors become vectors, and
//! tensors are copied, by copies alone. They also pass in a program whose `nvcc` wrote empty kernels.
//! "Experts that are candle's kernels" adds tensors: that case needs real ones.

mod refused;

use std::sync::Arc;

use anyhow::{Result, bail};
use candle_core::{DType, Device as Gpu, Tensor};
use ferry::cuda::CudaDevice;
use ferry::{
    Capacity, CombineInput, CombineOutput, Communicator, Config, DispatchInput, Error, Lease, Plan,
    TokenFormat,
};
use ferry_reference::workload::Routing;
use ferry_reference::{
    CombineMode, Problem, RankInput, apply_expert_scale, bf16, combine, dispatch,
};

use super::Suite;
use super::on_devices::{self, Case, Devices};
use ferry_rig::factors;
use ferry_rig::formats::Layout;
use ferry_rig::verify::{
    Compared, Contents, Oracle, POISON, Placement, RankOutputs, Received, Tables, compare_rows,
};

const HIDDEN: usize = 256;
const TOKENS: usize = 24;
const TOP_K: usize = 3;
const TURNS: usize = 5;

pub fn run(suite: &mut Suite<'_>) -> Result<()> {
    let cases: [(&str, Case); 7] = [
        ("a round in its tensors, BF16", |suite, devices| {
            round(suite, devices, TokenFormat::Bf16)
        }),
        ("a round in its tensors, FP8", |suite, devices| {
            round(suite, devices, TokenFormat::BlockwiseFp8)
        }),
        ("rounds in turn with its copies", |suite, devices| {
            in_turn(suite, devices, Experts::Copy)
        }),
        ("experts that are candle's kernels", |suite, devices| {
            in_turn(suite, devices, Experts::Double)
        }),
        (
            "a device with a stream on each thread",
            refused::stream_on_each_thread,
        ),
        ("a tensor that is not as it must be", refused::wrong_tensors),
        ("a tensor of another GPU", refused::other_gpus),
    ];
    on_devices::check(suite, "candle", &cases)
}

/// A rank, and what its rounds use.
struct Rank {
    communicator: Communicator,
    memory: Memory,
}

impl Rank {
    /// Enqueues a dispatch.
    fn dispatch(&mut self) -> Result<()> {
        let memory = &mut self.memory;
        Ok(dispatch_of(
            &mut self.communicator,
            &memory.tokens(),
            &memory.rows,
        )?)
    }
}

/// Tensors of a [`DispatchInput`], and the device that a dispatch is enqueued with.
#[derive(Clone, Copy)]
struct Tokens<'a> {
    gpu: &'a Gpu,
    x: &'a Tensor,
    topk_ids: &'a Tensor,
    topk_weights: Option<&'a Tensor>,
}

/// Enqueues a dispatch of these tensors.
fn dispatch_of(
    communicator: &mut Communicator,
    tokens: &Tokens<'_>,
    rows: &[Tensor],
) -> Result<(), Error> {
    let plan = *communicator.plan();
    let count = tokens.topk_ids.dims()[0];
    // SAFETY: the tensors' stream alone uses them; it is synchronised before the group is closed, and no
    // graph is captured.
    let mut lease = unsafe { Lease::new(communicator.device(), tokens.gpu)? };
    let mut input = DispatchInput::new(
        lease.tensor(tokens.x, [count, HIDDEN])?,
        lease.tensor(tokens.topk_ids, [count, TOP_K])?,
    );
    if let Some(weights) = tokens.topk_weights {
        input.topk_weights = Some(lease.tensor(weights, [count, TOP_K])?);
    }
    let output = lease.dispatch_output(&plan, rows)?;
    communicator.dispatch(lease.stream(), &input, &output)
}

/// Enqueues a combine of these tensors.
fn combine_of(
    communicator: &mut Communicator,
    memory: &Memory,
    expert_rows: &Tensor,
    sums: &Tensor,
) -> Result<(), Error> {
    let capacity = memory.capacity();
    let count = memory.x.dims()[0];
    // SAFETY: as in `dispatch_of`.
    let mut lease = unsafe { Lease::new(communicator.device(), &memory.gpu)? };
    let input = CombineInput::new(lease.tensor(expert_rows, [capacity, HIDDEN])?);
    let output = CombineOutput::Summed(lease.tensor(sums, [count, HIDDEN])?);
    communicator.combine(lease.stream(), &input, &output)
}

struct Memory {
    number: usize,
    device: Arc<CudaDevice>,
    gpu: Gpu,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    /// Outputs of a dispatch by expert, in order.
    rows: Vec<Tensor>,
    /// The result, which has a row of poison before and behind it.
    framed: Tensor,
}

impl Memory {
    fn new(
        device: &Arc<CudaDevice>,
        gpu: Gpu,
        plan: &Plan,
        number: usize,
        input: &RankInput,
    ) -> Result<Self> {
        // Behind other tokens, so that it does not begin where its memory does.
        let x = [&[bf16::NAN; HIDDEN][..], &input.x].concat();
        let x = Tensor::from_vec(x, (input.tokens + 1, HIDDEN), &gpu)?;
        Ok(Self {
            number,
            device: device.clone(),
            x: x.narrow(0, 1, input.tokens)?,
            topk_ids: of_token(&input.topk_ids, &gpu)?,
            topk_weights: of_token(&input.topk_weights, &gpu)?,
            rows: outputs(plan, &gpu)?,
            framed: Tensor::zeros((input.tokens + 2, HIDDEN), DType::BF16, &gpu)?,
            gpu,
        })
    }

    /// Fills what a round writes.
    fn poison(&mut self) -> Result<()> {
        self.rows = self.rows.iter().map(poisoned).collect::<Result<_>>()?;
        self.framed = poisoned(&self.framed)?;
        Ok(())
    }

    fn tokens(&self) -> Tokens<'_> {
        Tokens {
            gpu: &self.gpu,
            x: &self.x,
            topk_ids: &self.topk_ids,
            topk_weights: Some(&self.topk_weights),
        }
    }

    /// Rows that fit in the outputs.
    fn capacity(&self) -> usize {
        self.rows[0].dims()[0]
    }

    fn combined(&self) -> Result<Tensor> {
        Ok(self.framed.narrow(0, 1, self.x.dim(0)?)?)
    }

    /// Contents of the tensors, after their stream.
    fn outputs(&self, format: TokenFormat) -> Result<RankOutputs> {
        let [tokens, scales @ .., row_offsets, expert_ids, src_info] = &self.rows[..] else {
            bail!("{} outputs by expert", self.rows.len());
        };
        let capacity = Capacity {
            rows: self.capacity(),
            ..Capacity::default()
        };
        let scales = scales.first().map(bytes_of).transpose()?;
        let received = Received {
            layout: Layout {
                blocks: None,
                format,
                hidden: HIDDEN,
                capacity,
            },
            tokens: bytes_of(tokens)?,
            scales: scales.unwrap_or_default(),
            scales_offsets: Vec::new(),
            row_scales: Vec::new(),
            row_offsets: row_offsets.to_vec1()?,
            expert_ids: expert_ids.to_vec1()?,
            src_info: pairs(&src_info.flatten_all()?.to_vec1()?),
            tables: Tables::default(),
        };
        let last = self.framed.dim(0)? - 1;
        let beyond = [0, last].map(|row| bytes_of(&self.framed.narrow(0, row, 1)?));
        let [before, behind] = beyond;
        Ok(RankOutputs {
            rank: self.number,
            received: Contents::ByExpert(received),
            combined_weights: Vec::new(),
            combined: self.combined()?.flatten_all()?.to_vec1()?,
            beyond: [before?, behind?].concat(),
        })
    }
}

/// Outputs of a dispatch, as large as they may have to be.
fn outputs(plan: &Plan, gpu: &Gpu) -> Result<Vec<Tensor>> {
    let layout = plan.output_layout(Capacity::max(plan))?;
    let all = layout
        .iter()
        .map(|layout| ferry::candle::zeros(layout, gpu));
    Ok(all.collect::<candle_core::Result<_>>()?)
}

/// `[tokens, top_k]`.
fn of_token<T: candle_core::WithDType>(values: &[T], gpu: &Gpu) -> Result<Tensor> {
    Ok(Tensor::from_slice(
        values,
        (values.len() / TOP_K, TOP_K),
        gpu,
    )?)
}

/// A tensor like this one, every byte of it [`POISON`].
fn poisoned(like: &Tensor) -> Result<Tensor> {
    const WORD: u32 = u32::from_le_bytes([POISON; 4]);
    let (count, dims, gpu) = (like.elem_count(), like.dims(), like.device());
    Ok(match like.dtype() {
        DType::BF16 => Tensor::from_vec(vec![bf16::from_bits(WORD as u16); count], dims, gpu)?,
        DType::F32 => Tensor::from_vec(vec![f32::from_bits(WORD); count], dims, gpu)?,
        DType::I32 => Tensor::from_vec(vec![WORD as i32; count], dims, gpu)?,
        DType::U32 => Tensor::from_vec(vec![WORD; count], dims, gpu)?,
        DType::U8 => Tensor::from_vec(vec![POISON; count], dims, gpu)?,
        other => bail!("no poison of {other:?}"),
    })
}

/// A tensor's bytes, after its stream.
fn bytes_of(tensor: &Tensor) -> Result<Vec<u8>> {
    let flat = tensor.flatten_all()?;
    Ok(match tensor.dtype() {
        DType::BF16 => bytemuck::cast_slice(&flat.to_vec1::<bf16>()?).to_vec(),
        DType::F32 => bytemuck::cast_slice(&flat.to_vec1::<f32>()?).to_vec(),
        _ => flat.to_vec1()?,
    })
}

fn pairs(values: &[i32]) -> Vec<[i32; 2]> {
    values.as_chunks().0.to_vec()
}

/// Tokens of the ranks: each one a token fewer than the one before.
fn problem(ranks: usize) -> Problem {
    let tokens = (0..ranks).map(|rank| TOKENS - rank.min(TOKENS));
    let routing = Routing::Holes { probability: 0.1 };
    ferry_rig::problem(tokens.collect(), [4 * ranks, TOP_K, HIDDEN], routing, 7)
}

/// The ranks of this process. Collective.
fn prepare(
    suite: &Suite<'_>,
    devices: &Devices,
    problem: &Problem,
    format: TokenFormat,
) -> Result<Vec<Rank>> {
    let group = suite.group();
    let config = Config {
        format,
        deadline: suite.deadline(),
        ..Config::new(problem.experts, TOP_K, HIDDEN, TOKENS)
    };
    let plan = Plan::new(group, config)?;
    let communicators = Communicator::new(group, &plan)?;
    let rank = |(communicator, device): (Communicator, &Arc<CudaDevice>)| {
        let number = communicator.rank().0 as usize;
        let gpu = Gpu::new_cuda_with_stream(device.ordinal())?;
        Ok(Rank {
            memory: Memory::new(device, gpu, &plan, number, &problem.inputs[number])?,
            communicator,
        })
    };
    communicators.into_iter().zip(devices).map(rank).collect()
}

fn close(ranks: Vec<Rank>) -> Result<()> {
    for rank in ranks {
        rank.communicator.close()?;
    }
    Ok(())
}

fn round(suite: &Suite<'_>, devices: &Devices, format: TokenFormat) -> Result<()> {
    let problem = problem(suite.ranks());
    let mut ranks = prepare(suite, devices, &problem, format)?;
    run_round(&mut ranks, &problem, format)?;
    close(ranks)
}

/// A round whose experts multiply by [`factors`], compared with the oracle.
fn run_round(ranks: &mut [Rank], problem: &Problem, format: TokenFormat) -> Result<()> {
    let scale = factors(problem.experts, 0);
    let placements = Placement::of(problem, format, Compared::ALL);
    ranks.iter_mut().try_for_each(|rank| rank.memory.poison())?;
    ranks.iter_mut().try_for_each(Rank::dispatch)?;
    for Rank {
        communicator,
        memory,
    } in &mut *ranks
    {
        let (number, capacity) = (memory.number, memory.capacity());
        let answers = placements[number].expert_rows(problem, &scale, number, capacity);
        let answers = Tensor::from_vec(answers, (capacity, HIDDEN), &memory.gpu)?;
        combine_of(communicator, memory, &answers, &memory.combined()?)?;
    }
    let oracle = Oracle::new(problem, &scale, format);
    let outputs = ranks.iter().map(|rank| rank.memory.outputs(format));
    let outputs = outputs.collect::<Result<Vec<_>>>()?;
    Ok(oracle.verify(ferry::CombineMode::Reduced, true, &outputs)?)
}

/// Work of candle between Ferry's kernels.
#[derive(Clone, Copy)]
enum Experts {
    /// Copies the rows.
    Copy,
    /// Adds the rows to themselves: a kernel.
    Double,
}

impl Experts {
    fn enqueue(self, rows: &Tensor) -> candle_core::Result<Tensor> {
        match self {
            Self::Copy => rows.copy(),
            Self::Double => rows + rows,
        }
    }

    const fn factor(self) -> f32 {
        match self {
            Self::Copy => 1.0,
            Self::Double => 2.0,
        }
    }
}

/// Rounds of which each takes the sums of the one before. Nobody waits until the last one was enqueued.
fn in_turn(suite: &Suite<'_>, devices: &Devices, experts: Experts) -> Result<()> {
    let mut problem = problem(suite.ranks());
    let mut ranks = prepare(suite, devices, &problem, TokenFormat::Bf16)?;
    for _ in 0..TURNS {
        turn(&mut ranks, experts)?;
    }
    let factors = vec![experts.factor(); problem.experts];
    for _ in 0..TURNS {
        let rows = apply_expert_scale(&problem, &dispatch(&problem), &factors);
        let sums = combine(&problem, &rows, CombineMode::Reduced);
        for (input, sums) in problem.inputs.iter_mut().zip(sums) {
            input.x = sums;
        }
    }
    for Rank { memory, .. } in &ranks {
        let number = memory.number;
        let sums: Vec<bf16> = memory.x.flatten_all()?.to_vec1()?;
        compare_rows(number, "sums", &problem.inputs[number].x, &sums, HIDDEN)?;
    }
    close(ranks)
}

/// Enqueues a round on all ranks. Their tokens are its sums then.
fn turn(ranks: &mut [Rank], experts: Experts) -> Result<()> {
    ranks.iter_mut().try_for_each(Rank::dispatch)?;
    let enqueue = |rank: &Rank| experts.enqueue(&rank.memory.rows[0]);
    let answers = ranks
        .iter()
        .map(enqueue)
        .collect::<candle_core::Result<Vec<_>>>()?;
    for (
        Rank {
            communicator,
            memory,
        },
        answers,
    ) in ranks.iter_mut().zip(answers)
    {
        let sums = memory.x.zeros_like()?;
        combine_of(communicator, memory, &answers, &sums)?;
        memory.x = sums;
    }
    Ok(())
}
