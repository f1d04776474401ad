//! The tensors of a run: inputs that are made once, and outputs for each number of tokens.

use std::sync::Arc;

use anyhow::Result;
use ferry::cuda::CudaDevice;
use ferry::{
    CombineInput, CombineMode, CombineOutput, CombineTensor, Device, DevicePtr, DispatchInput,
    DispatchOutput, Plan, Tensor, TokenFormat,
};
use ferry_reference::workload::{WorkloadSpec, generate};
use ferry_reference::{Problem, RankInput, bf16};

use super::options::BenchArgs;
use crate::formats::{self, Capacity};

use super::rig::Rig;

/// Problems that the calls rotate through, so that each finds new data.
pub const SETS: usize = 4;

/// The inputs of all problems on a rank.
#[derive(Clone, Copy)]
struct Uploaded {
    x: DevicePtr,
    topk_ids: DevicePtr,
    topk_weights: DevicePtr,
}

/// Problems with the most tokens. Fewer tokens are the first ones of these.
pub struct Inputs {
    /// What was uploaded.
    pub problems: Vec<Problem>,
    /// By problem, then rank of this process.
    uploaded: Vec<Vec<Uploaded>>,
}

impl Inputs {
    /// Makes and uploads them.
    pub fn new(rig: &Rig, args: &BenchArgs) -> Result<Self> {
        let most = args.tokens.last().copied().unwrap_or(0);
        let problem = |set: usize| {
            generate(WorkloadSpec {
                ranks: rig.ranks(),
                experts: args.experts,
                top_k: args.top_k,
                hidden: args.hidden,
                tokens: vec![most; rig.ranks()],
                routing: args.routing.routing(),
                seed: args.seed.wrapping_mul(1000).wrapping_add(set as u64),
            })
        };
        let problems: Vec<Problem> = (0..SETS).map(problem).collect();
        let upload = |problem: &Problem| -> Result<Vec<Uploaded>> {
            let ranks = rig.gpus.iter();
            ranks
                .map(|gpu| upload(&gpu.device, &problem.inputs[gpu.rank]))
                .collect()
        };
        let uploaded = problems.iter().map(upload).collect::<Result<_>>()?;
        Ok(Self { problems, uploaded })
    }

    /// What outputs must hold, padding included, for any problem's first `tokens` tokens.
    pub fn capacity(&self, tokens: usize, format: TokenFormat) -> Capacity {
        let of = |problem: &Problem| {
            let mut rows = vec![0_usize; problem.experts];
            for input in &problem.inputs {
                for &id in input.topk_ids.iter().take(tokens * problem.top_k) {
                    if let Ok(expert) = usize::try_from(id) {
                        rows[expert] += 1;
                    }
                }
            }
            let alignment = format.sizes().row_alignment as usize;
            let ranks = rows.chunks(problem.local_experts()).map(|rank| Capacity {
                rows: rank
                    .iter()
                    .map(|rows| rows.next_multiple_of(alignment))
                    .sum(),
                blocks: rank.iter().map(|rows| rows.div_ceil(128)).sum(),
            });
            ranks.fold(Capacity::default(), Capacity::max)
        };
        let most = self.problems.iter().map(of);
        let most = most.fold(Capacity { rows: 1, blocks: 1 }, Capacity::max);
        // The transposed scales want rows of 16 bytes.
        Capacity {
            rows: most.rows.next_multiple_of(16),
            ..most
        }
    }

    /// What a rank brings; `local` is its number among those of this process.
    pub fn dispatch(&self, set: usize, local: usize, tokens: usize) -> DispatchInput {
        let Problem { hidden, top_k, .. } = self.problems[set];
        let Uploaded {
            x,
            topk_ids,
            topk_weights,
        } = self.uploaded[set][local];
        DispatchInput {
            x: Tensor::contiguous(x, [tokens, hidden]),
            topk_ids: Tensor::contiguous(topk_ids, [tokens, top_k]),
            topk_weights: Some(Tensor::contiguous(topk_weights, [tokens, top_k])),
            input_scale: None,
        }
    }
}

/// A problem's sizes, without inputs.
pub fn shape_of(problem: &Problem) -> Problem {
    let Problem {
        ranks,
        experts,
        top_k,
        hidden,
        ..
    } = *problem;
    Problem {
        ranks,
        experts,
        top_k,
        hidden,
        inputs: Vec::new(),
    }
}

