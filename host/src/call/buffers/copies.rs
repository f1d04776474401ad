//! Typed copies from the host into the buffers of a plan, and back: for tests, examples, and experts on the
//! host. All synchronize. Engines whose tensors are in device memory already need none of them.

use ferry_layout::ReceiveLayout;
use half::bf16;

use crate::call::buffers::Inputs;
use crate::call::buffers::allocations::Allocations;
use crate::call::buffers::{CombineBuffers, DispatchBuffers};
use crate::call::scales::ScaleTensor;
use crate::call::{CombineInput, DispatchInput, DispatchOutput};
use crate::device::Device;
use crate::error::{Error, TensorError};
use crate::plan::Plan;
use crate::tensor::Tensor;
use crate::tensor::data_type::{DataType, TensorElement, has_its_bits};
use crate::tensor::handles::DevicePtr;
use crate::tensor::view::Element;

/// A host copy of a rank's outputs of a dispatch: of each tensor the part that has rows. Tensors that the
/// plan's format or [receive layout](crate::Config::receive) does not have are empty. The rows of views and
/// strided rows are all `ranks * max_tokens_per_rank`.
/// [`decode_rows`](crate::decode_rows) decodes it. `bf16` is that of the crate `half`, version 2.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ReceivedRows {
    /// `[rows, hidden]` in the plan's format: codes, as bytes. Of a view
    /// [`Communicator::download`](crate::Communicator::download) alone copies them.
    pub tokens: Vec<u8>,
    /// The scales as bytes, in the layout of the plan's format, and of a view row-major. Transposed ones are
    /// whole, `[hidden / 128, capacity]`, where `tokens` end with the last row: scale `g` of row `r` is f32
    /// `g * capacity + r`. Empty for BF16.
    pub scales: Vec<u8>,
    /// Rows that the outputs hold ([`Capacity::rows`](crate::Capacity)), of which the others here are the
    /// first. [`decode_rows`](crate::decode_rows) does not read it.
    pub capacity: usize,
    /// The `offsets` of [`ScaleTensor::Tiled`]; otherwise empty.
    pub scale_offsets: Vec<u32>,
    /// `[rows]`: each row's own scale, if the format has one; otherwise empty.
    pub row_scales: Vec<bf16>,
    /// `[groups + 1]`, by expert only: the first row of each group, and the end of the last.
    pub row_offsets: Vec<u32>,
    /// `[rows]`: by expert, token and top-k slot on the source rank, undefined for rows that pad a group
    /// unless the plan has [`row_sources`](crate::ByExpert::row_sources). Else source rank and token, -1 and
    /// -1 in rows without a token.
    pub src_info: Vec<[i32; 2]>,
    /// `[rows, top_k]`, not by expert: [`DispatchOutput::ids`], i32 and i64 alike.
    pub ids: Vec<i64>,
    /// `[rows, top_k]`, not by expert, and `[rows, 1]` by expert with `row_sources`:
    /// [`DispatchOutput::weights`].
    pub weights: Vec<f32>,
    /// `[ranks]`, not by expert: [`DispatchOutput::source_counts`].
    pub source_counts: Vec<i32>,
    /// `[local_experts]`, not by expert, and `[groups]` by expert with an alignment:
    /// [`DispatchOutput::expert_counts`].
    pub expert_counts: Vec<i32>,
    /// `[groups]`, by expert with an alignment: [`DispatchOutput::row_ends`].
    pub row_ends: Vec<u32>,
    /// `[rows]`, by expert with [`row_sources`](crate::ByExpert::row_sources): the source rank of each row,
    /// -1 in rows that pad a group.
    pub source_ranks: Vec<i32>,
    /// `[rows]`, with [`m_indices`](crate::ByExpert::m_indices): [`DispatchOutput::m_indices`].
    pub m_indices: Vec<i32>,
    /// `[local_experts, ranks]`, of padded blocks: [`DispatchOutput::source_ranges`].
    pub source_ranges: Vec<i64>,
}

impl ReceivedRows {
    /// The rows of `group`, one of `0..plan.groups()`, of rows by expert. Without
    /// [`row_ends`](Self::row_ends) the last ones may pad it.
    ///
    /// # Panics
    /// If there is no such group.
    pub fn rows_of(&self, group: usize) -> std::ops::Range<usize> {
        let next = self.row_offsets[group + 1];
        let end = self.row_ends.get(group).copied().unwrap_or(next);
        self.row_offsets[group] as usize..end as usize
    }
}

