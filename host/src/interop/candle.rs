//! Tensors of the crate `candle-core`.
//!
//! Functions over tensors, as a custom operation of candle has one output and a dispatch several.
//! They enqueue on the stream of the tensors' candle device, where candle enqueues what reads their
//! outputs. So nothing waits, and kernels of candle and Ferry alternate in order.
//!
//! Make that device with `Device::new_cuda_with_stream`. The device of `Device::new_cuda` has another default
//! stream on each thread, where the order is lost once tensors move between threads: it is refused, as are
//! tensors of devices with different streams in one call.
//!
//! Nothing is differentiable, and tensors are without gaps: call `contiguous` before.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use candle_core::{Device, Tensor};
//! use ferry::candle::{self, Rows, Tokens};
//! use ferry::*;
//!
//! # fn experts(rows: &Tensor, ends: &Tensor) -> candle_core::Result<Tensor> {
//! #     rows.broadcast_add(ends)
//! # }
//! # let [x, topk_ids, topk_weights]: [Tensor; 3] = std::process::exit(0);
//! let group = Group::local(&[0], &GroupOptions::default())?;
//! let plan = Plan::new(&group, Config::new(8, 2, 7168, 4))?;
//! let mut rank = Communicator::new(&group, &plan)?.remove(0);
//! let device = group.cuda(Rank(0)).expect("a local group has CUDA devices");
//! let gpu = Device::new_cuda_with_stream(device.ordinal())?;
//!
//! let rows = Rows::new(&plan, plan.max_rows(), &gpu)?;
//! let tokens = Tokens { x: &x, topk_ids: &topk_ids, topk_weights: Some(&topk_weights) };
//! // SAFETY: no other stream uses the tensors, and no graph is captured.
//! let sums = unsafe {
//!     candle::dispatch(&mut rank, &device, &tokens, &rows)?;
//!     let outputs = experts(&rows.tokens, &rows.row_offsets)?;
//!     candle::combine(&mut rank, &device, &outputs, x.dim(0)?)?
//! };
//! # let _ = sums;
//! # Ok(())
//! # }
//! ```

use std::sync::Arc;

use ::candle_core::cuda_backend::CudaStorageSlice;
use ::candle_core::{
    DType, Device as CandleDevice, Layout, Result, Storage, StorageRef, Tensor as Candle,
};
use ::cudarc::driver::{CudaSlice, CudaStream, CudaView, DeviceRepr, DeviceSlice as _};

use crate::call::scales::ScaleTensor;
use crate::call::{CombineInput, CombineOutput, DispatchInput, DispatchOutput};
use crate::communicator::Communicator;
use crate::cuda::CudaDevice;
use crate::error::TensorError;
use crate::interop::cudarc::Lease;
use crate::plan::Plan;
use crate::tensor::Tensor;
use crate::tensor::data_type::DataType;
use crate::tensor::handles::DevicePtr;
use ferry_layout::{ScaleLayout, TokenFormat};

/// `CU_STREAM_PER_THREAD`: the handle of another stream on each thread.
const STREAM_PER_THREAD: usize = 2;

/// What a rank brings to a dispatch: [`DispatchInput`]'s tensors.
#[derive(Clone, Copy, Debug)]
pub struct Tokens<'a> {
    /// BF16 `[tokens, hidden]`.
    pub x: &'a Candle,
    /// I32 or U32 `[tokens, top_k]`. In U32, `u32::MAX` is "not routed".
    pub topk_ids: &'a Candle,
    /// F32 `[tokens, top_k]`. `None`: all are 1.
    pub topk_weights: Option<&'a Candle>,
}

