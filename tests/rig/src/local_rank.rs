//! One rank of a session: its stream and its tensors.

use std::sync::Arc;

use bytemuck::Pod;
use ferry::{
    Capacity, CombineEpilogue, CombineSteps, Communicator, DataType, Device, DevicePtr, Error,
    Rank, ReceiveLayout, Stream, Tensor, TokenFormat, View,
};
use ferry_reference::{Problem, bf16};

use super::inputs::Return;
use super::settings::{Settings, Turn};
use super::tensors::{Memory, Room, Tensors, resize};
use crate::formats::Encoded;
use crate::verify::{
    Contents, POISON, Placement, RankOutputs, Received, RowLayout, Rows, Viewed, read_view,
};

/// A rank that this process drives.
pub struct LocalRank {
    rank: Rank,
    /// The stream of its calls.
    pub stream: Stream,
    device: Arc<dyn Device>,
    settings: Settings,
    /// Inputs and a place for results each; outputs and experts' rows of all are the same.
    slots: Vec<Tensors>,
    /// Tokens of each slot.
    tokens: Vec<usize>,
    memory: Memory,
    /// f32 `[capacity]`: weights of the experts' rows, if combine is given them.
    row_weights: Option<DevicePtr>,
    /// Added by combine, if there is something.
    steps: Option<CombineSteps>,
    /// Rows that sums begin with.
    initial: [Option<Tensor<2>>; 2],
    /// The view of every round.
    view: Option<View>,
    /// Rows of the last view that was read.
    viewed: Option<Viewed>,
    /// Tokens that are given instead of those of problems.
    encoded: Option<Vec<Encoded>>,
}

impl LocalRank {
    pub(super) fn new(
        rank: &Communicator,
        settings: &Settings,
        slots: usize,
    ) -> Result<Self, Error> {
        let room = Room {
            rows: settings.config.max_tokens_per_rank,
            capacity: Capacity {
                wide_ids: settings.wide_ids,
                ..settings.capacity
            },
            wide_ids: settings.wide_ids,
            keeps_ids: settings.keeps_ids && settings.how() == Return::Reduced,
            how: settings.how(),
            element: DataType::Bf16,
            counted: settings.counted,
            input_scale: settings.input_scale,
            given: settings.given,
            strides: settings.strides,
            lead: 0,
        };
        let (mut memory, mut all) = (Memory::default(), Vec::<Tensors>::new());
        for _ in 0..slots {
            let slot = Tensors::new(rank, room, &mut memory, all.first())?;
            all.push(slot);
        }
        if !settings.weights {
            all.iter_mut()
                .for_each(|slot| slot.input.topk_weights = None);
        }
        Ok(Self {
            rank: rank.rank(),
            stream: rank.device().stream()?,
            device: rank.device().clone(),
            settings: *settings,
            tokens: vec![0; slots],
            slots: all,
            memory,
            row_weights: None,
            steps: None,
            initial: [None; 2],
            view: None,
            viewed: None,
            encoded: None,
        })
    }

    /// Its number.
    pub const fn number(&self) -> usize {
        self.rank.0 as usize
    }

    /// Uploads the first `most` tokens of an input, or all.
    pub(super) fn upload(
        &mut self,
        slot: usize,
        problem: &Problem,
        most: usize,
    ) -> Result<(), Error> {
        let input = &problem.inputs[self.number()];
        let tokens = input.tokens.min(most);
        let rows = if self.settings.counted {
            self.settings.config.max_tokens_per_rank
        } else {
            tokens
        };
        self.tokens[slot] = tokens;
        let (tensors, device) = (&mut self.slots[slot], &*self.device);
        tensors.put(device, input, tokens, rows)?;
        match &self.encoded {
            Some(encoded) => tensors.put_encoded(device, &encoded[..tokens]),
            None => Ok(()),
        }
    }

    /// Gives dispatches from now on these tokens.
    pub(super) fn give_encoded(&mut self, encoded: &[Encoded]) {
        self.encoded = Some(encoded.to_vec());
    }

    pub(super) fn poison(&self) -> Result<(), Error> {
        let mut written = self.memory.written.iter();
        written.try_for_each(|&at| self.device.fill(at, POISON, at.bytes()))
    }

    /// Everything that a [first](Turn::FIRST) round writes.
    pub fn written(&self) -> Vec<DevicePtr> {
        let first = self.slots[0].combined.rows().at;
        let others = self.slots[1..].iter().map(|slot| slot.combined.rows().at);
        let others: Vec<_> = others.filter(|&at| at != first).collect();
        let written = self.memory.written.iter();
        written.filter(|at| !others.contains(at)).copied().collect()
    }

