//! Tensors of the crate `candle-core`.
//!
//! A [`Lease`] of a candle device passes tensors to the calls of one rank, and the device's stream, on which
//! candle enqueues the readers of their outputs. So nothing waits, and kernels of candle and Ferry alternate
//! in order.
//!
//! Make that device with `Device::new_cuda_with_stream`. The device of `Device::new_cuda` has another default
//! stream on each thread, so the order is lost once tensors move between threads: it is refused, as are
//! tensors of devices with other streams.
//!
//! The caller of [`Lease::new`] promises that no other stream uses the tensors until the device's was
//! synchronized. Clones of a tensor share its memory, so a shared reference is enough for outputs. Candle's
//! writes in place to a leased tensor wait until the lease is dropped: drop it before.
//!
//! Nothing is differentiable, and tensors must have no gaps: call `contiguous` before.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use candle_core::{DType, Device, Tensor};
//! use ferry::*;
//!
//! # fn experts(rows: &Tensor, ends: &Tensor) -> candle_core::Result<Tensor> {
//! #     rows.broadcast_add(ends)
//! # }
//! # let [x, topk_ids]: [Tensor; 2] = std::process::exit(0);
//! let group = Group::local(&[0], &GroupOptions::default())?;
//! let plan = Plan::new(&group, Config::new(8, 2, 7168, 4))?;
//! let mut rank = Communicator::new(&group, &plan)?.remove(0);
//! let gpu = Device::new_cuda_with_stream(0)?;
//! let layout = plan.output_layout(Capacity::max(&plan))?;
//! let rows = layout.iter().map(|layout| ferry::candle::zeros(layout, &gpu));
//! let rows = rows.collect::<candle_core::Result<Vec<_>>>()?; // tokens, row_offsets, ..
//! let sums = Tensor::zeros((4, 7168), DType::BF16, &gpu)?;
//!
//! // SAFETY: no other stream uses the tensors, and no graph is captured.
//! let mut lease = unsafe { Lease::new(rank.device(), &gpu)? };
//! let ids = lease.tensor(&topk_ids, [4, 2])?;
//! let input = DispatchInput::new(lease.tensor(&x, [4, 7168])?, ids);
//! let output = lease.dispatch_output(&plan, &rows)?;
//! rank.dispatch(lease.stream(), &input, &output)?;
//! let answers = experts(&rows[0], &rows[1])?;
//! let answers = CombineInput::new(lease.tensor(&answers, output.tokens.unwrap().dims)?);
//! let sums = CombineOutput::Summed(lease.tensor(&sums, [4, 7168])?);
//! rank.combine(lease.stream(), &answers, &sums)?;
//! # Ok(())
//! # }
//! ```

use std::ops::Range;
use std::sync::Arc;

use ::candle_core::cuda_backend::CudaStorageSlice;
use ::candle_core::{DType, Device as CandleDevice, Result, Storage, StorageRef, Tensor as Candle};
use ::cudarc::driver::{CudaSlice, CudaStream, DeviceRepr};

use crate::call::DispatchOutput;
use crate::call::tensors::TensorLayout;
use crate::device::Device;
use crate::error::{Error, TensorError};
use crate::interop::lease::{AsStream, AsTensor, Lease};
use crate::plan::Plan;
use crate::plan::capacity::Capacity;
use crate::tensor::Tensor;
use crate::tensor::data_type::{DataType, TensorElement};
use crate::tensor::handles::{DevicePtr, Stream};

/// `CU_STREAM_PER_THREAD`: the handle of another stream on each thread.
const STREAM_PER_THREAD: usize = 2;

/// Allocates an output of a dispatch on a CUDA device, zeroed, so that padding rows are numbers. Codes and
/// their scales are U8, 4-bit codes two a byte. Not collective. Does not synchronize.
///
/// # Errors
/// Errors of candle.
pub fn zeros(layout: &TensorLayout, device: &CandleDevice) -> Result<Candle> {
    let (dims, dtype) = stored(layout);
    Candle::zeros(dims, dtype, device)
}