/// Where a rank receives tokens: [`DispatchOutput`]'s tensors. Made once, each dispatch writes them
/// anew; clones of candle's tensors are the same memory.
#[derive(Clone, Debug)]
pub struct Rows {
    /// `[capacity, hidden]` in BF16; in other formats U8 `[capacity, bytes of a row]`: the codes, in 4-bit
    /// formats two a byte.
    pub tokens: Candle,
    /// As [`ScaleTensor`] has them: F32 `[hidden / 128, capacity]` in blockwise FP8, U8 `[capacity,
    /// hidden / group]` in formats with row-major scales. `None` in BF16.
    pub scales: Option<Candle>,
    /// U32 `[groups + 1]`: the first row of each group, and the end of the last.
    pub row_offsets: Candle,
    /// I32 `[groups]`.
    pub expert_ids: Candle,
    /// I32 `[capacity, 2]`: each row's token on its source rank, and its top-k slot there.
    pub src_info: Candle,
}

impl Rows {
    /// Allocates outputs of `capacity` rows on a CUDA device, zeroed, so that padding rows are numbers.
    /// [`Plan::max_rows`] always suffice. Not collective. Does not synchronise.
    ///
    /// # Errors
    /// As [`dispatch`], for tiled scales and for NVFP4 with a scale a row, which these functions do not
    /// take; what candle reports.
    pub fn new(plan: &Plan, capacity: usize, device: &CandleDevice) -> Result<Self> {
        let kinds = Kinds::new(plan, capacity)?;
        let zeros = |kind: Kind| Candle::zeros(kind.dims, kind.dtype, device);
        Ok(Self {
            tokens: zeros(kinds.tokens)?,
            scales: kinds.scales.map(zeros).transpose()?,
            row_offsets: zeros(kinds.row_offsets)?,
            expert_ids: zeros(kinds.expert_ids)?,
            src_info: zeros(kinds.src_info)?,
        })
    }

    /// That they are what [`new`](Self::new) makes for the plan, of any capacity.
    fn require(&self, plan: &Plan) -> Result<()> {
        let capacity = self.tokens.dims().first().copied().unwrap_or(0);
        let kinds = Kinds::new(plan, capacity)?;
        require("tokens", Some(kinds.tokens), Some(&self.tokens))?;
        require("scales", kinds.scales, self.scales.as_ref())?;
        require(
            "row_offsets",
            Some(kinds.row_offsets),
            Some(&self.row_offsets),
        )?;
        require("expert_ids", Some(kinds.expert_ids), Some(&self.expert_ids))?;
        require("src_info", Some(kinds.src_info), Some(&self.src_info))
    }
}

/// A tensor's shape and elements.
#[derive(PartialEq)]
struct Kind {
    dims: Vec<usize>,
    dtype: DType,
}

impl Kind {
    fn new(dims: &[usize], dtype: DType) -> Self {
        let dims = dims.to_vec();
        Self { dims, dtype }
    }

    fn text(kind: Option<Self>) -> String {
        match kind {
            Some(Self { dims, dtype }) => format!("{dtype:?} of shape {dims:?}"),
            None => "none".into(),
        }
    }
}

/// What the tensors of [`Rows`] are.
struct Kinds {
    tokens: Kind,
    scales: Option<Kind>,
    row_offsets: Kind,
    expert_ids: Kind,
    src_info: Kind,
}

impl Kinds {
    fn new(plan: &Plan, capacity: usize) -> Result<Self> {
        let (format, hidden) = (plan.config().format, plan.config().hidden);
        let sizes = format.sizes();
        let scales = match (format, format.scale_layout()) {
            (TokenFormat::Bf16, _) => None,
            (_, None) => Some(Kind::new(&[hidden / 128, capacity], DType::F32)),
            (_, Some(ScaleLayout::RowMajor)) if !sizes.has_row_scale => Some(Kind::new(
                &[capacity, hidden / sizes.group as usize],
                DType::U8,
            )),
            (format, _) => {
                let wanted = "a format without tiled scales and scales of rows";
                return Err(refused("scales", wanted.into(), format!("{format:?}")));
            }
        };
        let tokens = match format {
            TokenFormat::Bf16 => Kind::new(&[capacity, hidden], DType::BF16),
            _ => Kind::new(
                &[capacity, hidden * sizes.element_bits as usize / 8],
                DType::U8,
            ),
        };
        Ok(Self {
            tokens,
            scales,
            row_offsets: Kind::new(&[plan.groups() + 1], DType::U32),
            expert_ids: Kind::new(&[plan.groups()], DType::I32),
            src_info: Kind::new(&[capacity, 2], DType::I32),
        })
    }
}

