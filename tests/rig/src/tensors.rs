//! The tensors of a rank's round, and the half calls that take them.

use ferry::{
    Call, Capacity, CombineInput, CombineOutput, Communicator, Config, DataType, Device, DevicePtr,
    DispatchInput, DispatchOutput, Error, Plan, Stream, Tensor, TokenFormat,
};
use ferry_reference::{RankInput, bf16};

use super::encoding::{Encoding, place};
use super::inputs::Return;
use crate::formats::Encoded;
use crate::formats::given::{Given, Strides};
use crate::verify::{POISON, download};

/// Half calls of a round: dispatch, its wait, combine, its wait. A fused rank skips the waits.
pub const HALVES: usize = 4;

/// Sizes of a rank's tensors, and the optional ones among them.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    /// Rows of the inputs and of the results.
    pub rows: usize,
    /// Capacity of the dispatch's outputs.
    pub capacity: Capacity,
    /// Way back of the rows.
    pub how: Return,
    /// Elements of the results.
    pub element: DataType,
    /// Global scale that NVFP4 is given.
    pub input_scale: Option<f32>,
    /// Form of the tokens.
    pub given: Given,
    /// Places of their scales, if they are encoded.
    pub strides: Strides,
    /// Whether the device says how many tokens there are.
    pub counted: bool,
    /// Whether expert ids are i64. The capacity says so, too.
    pub wide_ids: bool,
    /// Whether the round keeps them in memory here.
    pub keeps_ids: bool,
    /// Elements of memory before the expert ids, which are read otherwise unless they begin at a multiple of
    /// 16 bytes.
    pub lead: usize,
}

/// A rank's tensors of one round.
#[derive(Clone, Copy)]
pub struct Tensors {
    /// Input of dispatch.
    pub input: DispatchInput,
    /// Output of dispatch.
    pub output: DispatchOutput,
    /// Input of combine.
    pub expert_rows: CombineInput,
    /// Output of combine. Its memory is a row longer.
    pub combined: CombineOutput,
    /// Form of the tokens.
    encoding: Encoding,
}

/// Memory of rounds.
#[derive(Default)]
pub struct Memory {
    /// Outputs, whole allocations.
    pub written: Vec<DevicePtr>,
    /// All else.
    pub read: Vec<DevicePtr>,
}

impl Memory {
    /// Allocates an output full of poison.
    fn poisoned(&mut self, device: &dyn Device, bytes: u64) -> Result<DevicePtr, Error> {
        let at = device.alloc(bytes)?;
        device.fill(at, POISON, bytes)?;
        self.written.push(at);
        Ok(at)
    }
}

impl Tensors {
    /// Allocates tensors of a rank, the outputs full of poison; those of another round if they share
    /// `outputs` and the experts' rows with it.
    pub fn new(
        rank: &Communicator,
        room: Room,
        memory: &mut Memory,
        shared: Option<&Self>,
    ) -> Result<Self, Error> {
        let (device, plan): (_, &Plan) = (rank.device(), rank.plan());
        let Config { top_k, hidden, .. } = *plan.config();
        let rows = room.rows;
        let mut alloc = |bytes: usize| {
            let at = device.alloc(bytes.max(16) as u64)?;
            memory.read.push(at);
            Ok::<_, Error>(at)
        };
        let scale = room.input_scale.unwrap_or(1.0);
        let encoding = Encoding::of(plan.config(), room.given, room.strides, scale);
        let x = encoding.codes(rows, &mut alloc)?;
        let scales = encoding.scales(rows, &mut alloc)?;
        let (id, width) = match room.wide_ids {
            true => (DataType::I64, 8),
            false => (DataType::I32, 4),
        };
        let ids = alloc(width * (room.lead + rows * top_k))?.plus((width * room.lead) as u64);
        let ids = Tensor::contiguous(ids, id, [rows, top_k]);
        let weights = Tensor::contiguous(alloc(4 * rows * top_k)?, DataType::F32, [rows, top_k]);
        let scale = Tensor::contiguous(alloc(4)?, DataType::F32, [1]);
        let is_scaled = matches!(plan.config().format, TokenFormat::Nvfp4(_));
        let given = room.input_scale.filter(|_| is_scaled && scales.is_none());
        device.upload(scale.at, &given.unwrap_or(1.0).to_le_bytes())?;
        let count = Tensor::contiguous(alloc(4)?, DataType::U32, [1]);
        let (output, expert_rows) = match shared {
            Some(other) => (other.output, other.expert_rows.expert_rows),
            None => {
                let dims = [room.capacity.rows, hidden];
                let rows = Tensor::contiguous(alloc(2 * dims[0] * hidden)?, DataType::Bf16, dims);
                // Tests use and free the addresses, so that no buffers own them.
                let layout = plan.output_layout(room.capacity)?;
                let at = layout.iter().map(|of| memory.poisoned(&**device, of.bytes));
                let at = at.collect::<Result<Vec<_>, _>>()?;
                let output = DispatchOutput::from_addresses(plan, room.capacity, &at)?;
                (output, rows)
            }
        };
        let combined = Self::result_of(rank, room, memory)?;
        let kept_ids = match room.keeps_ids {
            true => Some(Self::kept_ids(rank, rows, memory)?),
            false => None,
        };
        Ok(Self {
            input: DispatchInput {
                topk_weights: Some(weights),
                input_scale: given.map(|_| scale),
                tokens_on_device: room.counted.then_some(count),
                x_scales: scales,
                kept_ids,
                ..DispatchInput::new(x, ids)
            },
            output,
            expert_rows: CombineInput {
                topk_weights: (room.how == Return::Exact).then_some(weights),
                received_weights: output.weights.filter(|_| combined.weights().is_some()),
                ..CombineInput::new(expert_rows)
            },
            combined,
            encoding,
        })
    }