/// Shape and elements of an output in candle.
fn stored(layout: &TensorLayout) -> (Vec<usize>, DType) {
    let mut dims = layout.dims.clone();
    if let (DataType::E2m1, Some(codes)) = (layout.data_type, dims.last_mut()) {
        *codes /= 2;
    }
    let dtype = match layout.data_type {
        DataType::Bf16 => DType::BF16,
        DataType::F32 => DType::F32,
        DataType::I32 => DType::I32,
        DataType::I64 => DType::I64,
        DataType::U32 => DType::U32,
        _ => DType::U8,
    };
    (dims, dtype)
}

impl<'a> Lease<'a, CandleDevice> {
    /// Returns outputs in tensors of candle, which [`zeros`] made from the plan's
    /// [layout](Plan::output_layout), in its order. Not collective. Does not synchronize.
    ///
    /// # Errors
    /// [`Error::Tensor`] for a tensor of another type or shape, and for more or fewer tensors; and
    /// those of [`Plan::output_layout`] and [`Lease::tensor`].
    pub fn dispatch_output(
        &mut self,
        plan: &Plan,
        rows: &'a [Candle],
    ) -> std::result::Result<DispatchOutput, Error> {
        let first = |tensor: &Candle| tensor.dims().first().copied().unwrap_or(0);
        let mut capacity = Capacity::default();
        let (mut tensors, mut count) = (rows.iter(), 0);
        plan.each_output(|of| {
            count += 1;
            match (of.name, tensors.next()) {
                ("src_info", Some(tensor)) => capacity.rows = first(tensor),
                // For scales that are not tiled, a number without effect.
                ("scales", Some(tensor)) => capacity.scale_blocks = first(tensor),
                ("ids", Some(tensor)) => capacity.wide_ids = tensor.dtype() == DType::I64,
                _ => {}
            }
            Ok::<_, Error>(())
        })?;
        if rows.len() != count {
            // Each would be taken for another one.
            let none = vec![DevicePtr::NULL; rows.len()];
            return DispatchOutput::from_addresses(plan, Capacity::max(plan), &none);
        }
        let layout = plan.output_layout(capacity)?;
        let mut at = Vec::new();
        for (layout, tensor) in layout.iter().zip(rows) {
            let (wanted, given) = (stored(layout), kind(tensor));
            if wanted != given {
                return Err(refused(layout.name, text(Some(wanted)), text(Some(given))));
            }
            // SAFETY: the guard is kept until the lease is dropped; the memory's use is documented on
            // `Lease::new`.
            let (all, guard) = unsafe { flat(tensor, &*self.device, self.stream) }?;
            self.guards.push(Box::new(guard));
            at.push(all.at);
        }
        DispatchOutput::from_addresses(plan, capacity, &at)
    }
}

fn kind(tensor: &Candle) -> (Vec<usize>, DType) {
    (tensor.dims().to_vec(), tensor.dtype())
}

fn text(kind: Option<(Vec<usize>, DType)>) -> String {
    kind.map_or("none".to_owned(), |(dims, dtype)| {
        format!("{dtype:?} of shape {dims:?}")
    })
}

fn refused(tensor: &'static str, wanted: String, given: String) -> Error {
    Error::from(TensorError {
        tensor,
        wanted,
        given,
    })
}

/// Returns the device's stream, if it is the same one on every thread.
fn stream_of(device: &CandleDevice) -> std::result::Result<Arc<CudaStream>, Error> {
    let given = match device.as_cuda_device().map(|device| device.cuda_stream()) {
        Ok(stream) if stream.cu_stream().addr() != STREAM_PER_THREAD => return Ok(stream),
        Ok(_) => "one with another stream on each thread".to_owned(),
        Err(_) => format!("{:?}", device.location()),
    };
    let wanted = "a device of `Device::new_cuda_with_stream`".to_owned();
    Err(refused("of candle", wanted, given))
}