fn require(name: &'static str, wanted: Option<Kind>, given: Option<&Candle>) -> Result<()> {
    let given = given.map(|tensor| Kind::new(tensor.dims(), tensor.dtype()));
    match wanted == given {
        true => Ok(()),
        false => Err(refused(name, Kind::text(wanted), Kind::text(given))),
    }
}

fn refused(tensor: &'static str, wanted: String, given: String) -> ::candle_core::Error {
    wrap(crate::error::Error::from(TensorError {
        tensor,
        wanted,
        given,
    }))
}

/// The stream of a tensor's device, which is the same one on every thread.
fn stream_of(name: &'static str, tensor: &Candle) -> Result<Arc<CudaStream>> {
    let stream = tensor.device().as_cuda_device()?.cuda_stream();
    if stream.cu_stream().addr() != STREAM_PER_THREAD {
        return Ok(stream);
    }
    let wanted = "a device of `Device::new_cuda_with_stream`";
    let given = "one with another stream on each thread";
    Err(refused(name, wanted.into(), given.into()))
}

/// Where the tensors lie, all of them of the device whose stream is `stream`.
fn addresses<'v>(
    lease: &mut Lease<'v>,
    stream: &CudaStream,
    views: &'v [(&'static str, CudaView<'_, u8>)],
) -> Result<Vec<DevicePtr>> {
    let each = views.iter().map(|(name, view)| {
        let at = lease.read_bytes(view).map_err(wrap)?;
        match view.stream().cu_stream() == stream.cu_stream() {
            true => Ok(at),
            false => Err(refused(
                name,
                "a tensor of the same candle device as the others".into(),
                "one of a device with another stream".into(),
            )),
        }
    });
    each.collect()
}

/// Enqueues a dispatch on the stream of `tokens.x`'s device: [`Communicator::dispatch`]. `device` is the
/// rank's. Collective. Does not synchronise.
///
/// # Safety
/// No other stream uses the tensors until that stream was synchronised. A graph that is captured meanwhile
/// is not launched after one of them was dropped. No capture of the stream begins or ends during the call.
///
/// # Errors
/// Ferry's [`Error`](crate::Error) in candle's `Error::Cuda`, whose `downcast_ref` gives it:
/// [`Error::OtherDevice`](crate::Error::OtherDevice) for tensors of another GPU;
/// [`Error::Tensor`](crate::Error::Tensor) for a tensor of another type or shape, with gaps, not on a GPU, or
/// of another candle device than the others, for rows that are not what [`Rows::new`] makes, and for a
/// candle device with another stream on each thread. Then nothing was enqueued.
pub unsafe fn dispatch(
    rank: &mut Communicator,
    device: &CudaDevice,
    tokens: &Tokens<'_>,
    rows: &Rows,
) -> Result<()> {
    let plan = *rank.plan();
    rows.require(&plan)?;
    let (format, hidden, groups) = (plan.config().format, plan.config().hidden, plan.groups());
    let codes: &[DType] = match format {
        TokenFormat::Bf16 => &[DType::BF16],
        _ => &[DType::U8],
    };
    let held = [
        Held::of("x", tokens.x, &[DType::BF16]),
        Held::of("topk_ids", tokens.topk_ids, &[DType::I32, DType::U32]),
        Held::of("tokens", &rows.tokens, codes),
        Held::of("row_offsets", &rows.row_offsets, &[DType::U32]),
        Held::of("expert_ids", &rows.expert_ids, &[DType::I32]),
        Held::of("src_info", &rows.src_info, &[DType::I32]),
    ];
    let weights = tokens
        .topk_weights
        .map(|weights| Held::of("topk_weights", weights, &[DType::F32]));
    let scales = rows.scales.as_ref();
    let scales = scales.map(|scales| Held::of("scales", scales, &[DType::F32, DType::U8]));
    let views = held.iter().chain(&weights).chain(&scales).map(Held::view);
    let views = views.collect::<Result<Vec<_>>>()?;
    let stream = stream_of("x", tokens.x)?;
    // SAFETY: the tensors' memory is used by this function's call alone, on the stream of their device,
    // which also frees it. Outputs are leased as what is read, too: events of other streams are not missed,
    // as all tensors are of this one stream. The rest is the caller's promise.
    let mut lease = unsafe { Lease::new(device, &stream) }.map_err(wrap)?;
    let at = addresses(&mut lease, &stream, &views)?;
    let capacity = held[2].dims::<2>()?[0];
    let scales_at = at.last().copied().filter(|_| scales.is_some());
    let output = DispatchOutput {
        tokens: Tensor::contiguous(at[2], DataType::of_tokens(format), [capacity, hidden]),
        scales: scales_at.map(|at| scale_tensor(format, at, hidden, capacity)),
        row_scales: None,
        row_offsets: Tensor::contiguous(at[3], DataType::U32, [groups + 1]),
        expert_ids: Tensor::contiguous(at[4], DataType::I32, [groups]),
        src_info: Tensor::contiguous(at[5], DataType::I32, [capacity, 2]),
    };
    let mut input = DispatchInput::new(held[0].tensor(at[0])?, held[1].tensor(at[1])?);
    if let Some(weights) = &weights {
        input.topk_weights = Some(weights.tensor(at[6])?);
    }
    let stream = lease.stream();
    rank.dispatch(stream, &input, &output).map_err(wrap)
}

