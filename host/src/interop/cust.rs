//! Streams, memory and contexts of the crate `cust`.
//!
//! They belong to the device's primary context, which is what `cust::context::Context` is. Make them
//! while [`CudaDevice::enter`]'s guard is kept, or after `cust`'s own context was made current;
//! [`require_current`] tells.
//!
//! `cust`'s copies that are not `async` wait for its streams, and those for them. A thread that drives
//! several ranks makes none from its first rank's dispatch until all ranks' rounds have ended: such a
//! copy would wait for a kernel that waits for a rank whose turn has not come.
//!
//! `cust` links the CUDA driver. Where there is no CUDA installation, its build looks for the library
//! to link with in the folder that the variable `CUDA_LIBRARY_PATH` names.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use cust::memory::DeviceBuffer;
//! use cust::stream::{Stream, StreamFlags};
//!
//! let group = ferry::Group::local(&[0], &ferry::GroupOptions::default())?;
//! let device = group.cuda(ferry::Rank(0)).expect("a local group has CUDA devices");
//! let _current = device.enter()?;
//! let stream = Stream::new(StreamFlags::DEFAULT, None)?;
//! let x = DeviceBuffer::from_slice(&[0x3f80_u16; 4 * 7168])?;
//! // SAFETY: both outlive what is enqueued with them below.
//! let (stream, x) = unsafe {
//!     (ferry::cust::stream(&device, &stream)?, ferry::cust::tensor(&device, &x, [4, 7168])?)
//! };
//! # let _ = (stream, x);
//! # Ok(())
//! # }
//! ```

use ::cust::memory::{DeviceBuffer, DeviceCopy};

use crate::cuda::CudaDevice;
use crate::error::{Error, TensorError};
use crate::tensor::Tensor;
use crate::tensor::data_type::TensorElement;
use crate::tensor::handles::{DevicePtr, Stream};

/// Checks that `cust`'s current context, which is this thread's, is the primary one of `device`. Not
/// collective. Does not synchronise.
///
/// # Errors
/// [`Error::OtherDevice`], [`Error::Cuda`].
pub fn require_current(device: &CudaDevice) -> Result<(), Error> {
    device.require_current()
}

/// A stream, for calls on `device`. Not collective. Does not synchronise.
///
/// # Safety
/// What [`Stream::new`] asks for, but that the stream is of the device, which is checked: `stream`
/// is not dropped while this value or a copy is passed to anything.
///
/// # Errors
/// [`Error::OtherDevice`], [`Error::Cuda`].
pub unsafe fn stream(
    device: &CudaDevice,
    stream: &::cust::stream::Stream,
) -> Result<Stream, Error> {
    // SAFETY: the caller's promise.
    let stream = unsafe { Stream::new(stream.as_inner().addr() as u64) };
    // SAFETY: `stream` is borrowed, so it lives.
    unsafe { device.require_stream(stream) }?;
    Ok(stream)
}

/// The memory of a buffer, all of it, to be read by calls on `device`. Not collective. Does not
/// synchronise.
///
/// # Safety
/// What [`DevicePtr::new`] asks for, but that the device is the buffer's, which is checked: `buffer`
/// is neither dropped nor borrowed as mutable until what was enqueued has ended, nor is it an output.
///
/// # Errors
/// [`Error::OtherDevice`], [`Error::Cuda`].
pub unsafe fn memory<T: DeviceCopy>(
    device: &CudaDevice,
    buffer: &DeviceBuffer<T>,
) -> Result<DevicePtr, Error> {
    let bytes = (buffer.len() * size_of::<T>()) as u64;
    if bytes == 0 {
        return Ok(DevicePtr::NULL);
    }
    // SAFETY: the buffer has so many bytes; the rest is the caller's promise.
    let memory = unsafe { DevicePtr::new(buffer.as_device_ptr().as_raw(), bytes) };
    device.require_memory(memory)?;
    Ok(memory)
}

/// As [`memory`], to be read and written.
///
/// # Safety
/// As [`memory`], but that it may be an output: `buffer` is not used until what was enqueued has ended.
///
/// # Errors
/// As [`memory`].
pub unsafe fn memory_mut<T: DeviceCopy>(
    device: &CudaDevice,
    buffer: &mut DeviceBuffer<T>,
) -> Result<DevicePtr, Error> {
    // SAFETY: the caller's promise; nobody else uses the buffer.
    unsafe { memory(device, buffer) }
}

/// A buffer as a tensor without gaps, to be read by calls on `device`: an element of `T` each, from the
/// first one on. The buffer may be longer. Not collective. Does not synchronise.
///
/// For elements of 4 bits, make a [`Tensor`] of [`memory`].
///
/// # Safety
/// As [`memory`].
///
/// # Errors
/// [`Error::Tensor`] where the buffer has fewer elements, and those of [`memory`].
pub unsafe fn tensor<T: DeviceCopy + TensorElement, const N: usize>(
    device: &CudaDevice,
    buffer: &DeviceBuffer<T>,
    dims: [usize; N],
) -> Result<Tensor<N>, Error> {
    // SAFETY: the caller's promise.
    let memory = unsafe { memory(device, buffer) }?;
    let tensor = Tensor::contiguous(memory, T::DATA_TYPE, dims);
    if tensor.elements() <= buffer.len() {
        return Ok(tensor);
    }
    Err(Error::from(TensorError {
        tensor: "buffer",
        wanted: format!("{} elements (shape {dims:?})", tensor.elements()),
        given: buffer.len().to_string(),
    }))
}

/// As [`tensor`], to be read and written.
///
/// # Safety
/// As [`memory_mut`].
///
/// # Errors
/// As [`tensor`].
pub unsafe fn tensor_mut<T: DeviceCopy + TensorElement, const N: usize>(
    device: &CudaDevice,
    buffer: &mut DeviceBuffer<T>,
    dims: [usize; N],
) -> Result<Tensor<N>, Error> {
    // SAFETY: the caller's promise; nobody else uses the buffer.
    unsafe { tensor(device, buffer, dims) }
}
