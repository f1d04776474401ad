//! One rank of a session: its communicator, its stream, its tensors.

use std::sync::Arc;

use bytemuck::Pod;
use ferry::{
    CombineEpilogue, CombineInput, CombineMode, CombineOutput, CombineSteps, Communicator, Config,
    DataType, Device, DevicePtr, DispatchBuffers, DispatchInput, DispatchOutput, Error, Plan, Rank,
    Stream, Tensor, TensorElement, TokenFormat,
};
use ferry_reference::{Problem, bf16};

use super::{Settings, Turn};
use crate::formats::INPUT_SCALE;
use crate::halves::Tensors;
use crate::verify::{POISON, Placement, RankOutputs, Received, download};

/// The inputs of one problem on a rank.
#[derive(Clone, Copy)]
struct Slot {
    x: DevicePtr,
    topk_ids: DevicePtr,
    topk_weights: DevicePtr,
    tokens: usize,
}

/// A rank that this process drives.
pub(super) struct LocalRank {
    rank: Rank,
    device: Arc<dyn Device>,
    plan: Plan,
    pub(super) stream: Stream,
    slots: Vec<Slot>,
    /// Places for results, as many as slots.
    combined: Vec<DevicePtr>,
    /// Those of `buffers`.
    output: DispatchOutput,
    buffers: DispatchBuffers,
    /// f32 `[1]`.
    input_scale: DevicePtr,
    /// u32 `[1]`: the tokens of the inputs that were uploaded last.
    count: DevicePtr,
    /// Whether the device says how many tokens there are.
    pub(super) is_counted: bool,
    expert_rows: DevicePtr,
    /// Whether dispatch is given the router's weights.
    pub(super) gives_weights: bool,
    /// f32 `[capacity]`: the weights of the experts' rows, where combine is given them.
    row_weights: Option<DevicePtr>,
    /// BF16 `[tokens, hidden]`: what combine adds, if there is something.
    residual: Option<DevicePtr>,
}

/// Rows that a token's result has.
fn rows_of_a_token(config: &Config, weights: bool) -> usize {
    match config.combine {
        CombineMode::Exact if !weights => config.top_k,
        _ => 1,
    }
}

/// Bytes of a place for a result: the largest there can be, and a row that nothing may write.
fn place_bytes(config: &Config) -> usize {
    (config.max_tokens_per_rank * rows_of_a_token(config, false) + 1) * 2 * config.hidden
}

impl LocalRank {
    pub(super) fn new(ep: &Communicator, settings: &Settings, slots: usize) -> Result<Self, Error> {
        let Settings {
            config, capacity, ..
        } = *settings;
        let device = ep.device().clone();
        // A tensor without rows has an address, too.
        let alloc = |bytes: usize| device.alloc(bytes.max(16) as u64);
        let Config {
            top_k,
            hidden,
            max_tokens_per_rank: most,
            ..
        } = config;
        let slot = || -> Result<Slot, Error> {
            Ok(Slot {
                x: alloc(most * hidden * 2)?,
                topk_ids: alloc(most * top_k * 4)?,
                topk_weights: alloc(most * top_k * 4)?,
                tokens: 0,
            })
        };
        let buffers = DispatchBuffers::with_capacity(&device, ep.plan(), capacity)?;
        let input_scale = alloc(4)?;
        device.upload(input_scale, &INPUT_SCALE.to_le_bytes())?;
        Ok(Self {
            stream: device.stream()?,
            slots: (0..slots).map(|_| slot()).collect::<Result<_, _>>()?,
            combined: (0..slots)
                .map(|_| alloc(place_bytes(&config)))
                .collect::<Result<_, _>>()?,
            output: *buffers.output(),
            buffers,
            input_scale,
            count: alloc(4)?,
            is_counted: false,
            expert_rows: alloc(capacity.rows * hidden * 2)?,
            gives_weights: true,
            row_weights: None,
            residual: None,
            rank: ep.rank(),
            plan: *ep.plan(),
            device,
        })
    }

    pub(super) fn rank(&self) -> usize {
        self.rank.0 as usize
    }

    pub(super) fn upload(&mut self, slot: usize, problem: &Problem) -> Result<(), Error> {
        let input = &problem.inputs[self.rank()];
        let slot = &mut self.slots[slot];
        slot.tokens = input.tokens;
        let device = &self.device;
        device.upload(self.count, &(input.tokens as u32).to_le_bytes())?;
        device.upload(slot.x, bytemuck::cast_slice(&input.x))?;
        device.upload(slot.topk_ids, bytemuck::cast_slice(&input.topk_ids))?;
        device.upload(slot.topk_weights, bytemuck::cast_slice(&input.topk_weights))
    }