fn scale_tensor(format: TokenFormat, at: DevicePtr, hidden: usize, capacity: usize) -> ScaleTensor {
    let groups = hidden / format.sizes().group as usize;
    match format.scale_layout() {
        None => ScaleTensor::Transposed(Tensor::contiguous(at, DataType::F32, [groups, capacity])),
        // Tiled ones are no `Rows`: they are refused as what they are not.
        Some(_) => ScaleTensor::RowMajor(Tensor::contiguous(at, DataType::U8, [capacity, groups])),
    }
}

/// Enqueues a combine that sums, as the reduced mode does: BF16 `[tokens, hidden]`, allocated here.
/// Collective. Does not synchronise.
///
/// # Safety
/// As [`dispatch`].
///
/// # Errors
/// As [`dispatch`].
pub unsafe fn combine(
    rank: &mut Communicator,
    device: &CudaDevice,
    expert_rows: &Candle,
    tokens: usize,
) -> Result<Candle> {
    let hidden = rank.plan().config().hidden;
    // SAFETY: combine writes every row.
    let combined = unsafe { Candle::empty((tokens, hidden), DType::BF16, expert_rows.device()) }?;
    // SAFETY: the caller's promise; nobody has the new tensor yet.
    unsafe { combine_into(rank, device, expert_rows, None, &combined) }?;
    Ok(combined)
}

