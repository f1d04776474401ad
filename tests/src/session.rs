//! A session: the ranks of a group that this process drives, their tensors, and rounds on them.

use std::time::{Duration, Instant};

use ferry::{
    CombineInput, CombineMode, CombineOutput, CombineTensor, Config, DevicePtr, DispatchInput,
    DispatchOutput, Error, ExpertParallel, Group, Plan, Stream, Tensor, TokenFormat, Unfinished,
};
use ferry_reference::{Problem, apply_expert_scale, bf16};

/// What outputs hold before a round, in every byte.
pub const POISON: u8 = 0xa5;

/// What a session is made for.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Of the plan.
    pub config: Config,
    /// Rows of the dispatch's outputs.
    pub capacity: usize,
    /// Whether to make the split calls.
    pub split: bool,
}

/// What a round left on a rank.
pub struct RankOutputs {
    /// Which rank.
    pub rank: usize,
    /// `[capacity, row bytes]`, as they are.
    pub tokens: Vec<u8>,
    /// `[hidden / 128, capacity]`, if the format has scales.
    pub scales: Option<Vec<f32>>,
    /// `[local experts + 1]`.
    pub row_offsets: Vec<u32>,
    /// `[local experts]`.
    pub expert_ids: Vec<i32>,
    /// `[capacity]`.
    pub src_info: Vec<[i32; 2]>,
    /// `[tokens, hidden]` or `[tokens, top_k, hidden]`.
    pub combined: Vec<bf16>,
}

/// Wall time of a round's halves, from the first launch until every local rank is done.
#[derive(Clone, Copy, Debug, Default)]
pub struct Phases {
    /// Dispatch.
    pub dispatch: Duration,
    /// Combine.
    pub combine: Duration,
}

/// The inputs of one problem on a rank, and where its result goes.
#[derive(Clone, Copy)]
struct Slot {
    x: DevicePtr,
    topk_ids: DevicePtr,
    topk_weights: DevicePtr,
    combined: DevicePtr,
    tokens: usize,
}

struct LocalRank {
    ep: ExpertParallel,
    stream: Stream,
    slots: Vec<Slot>,
    output: DispatchOutput,
    expert_rows: DevicePtr,
}

/// The local ranks of a group at work.
pub struct Session {
    settings: Settings,
    ranks: Vec<LocalRank>,
    phases: Phases,
}

impl Session {
    /// Makes communicators and tensors. Collective.
    pub fn new(group: &Group, settings: &Settings) -> Result<Self, Error> {
        Self::with_slots(group, settings, 1)
    }