impl DispatchOutput {
    /// Copies the outputs of a dispatch of `plan` from `device`, the rank's. Call
    /// [`synchronize`](crate::Communicator::synchronize) with the dispatch's stream first: this call
    /// synchronizes only with the device's own stream. Not collective.
    ///
    /// # Errors
    /// [`Error::Tensor`] if `row_offsets` or `source_counts` are not those of a dispatch into that many rows,
    /// as may be the case before the first one; errors of the device.
    pub fn download(&self, plan: &Plan, device: &dyn Device) -> Result<ReceivedRows, Error> {
        let row_offsets: Vec<u32> = copied(device, self.row_offsets)?;
        let source_counts: Vec<i32> = copied(device, self.source_counts)?;
        let capacity = self.capacity();
        let rows = match plan.receive().layout {
            ReceiveLayout::ByExpert => rows_by_expert(&row_offsets, capacity)?,
            ReceiveLayout::Compact => compact_rows(&source_counts, capacity)?,
            ReceiveLayout::Padded => {
                require_blocks(&row_offsets, plan.block_rows())?;
                capacity
            }
            ReceiveLayout::View | ReceiveLayout::Strided => capacity,
        };
        let (scales, scale_offsets) = match self.scales {
            None => (Vec::new(), Vec::new()),
            // As bytes, here and below.
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
        let src_info: Vec<i32> = device.download_tensor(&first(self.src_info, rows))?;
        let columns = self.src_info.dims[1];
        let (sources, pairs) = src_info
            .chunks_exact(columns)
            .map(|row| (row[0], [row[columns - 2], row[columns - 1]]))
            .unzip();
        let part = |tensor: Tensor<2>| first(tensor, rows);
        let ids = self.ids.map(part);
        let ids = match ids.map(|ids| ids.data_type) {
            Some(DataType::I64) => copied(device, ids)?,
            _ => copied::<i32, 2>(device, ids)?
                .into_iter()
                .map(i64::from)
                .collect(),
        };
        Ok(ReceivedRows {
            tokens: copied(device, self.tokens.map(part))?,
            scales,
            capacity,
            scale_offsets,
            row_scales: copied(device, self.row_scales.map(|tensor| first(tensor, rows)))?,
            row_offsets,
            src_info: pairs,
            ids,
            weights: copied(device, self.weights.map(part))?,
            source_counts,
            expert_counts: copied(device, self.expert_counts)?,
            row_ends: copied(device, self.row_ends)?,
            source_ranks: if columns == 3 { sources } else { Vec::new() },
            m_indices: copied(device, self.m_indices.map(|tensor| first(tensor, rows)))?,
            source_ranges: copied(device, self.source_ranges)?,
        })
    }
}

/// The first `rows` rows of a tensor.
fn first<const N: usize>(tensor: Tensor<N>, rows: usize) -> Tensor<N> {
    let mut dims = tensor.dims;
    dims[0] = dims[0].min(rows);
    Tensor { dims, ..tensor }
}

/// The elements of a tensor; none if there is no tensor.
fn copied<T: TensorElement, const N: usize>(
    device: &dyn Device,
    tensor: Option<Tensor<N>>,
) -> Result<Vec<T>, Error> {
    tensor.map_or(Ok(Vec::new()), |tensor| device.download_tensor(&tensor))
}

/// Number of rows by expert.
fn rows_by_expert(row_offsets: &[u32], capacity: usize) -> Result<usize, Error> {
    require_offsets(row_offsets)?;
    let rows = row_offsets.last().map_or(0, |&end| end as usize);
    if rows > capacity {
        let wanted = format!("at most {capacity}, the rows that there are");
        return Err(no_offsets(row_offsets, wanted));
    }
    Ok(rows)
}

/// Number of compact rows.
fn compact_rows(source_counts: &[i32], capacity: usize) -> Result<usize, Error> {
    let rows = (source_counts.iter()).try_fold(0_usize, |sum, &rows| {
        sum.checked_add(usize::try_from(rows).ok()?)
    });
    rows.filter(|&rows| rows <= capacity).ok_or_else(|| {
        Error::Tensor(TensorError {
            tensor: "source_counts",
            wanted: format!(
                "numbers of rows, at most {capacity} together, the rows that there are"
            ),
            given: format!("{source_counts:?}"),
        })
    })
}

impl DispatchBuffers {
    /// Copies this rank's tokens to the device: BF16 `x` (as `bf16` of the crate `half`, version 2, or as
    /// `u16`) `[tokens, hidden]`, `topk_ids` (as `i32` or `i64`) and the router's weights `[tokens, top_k]`.
    /// The first call allocates memory for `max_tokens_per_rank` tokens, and every later one copies to the
    /// same addresses, also for a captured graph, until [`free`](Self::free) frees them. No kernel may still
    /// read the copies of an earlier call. Not collective; synchronizes.
    ///
    /// # Errors
    /// [`Error::TooManyTokens`]; [`Error::Tensor`] for lengths or elements that do not fit; errors of the
    /// device.
    pub fn upload<T: TensorElement, I: TensorElement>(
        &mut self,
        x: &[T],
        topk_ids: &[I],
        topk_weights: Option<&[f32]>,
    ) -> Result<DispatchInput, Error> {
        const { has_its_bits::<T>() };
        const { has_its_bits::<I>() };
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
                Tensor::contiguous(inputs.topk_ids, I::DATA_TYPE, ids),
            )
        };
        input.x.require("x", input.x.dims, Element::BF16_ROW)?;
        input.require_ids(&self.plan)?;
        device.upload(inputs.x, bytemuck::cast_slice(x))?;
        device.upload(inputs.topk_ids, bytemuck::cast_slice(topk_ids))?;
        if let Some(weights) = topk_weights {
            device.upload(inputs.topk_weights, bytemuck::cast_slice(weights))?;
        }
        Ok(input)
    }

    /// Copies the outputs of a dispatch, as [`DispatchOutput::download`] does. Call
    /// [`synchronize`](crate::Communicator::synchronize) with the dispatch's stream first. Not collective;
    /// synchronizes only with the device's own stream.
    ///
    /// # Errors
    /// Those of [`DispatchOutput::download`].
    pub fn download(&self) -> Result<ReceivedRows, Error> {
        self.output().download(&self.plan, &**self.memory.device())
    }
}