    /// Allocates memory for ids, full of poison and a row longer.
    fn kept_ids(rank: &Communicator, rows: usize, memory: &mut Memory) -> Result<Tensor<2>, Error> {
        let (device, top_k) = (rank.device(), rank.plan().config().top_k);
        let at = memory.poisoned(&**device, 4 * ((rows + 1) * top_k) as u64)?;
        Ok(Tensor::contiguous(at, DataType::I32, [rows, top_k]))
    }

    /// Allocates results, full of poison, in memory that is a row longer.
    fn result_of(
        rank: &Communicator,
        room: Room,
        memory: &mut Memory,
    ) -> Result<CombineOutput, Error> {
        let (device, config) = (rank.device(), rank.plan().config());
        let Config { top_k, hidden, .. } = *config;
        let (rows, element) = (room.rows, room.element);
        let each = if room.how == Return::Apart { top_k } else { 1 };
        let mut alloc = |row_bytes: usize| {
            memory.poisoned(&**device, ((rows * each + 1) * row_bytes).max(16) as u64)
        };
        let at = alloc(hidden * (element.bits() as usize / 8))?;
        let combined = Tensor::contiguous(at, element, [rows, hidden]);
        if config.receive.fields().combine_weights {
            let weights = Tensor::contiguous(alloc(4 * top_k)?, DataType::F32, [rows, top_k]);
            return Ok(CombineOutput::Weighted { combined, weights });
        }
        Ok(match room.how {
            Return::Apart => {
                CombineOutput::Apart(Tensor::contiguous(at, element, [rows, top_k, hidden]))
            }
            _ => CombineOutput::Summed(combined),
        })
    }

    /// Uploads the first `tokens` tokens of an input. The tensors have `rows` rows then: those after the
    /// tokens would be seen in the results.
    pub fn put(
        &mut self,
        device: &dyn Device,
        input: &RankInput,
        tokens: usize,
        rows: usize,
    ) -> Result<(), Error> {
        let ([_, hidden], [_, top_k]) = (self.input.x.dims, self.input.topk_ids.dims);
        let more = rows - tokens;
        let x = [&input.x[..tokens * hidden], &vec![bf16::NAN; more * hidden]].concat();
        match self.input.x_scales {
            None => device.upload(self.input.x.at, bytemuck::cast_slice(&x))?,
            Some(_) => {
                let tokens = x.chunks(hidden).map(|row| self.encoding.encode(row));
                self.put_encoded(device, &tokens.collect::<Vec<_>>())?;
            }
        }
        let slots = tokens * top_k;
        let ids = [&input.topk_ids[..slots], &vec![0; more * top_k]].concat();
        self.put_ids(device, &ids)?;
        let given = &input.topk_weights[..slots];
        let weights = [given, &vec![f32::NAN; more * top_k]].concat();
        if let Some(at) = self.input.topk_weights.or(self.expert_rows.topk_weights) {
            device.upload(at.at, bytemuck::cast_slice(&weights))?;
        }
        if let Some(count) = self.input.tokens_on_device {
            device.upload(count.at, &(tokens as u32).to_le_bytes())?;
        }
        self.resize(rows);
        Ok(())
    }

    /// Uploads tokens, and their scales.
    pub fn put_encoded(&self, device: &dyn Device, tokens: &[Encoded]) -> Result<(), Error> {
        let Some(scales) = self.input.x_scales else {
            return Ok(());
        };
        let codes = tokens.iter().map(|token| &token.payload[..]);
        place(device, &self.input.x, codes)?;
        place(
            device,
            &scales,
            tokens.iter().map(|token| &token.scales[..]),
        )
    }

    /// Uploads expert ids in the type that the tensor has.
    pub fn put_ids(&self, device: &dyn Device, ids: &[i32]) -> Result<(), Error> {
        let ids_tensor = &self.input.topk_ids;
        if ids_tensor.data_type == DataType::I64 {
            let wide: Vec<i64> = ids.iter().copied().map(i64::from).collect();
            device.upload(ids_tensor.at, bytemuck::cast_slice(&wide))
        } else {
            device.upload(ids_tensor.at, bytemuck::cast_slice(ids))
        }
    }