    /// The same, with room for the inputs of `slots` problems. Collective.
    pub fn with_slots(group: &Group, settings: &Settings, slots: usize) -> Result<Self, Error> {
        let plan = Plan::new(group, settings.config)?;
        let ranks = ExpertParallel::new(group, &plan)?
            .into_iter()
            .map(|ep| LocalRank::new(ep, settings, slots))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            settings: *settings,
            ranks,
            phases: Phases::default(),
        })
    }

    /// The ranks of this process.
    pub fn local_ranks(&self) -> Vec<usize> {
        self.ranks.iter().map(LocalRank::rank).collect()
    }

    /// Wall time of the last [`round`](Self::round).
    pub const fn phases(&self) -> Phases {
        self.phases
    }

    /// One round on all local ranks: uploads, dispatch, the stand-in for the experts (each row
    /// times its expert's factor in `scale`, rounded to BF16), combine; downloads everything.
    /// `weights`: in exact mode, whether combine sums with the router's weights or keeps rows
    /// apart. Synchronises. Collective.
    pub fn round(
        &mut self,
        problem: &Problem,
        scale: &[f32],
        weights: bool,
    ) -> Result<Vec<RankOutputs>, Error> {
        self.upload(0, problem)?;
        for rank in &self.ranks {
            rank.poison(self.settings.capacity, &self.settings.config)?;
        }
        let split = self.settings.split;
        let start = Instant::now();
        self.each(|rank| rank.start_dispatch(split))?;
        if split {
            self.each(LocalRank::finish_half)?;
        }
        self.synchronize()?;
        self.phases.dispatch = start.elapsed();
        for rank in &self.ranks {
            rank.run_experts(problem, scale, &self.settings)?;
        }
        let start = Instant::now();
        self.each(|rank| rank.start_combine(0, split, weights))?;
        if split {
            self.each(LocalRank::finish_half)?;
        }
        self.synchronize()?;
        self.phases.combine = start.elapsed();
        let settings = &self.settings;
        self.ranks
            .iter()
            .map(|rank| rank.outputs(settings, weights))
            .collect()
    }

    /// Puts a problem's inputs into a slot. Synchronises.
    pub fn upload(&mut self, slot: usize, problem: &Problem) -> Result<(), Error> {
        self.each(|rank| rank.upload(slot, problem))
    }

    /// Enqueues a round with experts that return what they get (BF16 only), on every local rank
    /// in the order that `order` gives, calling `before` before each. Does not synchronise.
    pub fn launch_identity(
        &mut self,
        slot: usize,
        order: &[usize],
        mut before: impl FnMut(usize),
    ) -> Result<(), Error> {
        for &index in order {
            before(index);
            self.ranks[index].launch_identity(slot)?;
        }
        Ok(())
    }

    /// What a slot's combine gave on each local rank, with the rank's number.
    pub fn combined(&self, slot: usize) -> Result<Vec<(usize, Vec<bf16>)>, Error> {
        let config = &self.settings.config;
        let of = |rank: &LocalRank| Ok((rank.rank(), rank.combined(slot, config, true)?));
        self.ranks.iter().map(of).collect()
    }

    /// Waits for all local ranks; the first fault in rank order.
    pub fn synchronize(&self) -> Result<(), Error> {
        self.ranks
            .iter()
            .try_for_each(|rank| rank.ep.synchronize(rank.stream))
    }

    /// Waits for each local rank, and what each says.
    pub fn outcomes(&self) -> Vec<(usize, Result<(), Error>)> {
        let of = |rank: &LocalRank| (rank.rank(), rank.ep.synchronize(rank.stream));
        self.ranks.iter().map(of).collect()
    }

    /// A local rank's communicator and stream, for what only one kind of device can do.
    pub fn local(&mut self, index: usize) -> (&mut ExpertParallel, Stream) {
        let rank = &mut self.ranks[index];
        (&mut rank.ep, rank.stream)
    }

    /// Enqueues a round on one local rank. See [`launch_identity`](Self::launch_identity).
    pub fn launch_identity_on(&mut self, index: usize, slot: usize) -> Result<(), Error> {
        self.ranks[index].launch_identity(slot)
    }

    /// Enqueues a round in slot 0 on one local rank, with an event before, between and after its
    /// halves.
    #[cfg(feature = "cuda")]
    pub fn launch_timed(
        &mut self,
        index: usize,
        events: Option<&[ferry::cuda::CudaEvent; 3]>,
    ) -> Result<(), Error> {
        let rank = &mut self.ranks[index];
        let (input, output, stream) = (rank.input(0), rank.output, rank.stream);
        let (rows, combined) = rank.combine_tensors(0, output.tokens.at, true);
        let record = |which: usize| match events {
            Some(events) => events[which].record(stream),
            None => Ok(()),
        };
        record(0)?;
        let dispatched = rank.ep.dispatch(stream, &input, &output)?;
        record(1)?;
        dispatched.combine(stream, &rows, &combined)?;
        record(2)
    }

    /// Frees everything. Collective.
    pub fn close(self) -> Result<(), Error> {
        for rank in &self.ranks {
            rank.free()?;
        }
        self.ranks.into_iter().try_for_each(|rank| rank.ep.close())
    }

    fn each(
        &mut self,
        mut run: impl FnMut(&mut LocalRank) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.ranks.iter_mut().try_for_each(&mut run)
    }
}

/// Bytes of a row of dispatch's output.
pub fn row_bytes(config: &Config) -> usize {
    match config.format {
        TokenFormat::Bf16 => 2 * config.hidden,
        TokenFormat::BlockwiseFp8 => config.hidden,
    }
}

