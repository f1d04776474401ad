//! Typed copies from the host into the buffers of a plan, and back: for tests, examples, and experts on the
//! host. All synchronise. Engines whose tensors are in device memory already need none of them.

use half::bf16;

use crate::call::buffers::Inputs;
use crate::call::buffers::allocations::Allocations;
use crate::call::buffers::{CombineBuffers, DispatchBuffers};
use crate::call::scales::ScaleTensor;
use crate::call::{CombineInput, DispatchInput, DispatchOutput};
use crate::device::Device;
use crate::error::{Error, TensorError};
use crate::tensor::Element;
use crate::tensor::Tensor;
use crate::tensor::data_type::{DataType, TensorElement, has_its_bits};
use crate::tensor::handles::DevicePtr;

/// What a dispatch left in a rank's outputs, on the host: of each tensor as much as has rows.
/// [`decode_rows`](crate::decode_rows) makes numbers of it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ReceivedRows {
    /// `[rows, hidden]` in the plan's format: codes, as bytes.
    pub tokens: Vec<u8>,
    /// The scales as bytes, in the layout of the plan's format; transposed ones whole, `[hidden / 128,
    /// capacity]`. Empty for BF16.
    pub scales: Vec<u8>,
    /// [`ScaleTensor::Tiled`]'s `offsets`; else empty.
    pub scale_offsets: Vec<u32>,
    /// `[rows]`: each row's own scale, where the format has one; else empty.
    pub row_scales: Vec<bf16>,
    /// `[groups + 1]`: the first row of each group, and the end of the last.
    pub row_offsets: Vec<u32>,
    /// `[rows]`: token and top-k slot on the source rank, which is not given. Rows that pad a group have
    /// whatever stood there.
    pub src_info: Vec<[i32; 2]>,
}

impl ReceivedRows {
    /// The rows of a group: `0..plan.groups()`. Those that pad it are the last ones; how
    /// many these are is not given.
    ///
    /// # Panics
    /// If there is no such group.
    pub fn rows_of(&self, group: usize) -> std::ops::Range<usize> {
        self.row_offsets[group] as usize..self.row_offsets[group + 1] as usize
    }
}

impl DispatchOutput {
    /// Copies what a dispatch wrote from `device`, the rank's. Call
    /// [`synchronize`](crate::Communicator::synchronize) first. Not collective; synchronises, but not with
    /// other streams than the device's own.
    ///
    /// # Errors
    /// [`Error::Tensor`] where `row_offsets` are not what a dispatch into so many rows writes, as they may be
    /// before the first one; what the device reports.
    pub fn download(&self, device: &dyn Device) -> Result<ReceivedRows, Error> {
        fn first<const N: usize>(tensor: Tensor<N>, rows: usize) -> Tensor<N> {
            let mut dims = tensor.dims;
            dims[0] = dims[0].min(rows);
            Tensor { dims, ..tensor }
        }
        let row_offsets: Vec<u32> = device.download_tensor(&self.row_offsets)?;
        require_offsets(&row_offsets)?;
        let (rows, capacity) = (
            row_offsets.last().map_or(0, |&end| end as usize),
            self.capacity(),
        );
        if rows > capacity {
            let wanted = format!("at most {capacity}, the rows that there are");
            return Err(no_offsets(&row_offsets, wanted));
        }
        let (scales, scale_offsets) = match self.scales {
            None => (Vec::new(), Vec::new()),
            Some(ScaleTensor::Transposed(scales)) => (device.download_tensor(&scales)?, Vec::new()),
            Some(ScaleTensor::RowMajor(scales)) => {
                (device.download_tensor(&first(scales, rows))?, Vec::new())
            }
            Some(ScaleTensor::Tiled { scales, offsets }) => {
                let blocks = ferry_layout::scale_placement::first_blocks(&row_offsets).last();
                let scales = first(scales, blocks.unwrap_or(0) as usize);
                (
                    device.download_tensor(&scales)?,
                    device.download_tensor(&offsets)?,
                )
            }
        };
        let row_scales = match self.row_scales {
            None => Vec::new(),
            Some(scales) => device.download_tensor(&first(scales, rows))?,
        };
        let src_info: Vec<i32> = device.download_tensor(&first(self.src_info, rows))?;
        Ok(ReceivedRows {
            tokens: device.download_tensor(&first(self.tokens, rows))?,
            scales,
            scale_offsets,
            row_scales,
            row_offsets,
            src_info: bytemuck::cast_slice(&src_info).to_vec(),
        })
    }
}