/// Enqueues a combine into `combined`, BF16 `[tokens, hidden]`, or `[tokens, top_k, hidden]` to keep rows
/// apart in exact mode. `expert_rows` are BF16 `[capacity, hidden]`; `topk_weights`, F32 `[tokens,
/// top_k]`, are for the exact mode. Collective. Does not synchronise.
///
/// # Safety
/// As [`dispatch`].
///
/// # Errors
/// As [`dispatch`].
pub unsafe fn combine_into(
    rank: &mut Communicator,
    device: &CudaDevice,
    expert_rows: &Candle,
    topk_weights: Option<&Candle>,
    combined: &Candle,
) -> Result<()> {
    let held = [
        Held::of("expert_rows", expert_rows, &[DType::BF16]),
        Held::of("combined", combined, &[DType::BF16]),
    ];
    let weights = topk_weights.map(|weights| Held::of("topk_weights", weights, &[DType::F32]));
    let views = held
        .iter()
        .chain(&weights)
        .map(Held::view)
        .collect::<Result<Vec<_>>>()?;
    let stream = stream_of("expert_rows", expert_rows)?;
    // SAFETY: as in `dispatch`.
    let mut lease = unsafe { Lease::new(device, &stream) }.map_err(wrap)?;
    let at = addresses(&mut lease, &stream, &views)?;
    let mut input = CombineInput::new(held[0].tensor(at[0])?);
    if let Some(weights) = &weights {
        input.topk_weights = Some(weights.tensor(at[2])?);
    }
    let output = match combined.rank() {
        3 => CombineOutput::Apart(held[1].tensor(at[1])?),
        _ => CombineOutput::Summed(held[1].tensor(at[1])?),
    };
    let stream = lease.stream();
    rank.combine(stream, &input, &output).map_err(wrap)?;
    Ok(())
}

fn wrap(error: crate::error::Error) -> ::candle_core::Error {
    ::candle_core::Error::Cuda(Box::new(error))
}

/// A tensor of candle's whose memory stays where it is meanwhile.
struct Held<'t> {
    name: &'static str,
    dtypes: &'static [DType],
    storage: StorageRef<'t>,
    layout: &'t Layout,
}

impl<'t> Held<'t> {
    fn of(name: &'static str, tensor: &'t Candle, dtypes: &'static [DType]) -> Self {
        let (storage, layout) = tensor.storage_and_layout();
        Self {
            name,
            dtypes,
            storage,
            layout,
        }
    }

    /// Its name, and its memory, whatever it is made of.
    fn view(&self) -> Result<(&'static str, CudaView<'_, u8>)> {
        let Self { name, dtypes, .. } = self;
        let Storage::Cuda(cuda) = &*self.storage else {
            let given = format!("{:?}", self.storage.device());
            return Err(refused(name, "memory of a GPU".into(), given));
        };
        let Some((start, end)) = self.layout.contiguous_offsets() else {
            let given = format!("strides {:?}", self.layout.stride());
            return Err(refused(name, "no gaps".into(), given));
        };
        let dtype = self.storage.dtype();
        let view = match &cuda.slice {
            _ if !dtypes.contains(&dtype) => None,
            CudaStorageSlice::BF16(slice) => bytes(slice, start, end),
            CudaStorageSlice::F32(slice) => bytes(slice, start, end),
            CudaStorageSlice::I32(slice) => bytes(slice, start, end),
            CudaStorageSlice::U32(slice) => bytes(slice, start, end),
            CudaStorageSlice::U8(slice) => bytes(slice, start, end),
            _ => None,
        };
        let view =
            view.ok_or_else(|| refused(name, format!("{dtypes:?}"), format!("{dtype:?}")))?;
        Ok((name, view))
    }

    /// The same elements at `at`.
    fn tensor<const N: usize>(&self, at: DevicePtr) -> Result<Tensor<N>> {
        let data_type = match self.storage.dtype() {
            DType::BF16 => DataType::Bf16,
            DType::F32 => DataType::F32,
            DType::I32 => DataType::I32,
            DType::U32 => DataType::U32,
            _ => DataType::U8,
        };
        Ok(Tensor::contiguous(at, data_type, self.dims()?))
    }

    fn dims<const N: usize>(&self) -> Result<[usize; N]> {
        let (name, dims) = (self.name, self.layout.dims());
        let given = |_| refused(name, format!("{N} dimensions"), format!("shape {dims:?}"));
        dims.try_into().map_err(given)
    }
}

/// Elements `start` to `end` as bytes.
fn bytes<T: DeviceRepr>(
    slice: &CudaSlice<T>,
    start: usize,
    end: usize,
) -> Option<CudaView<'_, u8>> {
    let view = slice.try_slice(start..end)?;
    // SAFETY: any memory is bytes; there are as many as the elements have.
    unsafe { view.transmute((end - start) * size_of::<T>()) }
}
