//! One rank of a session: its communicator, its stream, its tensors.

use bytemuck::Pod;
use ferry::{
    CombineInput, CombineMode, CombineOutput, CombineTensor, Config, DevicePtr, DispatchInput,
    DispatchOutput, Error, ExpertParallel, ScaleTensor, Stream, Tensor, TokenFormat, Unfinished,
};
use ferry_reference::{Dispatched, Problem, apply_expert_scale, bf16};

use super::{POISON, RankOutputs, Settings, Turn};
use crate::formats::{self, INPUT_SCALE};

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
    pub(super) ep: ExpertParallel,
    pub(super) stream: Stream,
    slots: Vec<Slot>,
    /// Places for results, as many as slots.
    combined: Vec<DevicePtr>,
    pub(super) output: DispatchOutput,
    /// f32 `[1]`.
    input_scale: DevicePtr,
    /// All of dispatch's outputs, and their bytes.
    written: Vec<(DevicePtr, usize)>,
    expert_rows: DevicePtr,
    /// Whether dispatch is given the router's weights.
    pub(super) gives_weights: bool,
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
    pub(super) fn new(
        ep: ExpertParallel,
        settings: &Settings,
        slots: usize,
    ) -> Result<Self, Error> {
        let Settings {
            config,
            capacity: space,
            ..
        } = *settings;
        let capacity = space.rows;
        let (device, local) = (ep.device().clone(), ep.plan().local_experts());
        // One row more than asked for: a tensor without rows has an address, too.
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
        let mut written = Vec::new();
        let mut put = |bytes: usize| -> Result<DevicePtr, Error> {
            let at = alloc(bytes)?;
            written.push((at, bytes));
            Ok(at)
        };
        let format = config.format;
        let tokens = put(capacity * formats::row_bytes(format, hidden))?;
        let scales = put(formats::scales_bytes(format, hidden, space))?;
        let offsets = put(4 * local)?;
        let row_scales = put(2 * capacity)?;
        let output = DispatchOutput {
            tokens: Tensor::contiguous(tokens, [capacity, hidden]),
            scales: formats::scale_tensor(format, hidden, space, (scales, offsets, local)),
            row_scales: (format.sizes().has_row_scale)
                .then(|| Tensor::contiguous(row_scales, [capacity])),
            row_offsets: Tensor::contiguous(put((local + 1) * 4)?, [local + 1]),
            expert_ids: Tensor::contiguous(put(local * 4)?, [local]),
            src_info: Tensor::contiguous(put(capacity * 8)?, [capacity, 2]),
        };
        let input_scale = alloc(4)?;
        device.upload(input_scale, &INPUT_SCALE.to_le_bytes())?;
        Ok(Self {
            stream: device.stream()?,
            slots: (0..slots).map(|_| slot()).collect::<Result<_, _>>()?,
            combined: (0..slots)
                .map(|_| alloc(place_bytes(&config)))
                .collect::<Result<_, _>>()?,
            output,
            input_scale,
            written,
            expert_rows: alloc(capacity * hidden * 2)?,
            gives_weights: true,
            ep,
        })
    }

    pub(super) fn rank(&self) -> usize {
        self.ep.rank().0 as usize
    }

    pub(super) fn upload(&mut self, slot: usize, problem: &Problem) -> Result<(), Error> {
        let input = &problem.inputs[self.rank()];
        let slot = &mut self.slots[slot];
        slot.tokens = input.tokens;
        let device = self.ep.device();
        device.upload(slot.x, bytemuck::cast_slice(&input.x))?;
        device.upload(slot.topk_ids, bytemuck::cast_slice(&input.topk_ids))?;
        device.upload(slot.topk_weights, bytemuck::cast_slice(&input.topk_weights))
    }

    pub(super) fn set_input_scale(&self, scale: f32) -> Result<(), Error> {
        let bytes = scale.to_le_bytes();
        self.ep.device().upload(self.input_scale, &bytes)
    }

    /// Makes every output byte the poison.
    pub(super) fn poison(&self, settings: &Settings) -> Result<(), Error> {
        let config = &settings.config;
        let dispatched = self.written.iter().copied();
        let combined = self.combined.iter().map(|&at| (at, place_bytes(config)));
        let mut all = dispatched.chain(combined);
        all.try_for_each(|(at, bytes)| self.ep.device().fill(at, POISON, bytes as u64))
    }

    pub(super) fn input(&self, slot: usize) -> DispatchInput {
        let Config { top_k, hidden, .. } = *self.ep.plan().config();
        let Slot {
            x,
            topk_ids,
            topk_weights,
            tokens,
        } = self.slots[slot];
        DispatchInput {
            x: Tensor::contiguous(x, [tokens, hidden]),
            topk_ids: Tensor::contiguous(topk_ids, [tokens, top_k]),
            topk_weights: (self.gives_weights)
                .then(|| Tensor::contiguous(topk_weights, [tokens, top_k])),
            input_scale: matches!(self.ep.plan().config().format, TokenFormat::Nvfp4(_))
                .then(|| Tensor::contiguous(self.input_scale, [1])),
        }
    }

    pub(super) fn inputs(&self, slot: usize) -> [(DevicePtr, usize); 4] {
        let Config { top_k, hidden, .. } = *self.ep.plan().config();
        let Slot {
            x,
            topk_ids,
            topk_weights,
            tokens,
        } = self.slots[slot];
        [
            (x, tokens * hidden * 2),
            (topk_ids, tokens * top_k * 4),
            (topk_weights, tokens * top_k * 4),
            (self.input_scale, 4),
        ]
    }

    pub(super) fn written(&self, settings: &Settings) -> Vec<(DevicePtr, usize)> {
        let combined = (
            self.combined[Turn::FIRST.into],
            place_bytes(&settings.config),
        );
        self.written.iter().copied().chain([combined]).collect()
    }

    pub(super) fn expert_rows(&self, settings: &Settings) -> (DevicePtr, usize) {
        let bytes = settings.capacity.rows * settings.config.hidden * 2;
        (self.expert_rows, bytes)
    }

    /// What combine takes and gives; `expert_rows` is where the rows lie.
    pub(super) fn combine_tensors(
        &self,
        turn: Turn,
        expert_rows: DevicePtr,
        weights: bool,
    ) -> (CombineInput, CombineOutput) {
        let Config {
            top_k,
            hidden,
            combine,
            ..
        } = *self.ep.plan().config();
        let Slot {
            topk_weights,
            tokens,
            ..
        } = self.slots[turn.slot];
        let combined = self.combined[turn.into];
        let exact = combine == CombineMode::Exact;
        let capacity = self.output.tokens.dims[0];
        let input = CombineInput {
            expert_rows: Tensor::contiguous(expert_rows, [capacity, hidden]),
            topk_weights: (exact && weights)
                .then(|| Tensor::contiguous(topk_weights, [tokens, top_k])),
        };
        let combined = if exact && !weights {
            CombineTensor::Apart(Tensor::contiguous(combined, [tokens, top_k, hidden]))
        } else {
            CombineTensor::Summed(Tensor::contiguous(combined, [tokens, hidden]))
        };
        (input, CombineOutput { combined })
    }

    pub(super) fn start_dispatch(&mut self, split: bool) -> Result<(), Error> {
        let (input, output, stream) = (self.input(0), self.output, self.stream);
        if split {
            drop(self.ep.dispatch_async(stream, &input)?);
        } else {
            drop(self.ep.dispatch(stream, &input, &output)?);
        }
        Ok(())
    }

    pub(super) fn start_combine(&mut self, split: bool, weights: bool) -> Result<(), Error> {
        let stream = self.stream;
        let (input, output) = self.combine_tensors(Turn::FIRST, self.expert_rows, weights);
        let Unfinished::Combine(dispatched) = self.ep.unfinished() else {
            return Err(Error::DispatchNotWaited);
        };
        if split {
            drop(dispatched.combine_async(stream, &input, &output)?);
            return Ok(());
        }
        dispatched.combine(stream, &input, &output).map(drop)
    }

    /// The waiting half of what was split.
    pub(super) fn finish_half(&mut self) -> Result<(), Error> {
        let (output, stream) = (self.output, self.stream);
        match self.ep.unfinished() {
            Unfinished::DispatchWait(sent) => sent.wait(stream, &output).map(drop),
            Unfinished::CombineWait(returned) => returned.wait(stream).map(drop),
            Unfinished::Nothing | Unfinished::Combine(_) => Ok(()),
        }
    }

    pub(super) fn launch_identity(&mut self, turn: Turn) -> Result<(), Error> {
        let (input, output, stream) = (self.input(turn.slot), self.output, self.stream);
        let (rows, combined) = self.combine_tensors(turn, output.tokens.at, true);
        let dispatched = self.ep.dispatch(stream, &input, &output)?;
        dispatched.combine(stream, &rows, &combined).map(drop)
    }

    /// The stand-in for the experts, on the rows as they arrived, or by what they answer.
    pub(super) fn run_experts(
        &self,
        (scale, answers): (&[f32], Option<&Answers>),
        settings: &Settings,
    ) -> Result<(), Error> {
        let (config, capacity) = (settings.config, settings.capacity.rows);
        let local = self.ep.plan().local_experts();
        let offsets: Vec<u32> = self.words(self.output.row_offsets.at, local + 1)?;
        let Some(answers) = answers else {
            let tokens = self.output.tokens.at;
            let mut rows: Vec<bf16> = self.words(tokens, capacity * config.hidden)?;
            for (expert, pair) in offsets.windows(2).enumerate() {
                let factor = scale[self.rank() * local + expert];
                let rows = rows
                    .get_mut(pair[0] as usize * config.hidden..pair[1] as usize * config.hidden);
                for x in rows.into_iter().flatten() {
                    *x = ferry_reference::round_to_bf16(x.to_f32() * factor);
                }
            }
            return self.upload_expert_rows(&rows);
        };
        let mut rows = vec![bf16::NAN; capacity * config.hidden];
        let starts = &answers.dispatched[self.rank()].row_offsets;
        for (pair, &start) in starts.windows(2).zip(&offsets) {
            let (from, to) = (
                pair[0] as usize * config.hidden,
                pair[1] as usize * config.hidden,
            );
            let start = start as usize * config.hidden;
            if let Some(rows) = rows.get_mut(start..start + to - from) {
                rows.copy_from_slice(&answers.rows[self.rank()][from..to]);
            }
        }
        self.upload_expert_rows(&rows)
    }

    fn upload_expert_rows(&self, rows: &[bf16]) -> Result<(), Error> {
        let bytes = bytemuck::cast_slice(rows);
        self.ep.device().upload(self.expert_rows, bytes)
    }

    pub(super) fn outputs(&self, settings: &Settings, weights: bool) -> Result<RankOutputs, Error> {
        let (config, space) = (&settings.config, settings.capacity);
        let (format, hidden, capacity) = (config.format, config.hidden, space.rows);
        let output = &self.output;
        let info = self.words(output.src_info.at, capacity)?;
        let (scales, offsets) = match output.scales {
            None => (Vec::new(), Vec::new()),
            Some(ScaleTensor::Transposed(scales) | ScaleTensor::RowMajor(scales)) => {
                let bytes = formats::scales_bytes(format, hidden, space);
                (self.words(scales.at, bytes)?, Vec::new())
            }
            Some(ScaleTensor::Tiled { scales, offsets }) => (
                self.words(scales.at, scales.elements())?,
                self.words(offsets.at, offsets.elements())?,
            ),
        };
        let row_scales = output.row_scales.map(|scales| {
            let count = scales.elements();
            self.words(scales.at, count)
        });
        Ok(RankOutputs {
            rank: self.rank(),
            tokens: self.words(
                output.tokens.at,
                capacity * formats::row_bytes(format, hidden),
            )?,
            scales,
            scales_offsets: offsets,
            row_scales: row_scales.transpose()?.unwrap_or_default(),
            row_offsets: self.words(output.row_offsets.at, output.row_offsets.elements())?,
            expert_ids: self.words(output.expert_ids.at, output.expert_ids.elements())?,
            src_info: info,
            combined: self.combined(Turn::FIRST, weights)?,
            beyond: self.beyond(weights)?,
        })
    }

    /// What a turn's combine gave.
    pub(super) fn combined(&self, turn: Turn, weights: bool) -> Result<Vec<bf16>, Error> {
        let config = self.ep.plan().config();
        let rows = self.slots[turn.slot].tokens * rows_of_a_token(config, weights);
        let at = self.combined[turn.into];
        self.words(at, rows * config.hidden)
    }

    /// The row behind the last one of the first turn's result.
    fn beyond(&self, weights: bool) -> Result<Vec<u8>, Error> {
        let config = self.ep.plan().config();
        let rows = self.slots[Turn::FIRST.slot].tokens * rows_of_a_token(config, weights);
        let bytes = 2 * config.hidden;
        let at = self.combined[Turn::FIRST.into].plus((rows * bytes) as u64);
        self.words(at, bytes)
    }

    /// `count` words on the device, whose bytes are in the host's order.
    fn words<T: Pod>(&self, at: DevicePtr, count: usize) -> Result<Vec<T>, Error> {
        let mut words = vec![T::zeroed(); count];
        let bytes = bytemuck::cast_slice_mut(&mut words);
        self.ep.device().download(at, bytes)?;
        Ok(words)
    }

    pub(super) fn free(&self) -> Result<(), Error> {
        let slots = self
            .slots
            .iter()
            .flat_map(|s| [s.x, s.topk_ids, s.topk_weights])
            .chain(self.combined.iter().copied());
        let outputs = self.written.iter().map(|&(at, _)| at);
        let mut all = slots
            .chain(outputs)
            .chain([self.expert_rows, self.input_scale]);
        // SAFETY: the session is being closed: its rounds were waited for.
        all.try_for_each(|at| unsafe { self.ep.device().free(at) })
    }
}

/// What the experts answer where they can not be given what arrived: they get BF16 only after a matrix
/// multiplication.
pub(super) struct Answers {
    dispatched: Vec<Dispatched>,
    /// Of every rank, as the oracle has it.
    rows: Vec<Vec<bf16>>,
}

impl Answers {
    /// The oracle's.
    pub(super) fn of(problem: &Problem, scale: &[f32]) -> Self {
        let dispatched = ferry_reference::dispatch(problem);
        let rows = apply_expert_scale(problem, &dispatched, scale);
        Self { dispatched, rows }
    }
}