    /// Gives inputs and results so many rows.
    fn resize(&mut self, rows: usize) {
        self.input.x.dims[0] = rows;
        self.input.topk_ids.dims[0] = rows;
        if let Some(kept) = &mut self.input.kept_ids {
            kept.dims[0] = rows;
        }
        if let Some(scales) = &mut self.input.x_scales {
            scales.dims[0] = rows;
        }
        let weights = [
            &mut self.input.topk_weights,
            &mut self.expert_rows.topk_weights,
        ];
        weights
            .into_iter()
            .flatten()
            .for_each(|weights| weights.dims[0] = rows);
        resize(&mut self.combined, rows);
    }

    /// Compares the ids that the round of so many tokens has kept, if it keeps them. Synchronises, but not
    /// with other streams.
    pub fn compare_kept_ids(
        &self,
        device: &dyn Device,
        tokens: usize,
        experts: usize,
    ) -> Result<(), String> {
        let Some(kept) = self.input.kept_ids else {
            return Ok(());
        };
        let words = |at: DevicePtr, count: usize| {
            download::<u32>(device, at, count).map_err(|error| error.to_string())
        };
        let (ids, top_k) = (self.input.topk_ids, kept.dims[1]);
        let is_wide = ids.data_type == DataType::I64;
        let given = words(ids.at, tokens * top_k * (1 + usize::from(is_wide)))?;
        let given: Vec<i64> = match is_wide {
            true => {
                let halves = given.as_chunks().0.iter();
                halves
                    .map(|&[low, high]| (u64::from(high) << 32 | u64::from(low)) as i64)
                    .collect()
            }
            false => given.iter().map(|&id| i64::from(id as i32)).collect(),
        };
        let experts = 0..experts as i64;
        let kept_id = |id: &i64| {
            if experts.contains(id) {
                *id as u32
            } else {
                u32::MAX
            }
        };
        let found = words(kept.at, kept.at.bytes() as usize / 4)?;
        let mut wanted: Vec<u32> = given.iter().map(kept_id).collect();
        wanted.resize(found.len(), u32::from_ne_bytes([POISON; 4]));
        match found == wanted {
            true => Ok(()),
            false => Err(format!("kept ids are {found:x?}, not {wanted:x?}")),
        }
    }

    /// Uploads the experts' answers, BF16.
    pub fn answer(&self, device: &dyn Device, rows: &[bf16]) -> Result<(), Error> {
        device.upload(self.expert_rows.expert_rows.at, bytemuck::cast_slice(rows))
    }

    /// The results' memory, all of it. Synchronises, but not with other streams.
    pub fn result(&self, device: &dyn Device) -> Result<Vec<u8>, Error> {
        let at = self.combined.rows().at;
        download(device, at, at.bytes() as usize)
    }

    /// Memory of the weights that come back, all of it; empty if none do. Synchronises, but not with other
    /// streams.
    pub fn returned_weights(&self, device: &dyn Device) -> Result<Vec<u32>, Error> {
        self.combined.weights().map_or(Ok(Vec::new()), |weights| {
            download(device, weights.at, weights.at.bytes() as usize / 4)
        })
    }

    /// Enqueues a half call of all local ranks: see [`enqueue`](Self::enqueue).
    pub fn enqueue_all(
        ranks: &mut [Communicator],
        streams: &[Stream],
        all: &[Self],
        half: usize,
        split: bool,
    ) -> Result<(), Error> {
        let calls: Option<Vec<_>> = all.iter().map(|t| t.call(half, split)).collect();
        calls.map_or(Ok(()), |calls| {
            Communicator::together(ranks, streams, &calls)
        })
    }

    /// Enqueues a half call of a round, or nothing if a fused rank has done it already.
    pub fn enqueue(
        &self,
        rank: &mut Communicator,
        stream: Stream,
        half: usize,
        split: bool,
    ) -> Result<(), Error> {
        let call = self.call(half, split);
        call.map_or(Ok(()), |call| rank.enqueue(stream, &call))
    }

    const fn call(&self, half: usize, split: bool) -> Option<Call> {
        Some(match (half, split) {
            (0, false) => Call::Dispatch(self.input, self.output),
            (0, true) => Call::DispatchAsync(self.input),
            (1, true) => Call::DispatchWait(self.output),
            (2, false) => Call::Combine(self.expert_rows, self.combined),
            (2, true) => Call::CombineAsync(self.expert_rows, self.combined),
            (_, true) => Call::CombineWait,
            (_, false) => return None,
        })
    }
}

/// Gives results rows of so many tokens.
pub const fn resize(combined: &mut CombineOutput, rows: usize) {
    match combined {
        CombineOutput::Summed(sums) => sums.dims[0] = rows,
        CombineOutput::Weighted { combined, weights } => {
            combined.dims[0] = rows;
            weights.dims[0] = rows;
        }
        CombineOutput::Apart(apart) => apart.dims[0] = rows,
    }
}