impl DispatchBuffers {
    /// Copies this rank's tokens to the device, into memory that the first call allocates: BF16 `x` (as
    /// `bf16` or `u16`) `[tokens, hidden]`, `topk_ids` and the router's weights `[tokens, top_k]`. No kernel
    /// may still read what an earlier call copied. Not collective; synchronises.
    ///
    /// # Errors
    /// [`Error::TooManyTokens`]; [`Error::Tensor`] for lengths or elements that do not fit; what the device
    /// reports.
    pub fn upload<T: TensorElement>(
        &mut self,
        x: &[T],
        topk_ids: &[i32],
        topk_weights: Option<&[f32]>,
    ) -> Result<DispatchInput, Error> {
        const { has_its_bits::<T>() };
        let config = self.plan.config();
        let (hidden, top_k, max) = (config.hidden, config.top_k, config.max_tokens_per_rank);
        let tokens = x.len() / hidden;
        if !x.len().is_multiple_of(hidden) {
            return Err(Error::Tensor(TensorError {
                tensor: "x",
                wanted: format!("[tokens, {hidden}], a multiple of {hidden} elements"),
                given: x.len().to_string(),
            }));
        }
        if tokens > max {
            return Err(Error::TooManyTokens { given: tokens, max });
        }
        require_length("topk_ids", topk_ids.len(), tokens * top_k)?;
        if let Some(weights) = topk_weights {
            require_length("topk_weights", weights.len(), tokens * top_k)?;
        }
        let inputs = match self.inputs.take() {
            Some(inputs) => inputs,
            None => Inputs::alloc(self.memory.device(), &self.plan)?,
        };
        let inputs = self.inputs.insert(inputs);
        let device = &**self.memory.device();
        let ids = [tokens, top_k];
        let input = DispatchInput {
            topk_weights: (topk_weights)
                .map(|_| Tensor::contiguous(inputs.topk_weights, DataType::F32, ids)),
            ..DispatchInput::new(
                Tensor::contiguous(inputs.x, T::DATA_TYPE, [tokens, hidden]),
                Tensor::contiguous(inputs.topk_ids, DataType::I32, ids),
            )
        };
        input.x.require("x", input.x.dims, Element::BF16_ROW)?;
        device.upload(inputs.x, bytemuck::cast_slice(x))?;
        device.upload(inputs.topk_ids, bytemuck::cast_slice(topk_ids))?;
        if let Some(weights) = topk_weights {
            device.upload(inputs.topk_weights, bytemuck::cast_slice(weights))?;
        }
        Ok(input)
    }

    /// Copies what a dispatch wrote: [`DispatchOutput::download`] of these outputs.
    ///
    /// # Errors
    /// As [`DispatchOutput::download`].
    pub fn download(&self) -> Result<ReceivedRows, Error> {
        self.output().download(&**self.memory.device())
    }
}

impl CombineBuffers {
    /// Copies what the experts return to the device, into memory that the first call allocates: BF16 rows (as
    /// `bf16` or `u16`) in the order of `output`'s: as many as `row_offsets` end with, or more up to the
    /// capacity. Fewer are not noticed, and combine sums what stands behind them. It
    /// reads no row that pads a group: anything may stand there. No kernel may still read what
    /// an earlier call copied. Not collective; synchronises.
    ///
    /// # Errors
    /// [`Error::Tensor`] for lengths or elements that do not fit; what the device reports.
    pub fn upload<T: TensorElement>(
        &mut self,
        output: &DispatchOutput,
        rows: &[T],
    ) -> Result<CombineInput, Error> {
        const { has_its_bits::<T>() };
        let dims = [output.capacity(), self.hidden];
        let wanted = Tensor::contiguous(DevicePtr::NULL, T::DATA_TYPE, dims);
        let given = rows.len() / self.hidden;
        require_length("expert_rows", rows.len(), given.min(dims[0]) * self.hidden)?;
        let memory = match self.expert_rows.take() {
            Some(memory) if memory.at()[0].bytes() >= wanted.bytes() => memory,
            before => {
                let device = self.memory.device();
                let allocated = Allocations::with(device, |memory| memory.alloc(wanted.bytes()));
                if let Some(before) = before {
                    self.outgrown.push(before);
                }
                allocated?.1
            }
        };
        let at = self.expert_rows.insert(memory).at()[0];
        let expert_rows = Tensor { at, ..wanted };
        expert_rows.require("expert_rows", dims, Element::BF16_ROW)?;
        let bytes = bytemuck::cast_slice(rows);
        self.memory.device().upload(at, bytes)?;
        Ok(CombineInput::new(expert_rows))
    }

    /// Copies the result of a round to which this rank brought `tokens` tokens. Call
    /// [`synchronize`](crate::Communicator::synchronize) first. Not collective; synchronises, but not with
    /// other streams than the device's own.
    ///
    /// # Errors
    /// [`Error::TooManyTokens`]; [`Error::Tensor`] if the result's elements are no `T`; what the device
    /// reports.
    pub fn download<T: TensorElement>(&self, tokens: usize) -> Result<Vec<T>, Error> {
        let rows = self.output(tokens)?.rows();
        self.memory.device().download_named("combined", &rows)
    }
}

/// Checks that the offsets begin with 0 and never decrease.
pub(crate) fn require_offsets(row_offsets: &[u32]) -> Result<(), Error> {
    if row_offsets.first().is_none_or(|&first| first == 0) && row_offsets.is_sorted() {
        return Ok(());
    }
    Err(no_offsets(
        row_offsets,
        "what a dispatch writes: 0, and numbers that never decrease".to_owned(),
    ))
}

fn no_offsets(row_offsets: &[u32], wanted: String) -> Error {
    Error::Tensor(TensorError {
        tensor: "row_offsets",
        wanted,
        given: format!("{row_offsets:?}"),
    })
}

pub(crate) fn require_length(
    tensor: &'static str,
    given: usize,
    wanted: usize,
) -> Result<(), Error> {
    if given == wanted {
        return Ok(());
    }
    Err(Error::Tensor(TensorError {
        tensor,
        wanted: format!("{wanted} elements"),
        given: given.to_string(),
    }))
}