    /// The tensors of a turn.
    pub fn tensors(&self, turn: Turn) -> Tensors {
        let mut tensors = self.slots[turn.slot];
        let rows = tensors.input.x.dims[0];
        tensors.combined = self.slots[turn.into].combined;
        resize(&mut tensors.combined, rows);
        if let Some(tokens) = tensors.output.tokens.filter(|_| turn.returns) {
            tensors.expert_rows.expert_rows = tokens;
        }
        let capacity = self.settings.capacity.rows;
        tensors.expert_rows.row_weights =
            (self.row_weights).map(|at| Tensor::contiguous(at, DataType::F32, [capacity]));
        tensors.expert_rows.initial = self.initial;
        if let Some(steps) = self.steps {
            tensors.expert_rows.epilogue = CombineEpilogue::Steps(steps);
        }
        tensors
    }

    /// Enqueues a half call of a turn.
    pub fn enqueue(
        &self,
        communicator: &mut Communicator,
        turn: Turn,
        half: usize,
    ) -> Result<(), Error> {
        self.enqueue_in(communicator, self.stream, turn, half)
    }

    /// Notes the view of the round that was dispatched, if the plan has views and none was noted: all of a
    /// communicator are in one place.
    pub(super) fn note_view(&mut self, communicator: &Communicator) -> Result<(), Error> {
        let receive = self.settings.config.receive.layout();
        if receive == ReceiveLayout::View && self.view.is_none() {
            // SAFETY: it is read before combine alone.
            self.view = Some(unsafe { communicator.view() }?);
        }
        Ok(())
    }

    /// The same in another stream.
    pub(super) fn enqueue_in(
        &self,
        communicator: &mut Communicator,
        stream: Stream,
        turn: Turn,
        half: usize,
    ) -> Result<(), Error> {
        let tensors = self.tensors(turn);
        tensors.enqueue(communicator, stream, half, self.settings.split)
    }

    /// Puts the experts' answers where combine takes them: rows stand as `placement` says.
    pub fn answer(
        &self,
        problem: &Problem,
        scale: &[f32],
        placement: &Placement,
    ) -> Result<(), Error> {
        let rows = self.settings.capacity.rows;
        let answers = placement.expert_rows(problem, scale, self.number(), rows);
        self.slots[0].answer(&*self.device, &answers)
    }

    /// Puts the experts' answers to the BF16 rows that were received, so that a wrong row shows in the sums,
    /// too. `shared`: the shared expert's factor.
    pub(super) fn answer_received(&self, scale: &[f32], shared: Option<f32>) -> Result<(), Error> {
        let (output, hidden) = (&self.slots[0].output, self.settings.config.hidden);
        let received = Received::download(&*self.device, output, &self.settings.config)?;
        let (offsets, mut rows) = (received.row_offsets, elements(&received.tokens));
        let local_experts = offsets.len() - 1 - usize::from(shared.is_some());
        let factors = shared.iter().chain(&scale[self.number() * local_experts..]);
        for (pair, factor) in offsets.windows(2).zip(factors) {
            let rows = rows.get_mut(pair[0] as usize * hidden..pair[1] as usize * hidden);
            for x in rows.into_iter().flatten() {
                *x = ferry_reference::round_to_bf16(x.to_f32() * factor);
            }
        }
        self.slots[0].answer(&*self.device, &rows)
    }

    /// Puts the experts' answers to the rows that were received and stayed as they came: to their ids,
    /// weights and sources, and if they are BF16 to their elements, else to those of their tokens.
    pub(super) fn answer_rows(&mut self, problem: &Problem, scale: &[f32]) -> Result<(), Error> {
        let (output, hidden) = (&self.slots[0].output, problem.hidden);
        let layout = RowLayout::of(&self.settings.config, output.src_info.dims[0]);
        let viewed = self
            .view
            .map(|view| read_view(&*self.device, &view, &layout));
        self.viewed = viewed.transpose()?;
        let rows = Rows::download(&*self.device, output, layout, self.viewed.as_ref())?;
        let arrived = match layout.format {
            TokenFormat::Bf16 => Some(elements(&rows.tokens)),
            _ => None,
        };
        let answers = rows.answers(scale, self.number(), |row, source, token| match &arrived {
            Some(arrived) => &arrived[row * hidden..][..hidden],
            None => &problem.inputs[source].x[token * hidden..][..hidden],
        });
        self.slots[0].answer(&*self.device, &answers)
    }

