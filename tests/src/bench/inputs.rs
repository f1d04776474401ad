//! The tensors of a run: inputs that are made once, and outputs for each number of tokens.

use std::sync::Arc;

use anyhow::Result;
use ferry::cuda::CudaDevice;
use ferry::{
    Capacity, CombineBuffers, CombineEpilogue, CombineInput, CombineMode, CombineOutput,
    CombineSteps, DataType, Device, DevicePtr, DispatchBuffers, DispatchInput, Error, Plan, Tensor,
    TokenFormat,
};
use ferry_reference::workload::{WorkloadSpec, generate};
use ferry_reference::{Problem, RankInput, bf16};

use super::options::BenchArgs;
use crate::formats;

use super::rig::Rig;
use super::round_options::Options;

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
                scale_blocks: rank.iter().map(|rows| rows.div_ceil(128)).sum(),
            });
            ranks.fold(Capacity::default(), formats::larger)
        };
        let most = self.problems.iter().map(of);
        let most = most.fold(
            Capacity {
                rows: 1,
                scale_blocks: 1,
            },
            formats::larger,
        );
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
            topk_weights: Some(Tensor::contiguous(
                topk_weights,
                DataType::F32,
                [tokens, top_k],
            )),
            ..DispatchInput::new(
                Tensor::contiguous(x, DataType::Bf16, [tokens, hidden]),
                Tensor::contiguous(topk_ids, DataType::I32, [tokens, top_k]),
            )
        }
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

/// What calls give beside the tensors that every call has.
#[derive(Default)]
pub struct Extras {
    /// Of dispatch.
    pub tokens_on_device: Option<Tensor<1>>,
    /// Of combine.
    pub epilogue: CombineEpilogue,
    memory: Vec<DevicePtr>,
}

impl Extras {
    /// Those of one kind of options.
    pub fn new(
        device: &CudaDevice,
        options: Options,
        tokens: usize,
        hidden: usize,
    ) -> Result<Self> {
        let mut extras = Self::default();
        let mut put = |bytes: &[u8]| -> Result<DevicePtr> {
            let at = device.alloc(bytes.len() as u64)?;
            device.upload(at, bytes)?;
            extras.memory.push(at);
            Ok(at)
        };
        match options {
            Options::None | Options::Loaded | Options::SharedExpert => {}
            Options::TokensOnDevice => {
                let count = put(&(tokens as u32).to_le_bytes())?;
                extras.tokens_on_device = Some(Tensor::contiguous(count, DataType::U32, [1]));
            }
            Options::Steps => {
                let bias = put(&vec![0; 2 * hidden])?;
                let residual = put(&vec![0; 2 * tokens * hidden])?;
                extras.epilogue = CombineEpilogue::Steps(CombineSteps {
                    biases: [
                        Some(Tensor::contiguous(bias, DataType::Bf16, [hidden])),
                        None,
                    ],
                    residual: Some(Tensor::contiguous(
                        residual,
                        DataType::Bf16,
                        [tokens, hidden],
                    )),
                    ..CombineSteps::default()
                });
            }
        }
        Ok(extras)
    }

    /// Frees them.
    pub fn free(self, device: &CudaDevice) -> Result<()> {
        for at in self.memory {
            // SAFETY: their only user, a rank that is being closed, has synchronised.
            unsafe { device.free(at) }?;
        }
        Ok(())
    }
}

/// Where a rank's results go.
pub struct Outputs {
    device: Arc<CudaDevice>,
    /// Of dispatch.
    pub dispatch: DispatchBuffers,
    /// What combine takes: the dispatched rows, unless they are encoded.
    pub expert_rows: Tensor<2>,
    /// Of combine.
    pub combined: CombineBuffers,
}

impl Outputs {
    /// Allocates them for rounds of `plan`, with `capacity` for what arrives.
    pub fn new(device: &Arc<CudaDevice>, plan: &Plan, capacity: Capacity) -> Result<Self> {
        let shared: Arc<dyn Device> = device.clone();
        let dispatch = DispatchBuffers::with_capacity(&shared, plan, capacity)?;
        let dims = [capacity.rows, plan.config().hidden];
        let expert_rows = match plan.config().format {
            TokenFormat::Bf16 => dispatch.output().tokens,
            _ => Tensor::contiguous(
                device.alloc(2 * (dims[0] * dims[1]) as u64)?,
                DataType::Bf16,
                dims,
            ),
        };
        Ok(Self {
            combined: CombineBuffers::new(&shared, plan)?,
            device: device.clone(),
            dispatch,
            expert_rows,
        })
    }

    /// Makes every byte of what the kernels write `value`.
    pub fn poison(&self, value: u8) -> Result<()> {
        self.dispatch.fill(value)?;
        Ok(self.combined.fill(value)?)
    }

    /// What combine takes and gives.
    pub fn combine(
        &self,
        input: &DispatchInput,
        mode: CombineMode,
    ) -> Result<(CombineInput, CombineOutput), Error> {
        let rows = CombineInput {
            topk_weights: match mode {
                CombineMode::Reduced => None,
                CombineMode::Exact => input.topk_weights,
            },
            ..CombineInput::new(self.expert_rows)
        };
        Ok((rows, self.combined.output(input.x.dims[0])?))
    }

    /// Frees them.
    pub fn free(self) -> Result<()> {
        let separate = self.expert_rows != self.dispatch.output().tokens;
        // SAFETY: their only user, a rank that is being closed, has synchronised.
        unsafe {
            if separate {
                self.device.free(self.expert_rows.at)?;
            }
            self.dispatch.free()?;
            Ok(self.combined.free()?)
        }
    }
}