    pub(super) fn set_input_scale(&self, scale: f32) -> Result<(), Error> {
        let bytes = scale.to_le_bytes();
        self.device.upload(self.input_scale, &bytes)
    }

    /// Makes every output byte the poison.
    pub(super) fn poison(&self, settings: &Settings) -> Result<(), Error> {
        self.buffers.fill(POISON)?;
        let bytes = place_bytes(&settings.config) as u64;
        let mut combined = self.combined.iter();
        combined.try_for_each(|&at| self.device.fill(at, POISON, bytes))
    }

    /// Rows that the tensors of a slot have.
    fn rows(&self, slot: usize) -> usize {
        match self.is_counted {
            true => self.plan.config().max_tokens_per_rank,
            false => self.slots[slot].tokens,
        }
    }

    fn input(&self, slot: usize) -> DispatchInput {
        let Config { top_k, hidden, .. } = *self.plan.config();
        let Slot {
            x,
            topk_ids,
            topk_weights,
            ..
        } = self.slots[slot];
        let tokens = self.rows(slot);
        DispatchInput {
            tokens_on_device: (self.is_counted)
                .then(|| Tensor::contiguous(self.count, DataType::U32, [1])),
            topk_weights: (self.gives_weights)
                .then(|| Tensor::contiguous(topk_weights, DataType::F32, [tokens, top_k])),
            input_scale: matches!(self.plan.config().format, TokenFormat::Nvfp4(_))
                .then(|| Tensor::contiguous(self.input_scale, DataType::F32, [1])),
            ..DispatchInput::new(
                Tensor::contiguous(x, DataType::Bf16, [tokens, hidden]),
                Tensor::contiguous(topk_ids, DataType::I32, [tokens, top_k]),
            )
        }
    }

    pub(super) fn inputs(&self, slot: usize) -> [(DevicePtr, usize); 4] {
        let (config, slot) = (self.plan.config(), &self.slots[slot]);
        [
            (slot.x, slot.tokens * config.hidden * 2),
            (slot.topk_ids, slot.tokens * config.top_k * 4),
            (slot.topk_weights, slot.tokens * config.top_k * 4),
            (self.input_scale, 4),
        ]
    }

    pub(super) fn written(&self, settings: &Settings) -> Vec<(DevicePtr, usize)> {
        let combined = (
            self.combined[Turn::FIRST.into],
            place_bytes(&settings.config),
        );
        let outputs = self.buffers.memory().iter();
        let outputs = outputs.map(|&at| (at, at.bytes() as usize));
        outputs.chain([combined]).collect()
    }

    pub(super) fn expert_rows(&self, settings: &Settings) -> (DevicePtr, usize) {
        let bytes = settings.capacity.rows * settings.config.hidden * 2;
        (self.expert_rows, bytes)
    }

    /// The tensors of a [first](Turn::FIRST) round whose experts' rows the host puts there.
    pub(super) fn tensors(&self, weights: bool) -> Tensors {
        self.tensors_with(Turn::FIRST, self.expert_rows, weights)
    }

    /// The tensors of a round whose experts return their rows as they arrived.
    pub(super) fn identity(&self, turn: Turn) -> Tensors {
        self.tensors_with(turn, self.output.tokens.at, true)
    }

    /// The tensors of a round; combine reads the rows at `expert_rows`.
    fn tensors_with(&self, turn: Turn, expert_rows: DevicePtr, weights: bool) -> Tensors {
        let Config {
            top_k,
            hidden,
            combine,
            ..
        } = *self.plan.config();
        let Slot { topk_weights, .. } = self.slots[turn.slot];
        let tokens = self.rows(turn.slot);
        let combined = self.combined[turn.into];
        let exact = combine == CombineMode::Exact;
        let capacity = self.output.tokens.dims[0];
        let residual = self.residual.map(|at| CombineSteps {
            residual: Some(Tensor::contiguous(at, DataType::Bf16, [tokens, hidden])),
            ..CombineSteps::default()
        });
        let expert_rows = CombineInput {
            epilogue: residual.map_or(CombineEpilogue::None, CombineEpilogue::Steps),
            row_weights: (self.row_weights)
                .map(|at| Tensor::contiguous(at, DataType::F32, [capacity])),
            topk_weights: (exact && weights)
                .then(|| Tensor::contiguous(topk_weights, DataType::F32, [tokens, top_k])),
            ..CombineInput::new(Tensor::contiguous(
                expert_rows,
                DataType::Bf16,
                [capacity, hidden],
            ))
        };
        let combined = if exact && !weights {
            CombineOutput::Apart(Tensor::contiguous(
                combined,
                DataType::Bf16,
                [tokens, top_k, hidden],
            ))
        } else {
            CombineOutput::Summed(Tensor::contiguous(
                combined,
                DataType::Bf16,
                [tokens, hidden],
            ))
        };
        Tensors {
            input: self.input(turn.slot),
            output: self.output,
            expert_rows,
            combined,
        }
    }