impl CombineBuffers {
    /// Copies the experts' outputs to the device: BF16 rows (as `bf16` of the crate `half`, version 2, or as
    /// `u16`) in the order of `output`, up to its capacity and at least up to the last row with a token.
    /// Fewer are not detected, and combine then sums undefined rows. It reads no row that pads a group or has
    /// no token, so these may hold anything. The first call allocates memory for the capacity of `output`,
    /// and later ones copy to the same address, unless the capacity grows; [`free`](Self::free) frees it. No
    /// kernel may still read the copies of an earlier call. The other fields of the input are `None`: with
    /// [`KeptRows::combine_weights`](crate::KeptRows::combine_weights) set `received_weights`. Not
    /// collective; synchronizes.
    ///
    /// # Errors
    /// [`Error::Tensor`] for lengths or elements that do not fit; errors of the device.
    pub fn upload<T: TensorElement>(
        &mut self,
        output: &DispatchOutput,
        rows: &[T],
    ) -> Result<CombineInput, Error> {
        const { has_its_bits::<T>() };
        let dims = [output.capacity(), self.plan.config().hidden];
        let wanted = Tensor::contiguous(DevicePtr::NULL, T::DATA_TYPE, dims);
        let [capacity, hidden] = dims;
        if !rows.len().is_multiple_of(hidden) || rows.len() / hidden > capacity {
            return Err(Error::Tensor(TensorError {
                tensor: "expert_rows",
                wanted: format!(
                    "[rows, {hidden}], a multiple of {hidden} elements, with at most {capacity} rows"
                ),
                given: rows.len().to_string(),
            }));
        }
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
    /// [`synchronize`](crate::Communicator::synchronize) with the combine's stream first. Not collective;
    /// synchronizes only with the device's own stream.
    ///
    /// # Errors
    /// [`Error::TooManyTokens`]; [`Error::Tensor`] if the result's elements are not `T`; errors of the
    /// device.
    pub fn download<T: TensorElement>(&self, tokens: usize) -> Result<Vec<T>, Error> {
        let rows = self.output(tokens)?.rows();
        self.memory.device().download_named("combined", &rows)
    }

    /// Copies the weights that came back in a round to which this rank brought `tokens` tokens, `[tokens,
    /// top_k]`; none unless the plan has [`combine_weights`](crate::KeptRows::combine_weights). As
    /// [`download`](Self::download).
    ///
    /// # Errors
    /// [`Error::TooManyTokens`]; errors of the device.
    pub fn download_weights(&self, tokens: usize) -> Result<Vec<f32>, Error> {
        copied(&**self.memory.device(), self.output(tokens)?.weights())
    }
}

/// Checks that the offsets begin with 0 and never decrease.
pub(crate) fn require_offsets(row_offsets: &[u32]) -> Result<(), Error> {
    if row_offsets.first().is_none_or(|&first| first == 0) && row_offsets.is_sorted() {
        return Ok(());
    }
    Err(no_offsets(
        row_offsets,
        "offsets of a dispatch: 0, and numbers that never decrease".to_owned(),
    ))
}

/// Checks that the offsets are those of padded blocks of `block` rows.
pub(crate) fn require_blocks(row_offsets: &[u32], block: usize) -> Result<(), Error> {
    let mut all = row_offsets.iter().enumerate();
    if all.all(|(expert, &first)| first as usize == expert * block) {
        return Ok(());
    }
    let wanted = format!("offsets of a dispatch: padded blocks have {block} rows each");
    Err(no_offsets(row_offsets, wanted))
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