impl LocalRank {
    fn new(ep: ExpertParallel, settings: &Settings, slots: usize) -> Result<Self, Error> {
        let Settings {
            config, capacity, ..
        } = *settings;
        let (device, local) = (ep.device().clone(), ep.plan().local_experts());
        // One row more than asked for: a tensor without rows has an address, too.
        let alloc = |bytes: usize| device.alloc(bytes.max(16) as u64);
        let Config {
            top_k,
            hidden,
            max_tokens_per_rank: most,
            ..
        } = config;
        let apart = if config.combine == CombineMode::Exact {
            top_k
        } else {
            1
        };
        let slot = || -> Result<Slot, Error> {
            Ok(Slot {
                x: alloc(most * hidden * 2)?,
                topk_ids: alloc(most * top_k * 4)?,
                topk_weights: alloc(most * top_k * 4)?,
                combined: alloc(most * hidden * 2 * apart)?,
                tokens: 0,
            })
        };
        let groups = hidden / 128;
        let output = DispatchOutput {
            tokens: Tensor::contiguous(alloc(capacity * row_bytes(&config))?, [capacity, hidden]),
            scales: match config.format {
                TokenFormat::Bf16 => None,
                TokenFormat::BlockwiseFp8 => Some(Tensor::contiguous(
                    alloc(groups * capacity * 4)?,
                    [groups, capacity],
                )),
            },
            row_offsets: Tensor::contiguous(alloc((local + 1) * 4)?, [local + 1]),
            expert_ids: Tensor::contiguous(alloc(local * 4)?, [local]),
            src_info: Tensor::contiguous(alloc(capacity * 8)?, [capacity, 2]),
        };
        Ok(Self {
            stream: device.stream()?,
            slots: (0..slots).map(|_| slot()).collect::<Result<_, _>>()?,
            output,
            expert_rows: alloc(capacity * hidden * 2)?,
            ep,
        })
    }

    fn rank(&self) -> usize {
        self.ep.rank().0 as usize
    }

    fn upload(&mut self, slot: usize, problem: &Problem) -> Result<(), Error> {
        let input = &problem.inputs[self.rank()];
        let slot = &mut self.slots[slot];
        slot.tokens = input.tokens;
        let device = self.ep.device();
        device.upload(slot.x, &bytes_of(&input.x, bf16::to_le_bytes))?;
        device.upload(slot.topk_ids, &bytes_of(&input.topk_ids, i32::to_le_bytes))?;
        device.upload(
            slot.topk_weights,
            &bytes_of(&input.topk_weights, f32::to_le_bytes),
        )
    }

    /// Makes every output byte the poison.
    fn poison(&self, capacity: usize, config: &Config) -> Result<(), Error> {
        let (device, output) = (self.ep.device(), &self.output);
        device.fill(
            output.tokens.at,
            POISON,
            (capacity * row_bytes(config)) as u64,
        )?;
        if let Some(scales) = output.scales {
            device.fill(scales.at, POISON, 4 * scales.elements() as u64)?;
        }
        device.fill(
            output.row_offsets.at,
            POISON,
            4 * output.row_offsets.elements() as u64,
        )?;
        device.fill(
            output.expert_ids.at,
            POISON,
            4 * output.expert_ids.elements() as u64,
        )?;
        device.fill(output.src_info.at, POISON, 8 * capacity as u64)?;
        let bytes = 2 * config.max_tokens_per_rank * config.hidden;
        device.fill(self.slots[0].combined, POISON, bytes as u64)
    }

    fn input(&self, slot: usize) -> DispatchInput {
        let Config { top_k, hidden, .. } = *self.ep.plan().config();
        let Slot {
            x,
            topk_ids,
            topk_weights,
            tokens,
            ..
        } = self.slots[slot];
        DispatchInput {
            x: Tensor::contiguous(x, [tokens, hidden]),
            topk_ids: Tensor::contiguous(topk_ids, [tokens, top_k]),
            topk_weights: Some(Tensor::contiguous(topk_weights, [tokens, top_k])),
        }
    }

    /// What combine takes and gives; `expert_rows` is where the rows lie.
    fn combine_tensors(
        &self,
        slot: usize,
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
            combined,
            tokens,
            ..
        } = self.slots[slot];
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

    fn start_dispatch(&mut self, split: bool) -> Result<(), Error> {
        let (input, output, stream) = (self.input(0), self.output, self.stream);
        if split {
            drop(self.ep.dispatch_async(stream, &input)?);
        } else {
            drop(self.ep.dispatch(stream, &input, &output)?);
        }
        Ok(())
    }