/// Some tokens of a rank.
pub fn select(problem: &Problem, input: &RankInput, tokens: &[usize]) -> RankInput {
    fn pick<T: Copy>(values: &[T], width: usize, tokens: &[usize]) -> Vec<T> {
        let mut picked = Vec::with_capacity(tokens.len() * width);
        for token in tokens {
            picked.extend_from_slice(&values[token * width..(token + 1) * width]);
        }
        picked
    }
    RankInput {
        tokens: tokens.len(),
        x: pick(&input.x, problem.hidden, tokens),
        topk_ids: pick(&input.topk_ids, problem.top_k, tokens),
        topk_weights: pick(&input.topk_weights, problem.top_k, tokens),
    }
}

fn upload(device: &CudaDevice, input: &RankInput) -> Result<Uploaded> {
    let put = |bytes: &[u8]| -> Result<DevicePtr> {
        let at = device.alloc(bytes.len().max(16) as u64)?;
        device.upload(at, bytes)?;
        Ok(at)
    };
    Ok(Uploaded {
        x: put(bytemuck::cast_slice::<bf16, u8>(&input.x))?,
        topk_ids: put(bytemuck::cast_slice(&input.topk_ids))?,
        topk_weights: put(bytemuck::cast_slice(&input.topk_weights))?,
    })
}

/// Where a rank's results go.
pub struct Outputs {
    device: Arc<CudaDevice>,
    /// Of dispatch.
    pub dispatch: DispatchOutput,
    /// What combine takes: the dispatched rows, unless they are FP8.
    pub expert_rows: Tensor<2>,
    /// Of combine.
    pub combined: Tensor<2>,
    owned: Vec<(DevicePtr, u64)>,
}

impl Outputs {
    /// Allocates them for `tokens` tokens and `capacity` rows.
    pub fn new(
        device: &Arc<CudaDevice>,
        plan: &Plan,
        tokens: usize,
        space: Capacity,
    ) -> Result<Self> {
        let (config, mut owned) = (plan.config(), Vec::new());
        let mut put = |bytes: usize| -> Result<DevicePtr> {
            let at = device.alloc(bytes.max(16) as u64)?;
            owned.push((at, bytes as u64));
            Ok(at)
        };
        let (hidden, local) = (config.hidden, plan.local_experts());
        let (format, capacity) = (config.format, space.rows);
        let is_bf16 = format == TokenFormat::Bf16;
        let rows = put(capacity * formats::row_bytes(format, hidden))?;
        let scales = put(formats::scales_bytes(format, hidden, space))?;
        let offsets = put(4 * local)?;
        let row_scales = put(2 * capacity)?;
        let dispatch = DispatchOutput {
            tokens: Tensor::contiguous(rows, [capacity, hidden]),
            scales: formats::scale_tensor(format, hidden, space, (scales, offsets, local)),
            row_scales: (format.sizes().has_row_scale)
                .then(|| Tensor::contiguous(row_scales, [capacity])),
            row_offsets: Tensor::contiguous(put((local + 1) * 4)?, [local + 1]),
            expert_ids: Tensor::contiguous(put(local * 4)?, [local]),
            src_info: Tensor::contiguous(put(capacity * 8)?, [capacity, 2]),
        };
        let expert_rows = match is_bf16 {
            true => dispatch.tokens,
            false => Tensor::contiguous(put(capacity * hidden * 2)?, [capacity, hidden]),
        };
        let combined = Tensor::contiguous(put(tokens * hidden * 2)?, [tokens, hidden]);
        Ok(Self {
            device: device.clone(),
            dispatch,
            expert_rows,
            combined,
            owned,
        })
    }

    /// Makes every byte of what the kernels write `value`.
    pub fn poison(&self, value: u8) -> Result<()> {
        for &(at, bytes) in self
            .owned
            .iter()
            .filter(|(at, _)| *at != self.separate_rows())
        {
            self.device.fill(at, value, bytes)?;
        }
        Ok(())
    }

    /// The expert rows, if they are not dispatch's output.
    fn separate_rows(&self) -> DevicePtr {
        match self.dispatch.scales {
            Some(_) => self.expert_rows.at,
            None => DevicePtr::NULL,
        }
    }

    /// What combine takes and gives.
    pub fn combine(
        &self,
        input: &DispatchInput,
        mode: CombineMode,
    ) -> (CombineInput, CombineOutput) {
        let weights = match mode {
            CombineMode::Reduced => None,
            CombineMode::Exact => input.topk_weights,
        };
        let rows = CombineInput {
            expert_rows: self.expert_rows,
            topk_weights: weights,
        };
        (
            rows,
            CombineOutput {
                combined: CombineTensor::Summed(self.combined),
            },
        )
    }

    /// Frees them.
    pub fn free(self) -> Result<()> {
        for (at, _) in self.owned {
            // SAFETY: its only user, a rank that is being closed, has synchronised.
            unsafe { self.device.free(at) }?;
        }
        Ok(())
    }
}