    /// Gives combines from now on the router's weights of the experts' rows.
    pub(super) fn give_row_weights(
        &mut self,
        problem: &Problem,
        placement: &Placement,
    ) -> Result<(), Error> {
        let weights = placement.row_weights(problem, self.settings.capacity.rows);
        self.row_weights = Some(self.upload_new(self.row_weights, &weights)?);
        Ok(())
    }

    /// Gives combines from now on rows that are added to the results, and a bias of zeros if `biased`.
    pub(super) fn give_steps(&mut self, residual: &[bf16], biased: bool) -> Result<(), Error> {
        let hidden = self.settings.config.hidden;
        let tensor = |at, dims| Tensor::contiguous(at, DataType::Bf16, dims);
        let rows = self.upload_new(None, residual)?;
        let mut steps = CombineSteps {
            residual: Some(tensor(rows, [residual.len() / hidden, hidden])),
            ..CombineSteps::default()
        };
        if biased {
            let bias = self.upload_new(None, &vec![bf16::ZERO; hidden])?;
            steps.biases[0] = Some(Tensor::contiguous(bias, DataType::Bf16, [hidden]));
        }
        self.steps = Some(steps);
        Ok(())
    }

    /// Begins combines' sums from now on with rows.
    pub(super) fn give_initial(&mut self, initial: [Option<&[bf16]>; 2]) -> Result<(), Error> {
        let hidden = self.settings.config.hidden;
        for (index, rows) in initial.into_iter().enumerate() {
            if let Some(rows) = rows {
                let at = self.upload_new(None, rows)?;
                let dims = [rows.len() / hidden, hidden];
                self.initial[index] = Some(Tensor::contiguous(at, DataType::Bf16, dims));
            }
        }
        Ok(())
    }

    /// Uploads values to a place for as many, or to new memory.
    fn upload_new<T: Pod>(
        &mut self,
        place: Option<DevicePtr>,
        values: &[T],
    ) -> Result<DevicePtr, Error> {
        let bytes = bytemuck::cast_slice(values);
        let at = match place {
            Some(at) => at,
            None => {
                let at = self.device.alloc(bytes.len().max(16) as u64)?;
                self.memory.read.push(at);
                at
            }
        };
        self.device.upload(at, bytes)?;
        Ok(at)
    }

    /// Outputs of the first turn.
    pub(super) fn outputs(&self) -> Result<RankOutputs, Error> {
        let (first, config) = (&self.slots[0], &self.settings.config);
        let (device, viewed) = (&*self.device, self.viewed.as_ref());
        let kept = first.compare_kept_ids(device, self.tokens[0], config.experts);
        kept.unwrap_or_else(|e| panic!("rank {}: {e}", self.number()));
        let mut combined = first.result(device)?;
        let mut beyond = combined.split_off(self.result_bytes(0));
        let mut weights = first.returned_weights(device)?;
        let others = weights.split_off((self.tokens[0] * config.top_k).min(weights.len()));
        beyond.extend_from_slice(bytemuck::cast_slice(&others));
        Ok(RankOutputs {
            rank: self.number(),
            received: Contents::download(device, &first.output, config, viewed)?,
            combined: elements(&combined),
            combined_weights: weights,
            beyond,
        })
    }

    /// Bytes of the results for the tokens of a slot.
    fn result_bytes(&self, slot: usize) -> usize {
        let config = &self.settings.config;
        let apart = self.settings.how() == Return::Apart;
        let rows = if apart { config.top_k } else { 1 };
        self.tokens[slot] * rows * 2 * config.hidden
    }

    /// A turn's results.
    pub(super) fn combined(&self, turn: Turn) -> Result<Vec<bf16>, Error> {
        let mut bytes = self.slots[turn.into].result(&*self.device)?;
        bytes.truncate(self.result_bytes(turn.slot));
        Ok(elements(&bytes))
    }

    pub(super) fn free(&self) -> Result<(), Error> {
        let mut all = self.memory.written.iter().chain(&self.memory.read);
        // SAFETY: the session is being closed: its rounds were waited for.
        all.try_for_each(|&at| unsafe { self.device.free(at) })
    }
}

/// Bytes as BF16.
pub fn elements(bytes: &[u8]) -> Vec<bf16> {
    let bytes = bytes.as_chunks().0.iter();
    bytes.map(|&bytes| bf16::from_ne_bytes(bytes)).collect()
}