    fn start_combine(&mut self, slot: usize, split: bool, weights: bool) -> Result<(), Error> {
        let stream = self.stream;
        let (input, output) = self.combine_tensors(slot, self.expert_rows, weights);
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
    fn finish_half(&mut self) -> Result<(), Error> {
        let (output, stream) = (self.output, self.stream);
        match self.ep.unfinished() {
            Unfinished::DispatchWait(sent) => sent.wait(stream, &output).map(drop),
            Unfinished::CombineWait(returned) => returned.wait(stream).map(drop),
            Unfinished::Nothing | Unfinished::Combine(_) => Ok(()),
        }
    }

    fn launch_identity(&mut self, slot: usize) -> Result<(), Error> {
        let (input, output, stream) = (self.input(slot), self.output, self.stream);
        let (rows, combined) = self.combine_tensors(slot, output.tokens.at, true);
        let dispatched = self.ep.dispatch(stream, &input, &output)?;
        dispatched.combine(stream, &rows, &combined).map(drop)
    }

    /// The stand-in for the experts, on the rows as they arrived; in FP8 on the oracle's, since
    /// experts get BF16 only after a matrix multiplication.
    fn run_experts(
        &self,
        problem: &Problem,
        scale: &[f32],
        settings: &Settings,
    ) -> Result<(), Error> {
        let Settings {
            config, capacity, ..
        } = *settings;
        let local = self.ep.plan().local_experts();
        let offsets = self.words(self.output.row_offsets.at, local + 1, u32::from_le_bytes)?;
        let mut rows = vec![bf16::NAN; capacity * config.hidden];
        if config.format == TokenFormat::Bf16 {
            rows = self.words(
                self.output.tokens.at,
                capacity * config.hidden,
                bf16::from_le_bytes,
            )?;
            for (expert, pair) in offsets.windows(2).enumerate() {
                let factor = scale[self.rank() * local + expert];
                let rows = rows
                    .get_mut(pair[0] as usize * config.hidden..pair[1] as usize * config.hidden);
                for x in rows.into_iter().flatten() {
                    *x = ferry_reference::round_to_bf16(x.to_f32() * factor);
                }
            }
        } else {
            let dispatched = ferry_reference::dispatch(problem);
            let answers = apply_expert_scale(problem, &dispatched, scale).swap_remove(self.rank());
            let starts = &dispatched[self.rank()].row_offsets;
            for (pair, &start) in starts.windows(2).zip(&offsets) {
                let (from, to) = (
                    pair[0] as usize * config.hidden,
                    pair[1] as usize * config.hidden,
                );
                let start = start as usize * config.hidden;
                if let Some(rows) = rows.get_mut(start..start + to - from) {
                    rows.copy_from_slice(&answers[from..to]);
                }
            }
        }
        self.ep
            .device()
            .upload(self.expert_rows, &bytes_of(&rows, bf16::to_le_bytes))
    }

    fn outputs(&self, settings: &Settings, weights: bool) -> Result<RankOutputs, Error> {
        let Settings {
            config, capacity, ..
        } = settings;
        let output = &self.output;
        let info = self.words(output.src_info.at, 2 * capacity, i32::from_le_bytes)?;
        let scales = output
            .scales
            .map(|scales| self.words(scales.at, scales.elements(), f32::from_le_bytes));
        Ok(RankOutputs {
            rank: self.rank(),
            tokens: self.words(
                output.tokens.at,
                capacity * row_bytes(config),
                u8::from_le_bytes,
            )?,
            scales: scales.transpose()?,
            row_offsets: self.words(
                output.row_offsets.at,
                output.row_offsets.elements(),
                u32::from_le_bytes,
            )?,
            expert_ids: self.words(
                output.expert_ids.at,
                output.expert_ids.elements(),
                i32::from_le_bytes,
            )?,
            src_info: info.as_chunks().0.to_vec(),
            combined: self.combined(0, config, weights)?,
        })
    }

    fn combined(&self, slot: usize, config: &Config, weights: bool) -> Result<Vec<bf16>, Error> {
        let slot = &self.slots[slot];
        let apart = config.combine == CombineMode::Exact && !weights;
        let rows = slot.tokens * if apart { config.top_k } else { 1 };
        self.words(slot.combined, rows * config.hidden, bf16::from_le_bytes)
    }

    fn words<T, const B: usize>(
        &self,
        at: DevicePtr,
        count: usize,
        value: fn([u8; B]) -> T,
    ) -> Result<Vec<T>, Error> {
        let mut bytes = vec![0; count * B];
        self.ep.device().download(at, &mut bytes)?;
        Ok(bytes
            .as_chunks()
            .0
            .iter()
            .map(|&word| value(word))
            .collect())
    }

    fn free(&self) -> Result<(), Error> {
        let output = &self.output;
        let slots = self
            .slots
            .iter()
            .flat_map(|s| [s.x, s.topk_ids, s.topk_weights, s.combined]);
        let outputs = [
            output.tokens.at,
            output.row_offsets.at,
            output.expert_ids.at,
            output.src_info.at,
        ];
        let scales = output.scales.map(|scales| scales.at);
        let mut all = slots.chain(outputs).chain(scales).chain([self.expert_rows]);
        all.try_for_each(|at| self.ep.device().free(at))
    }
}

fn bytes_of<T: Copy, const B: usize>(values: &[T], bytes: fn(T) -> [u8; B]) -> Vec<u8> {
    values.iter().flat_map(|&value| bytes(value)).collect()
}