// SAFETY: the stream is the device's, and lives as long; its context is checked.
unsafe impl AsStream for CandleDevice {
    unsafe fn as_stream(&self, device: &dyn Device) -> std::result::Result<Stream, Error> {
        // SAFETY: the device outlives the stream's use: documented on `AsStream::as_stream`.
        unsafe { stream_of(self)?.as_stream(device) }
    }
}

// SAFETY: a tensor has its elements there until its storage is dropped or replaced, which the guard prevents.
// All of it is of one stream, which also frees it.
unsafe impl<'a> AsTensor<'a, CandleDevice> for &'a Candle {
    type Guard = StorageRef<'a>;

    unsafe fn as_tensor<const N: usize>(
        self,
        device: &dyn Device,
        stream: &'a CandleDevice,
        dims: [usize; N],
    ) -> std::result::Result<(Tensor<N>, StorageRef<'a>), Error> {
        if self.dims() != dims {
            let (wanted, given) = (format!("shape {dims:?}"), format!("{:?}", self.dims()));
            return Err(refused("of candle", wanted, given));
        }
        // SAFETY: the rules of `AsTensor::as_tensor` are those of `flat`.
        let (all, guard) = unsafe { flat(self, device, stream) }?;
        Ok((Tensor::contiguous(all.at, all.data_type, dims), guard))
    }
}

/// Returns all elements of a tensor of the device whose stream is `stream`'s, and the lock of its storage.
///
/// # Safety
/// As [`AsTensor::as_tensor`].
unsafe fn flat<'a>(
    tensor: &'a Candle,
    device: &dyn Device,
    stream: &CandleDevice,
) -> std::result::Result<(Tensor<1>, StorageRef<'a>), Error> {
    let refused = |wanted: &str, given| Err(refused("of candle", wanted.to_owned(), given));
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cuda(cuda) = &*storage else {
        return refused(
            "memory of a GPU",
            format!("{:?}", storage.device().location()),
        );
    };
    let Some((start, end)) = layout.contiguous_offsets() else {
        return refused("no gaps", format!("strides {:?}", layout.stride()));
    };
    let (at, own) = (start..end, stream_of(tensor.device())?);
    // SAFETY: the rules of this function are those of `elements`, as the storage's lock is returned.
    let all = unsafe {
        match &cuda.slice {
            CudaStorageSlice::BF16(slice) => elements(slice, at, device, &own),
            CudaStorageSlice::F16(slice) => elements(slice, at, device, &own),
            CudaStorageSlice::F32(slice) => elements(slice, at, device, &own),
            CudaStorageSlice::I32(slice) => elements(slice, at, device, &own),
            CudaStorageSlice::I64(slice) => elements(slice, at, device, &own),
            CudaStorageSlice::U32(slice) => elements(slice, at, device, &own),
            CudaStorageSlice::U8(slice) => elements(slice, at, device, &own),
            _ => {
                let given = format!("{:?}", tensor.dtype());
                return refused("BF16, F16, F32, I32, I64, U32 or U8", given);
            }
        }
    }?;
    if own.cu_stream() != stream_of(stream)?.cu_stream() {
        let wanted = "a tensor of the lease's candle device";
        return refused(wanted, "one of a device with another stream".to_owned());
    }
    Ok((all, storage))
}

/// Returns elements of a slice. Cudarc's guard is dropped: it is for other streams.
///
/// # Safety
/// As [`AsTensor::as_tensor`], with the guard of the slice's tensor.
unsafe fn elements<T: DeviceRepr + TensorElement>(
    slice: &CudaSlice<T>,
    at: Range<usize>,
    device: &dyn Device,
    stream: &Arc<CudaStream>,
) -> std::result::Result<Tensor<1>, Error> {
    let count = at.len();
    let view = slice.slice(at);
    // SAFETY: the guard of the slice's tensor is kept (documented on this function) instead of cudarc's,
    // which only orders other streams.
    let (tensor, _) = unsafe { (&view).as_tensor(device, stream, [count]) }?;
    Ok(tensor)
}