    /// The stand-in for the experts, on BF16 rows as they arrived. `shared`: the shared expert's factor.
    pub(super) fn run_experts(&self, scale: &[f32], shared: Option<f32>) -> Result<(), Error> {
        let hidden = self.plan.config().hidden;
        let offsets: Vec<u32> = self.words(self.output.row_offsets)?;
        let mut rows: Vec<bf16> = self.words(self.output.tokens)?;
        let first = self.rank() * self.plan.local_experts();
        let factors = shared.iter().chain(&scale[first..]);
        for (pair, factor) in offsets.windows(2).zip(factors) {
            let rows = rows.get_mut(pair[0] as usize * hidden..pair[1] as usize * hidden);
            for x in rows.into_iter().flatten() {
                *x = ferry_reference::round_to_bf16(x.to_f32() * factor);
            }
        }
        self.upload_expert_rows(&rows)
    }

    /// The stand-in for the experts where rows stand as `placement` says.
    pub(super) fn answer(
        &self,
        problem: &Problem,
        scale: &[f32],
        placement: &Placement,
    ) -> Result<(), Error> {
        let rows = self.output.tokens.dims[0];
        let answers = placement.expert_rows(problem, scale, self.rank(), rows);
        self.upload_expert_rows(&answers)
    }

    fn upload_expert_rows(&self, rows: &[bf16]) -> Result<(), Error> {
        let bytes = bytemuck::cast_slice(rows);
        self.device.upload(self.expert_rows, bytes)
    }

    /// Gives combines from now on the router's weights of the experts' rows.
    pub(super) fn give_row_weights(
        &mut self,
        problem: &Problem,
        placement: &Placement,
    ) -> Result<(), Error> {
        let rows = self.output.tokens.dims[0];
        let weights = placement.row_weights(problem, rows);
        self.row_weights = Some(self.put(self.row_weights, &weights)?);
        Ok(())
    }

    /// Gives combines from now on rows that are added to the results.
    pub(super) fn give_residual(&mut self, rows: &[bf16]) -> Result<(), Error> {
        self.residual = Some(self.put(self.residual, rows)?);
        Ok(())
    }

    /// Uploads values in place of as many, or to memory of their own.
    fn put<T: Pod>(&self, place: Option<DevicePtr>, values: &[T]) -> Result<DevicePtr, Error> {
        let (device, bytes) = (&self.device, bytemuck::cast_slice(values));
        let at = match place {
            Some(at) => at,
            None => device.alloc(bytes.len().max(16) as u64)?,
        };
        device.upload(at, bytes)?;
        Ok(at)
    }

    pub(super) fn outputs(&self, weights: bool) -> Result<RankOutputs, Error> {
        let format = self.plan.config().format;
        Ok(RankOutputs {
            rank: self.rank(),
            received: Received::download(&*self.device, &self.output, format)?,
            combined: self.combined(Turn::FIRST, weights)?,
            beyond: self.beyond(weights)?,
        })
    }

    /// What a turn's combine gave.
    pub(super) fn combined(&self, turn: Turn, weights: bool) -> Result<Vec<bf16>, Error> {
        let config = self.plan.config();
        let rows = self.slots[turn.slot].tokens * rows_of_a_token(config, weights);
        let at = self.combined[turn.into];
        download(&*self.device, at, rows * config.hidden)
    }

    /// The row behind the last one of the first turn's result.
    fn beyond(&self, weights: bool) -> Result<Vec<u8>, Error> {
        let config = self.plan.config();
        let rows = self.slots[Turn::FIRST.slot].tokens * rows_of_a_token(config, weights);
        let bytes = 2 * config.hidden;
        let at = self.combined[Turn::FIRST.into].plus((rows * bytes) as u64);
        download(&*self.device, at, bytes)
    }

    fn words<T: TensorElement, const N: usize>(&self, tensor: Tensor<N>) -> Result<Vec<T>, Error> {
        self.device.download_tensor(&tensor)
    }

    pub(super) fn free(&self) -> Result<(), Error> {
        let slots = self
            .slots
            .iter()
            .flat_map(|s| [s.x, s.topk_ids, s.topk_weights])
            .chain(self.combined.iter().copied());
        let outputs = self.buffers.memory().iter().copied();
        let mut all = slots
            .chain(outputs)
            .chain([self.expert_rows, self.input_scale, self.count])
            .chain(self.row_weights)
            .chain(self.residual);
        // SAFETY: the session is being closed: its rounds were waited for.
        all.try_for_each(|at| unsafe { self.device.free(at) })
    }
}
