//! Streams, memory and contexts of the crate `cust`.
//!
//! They belong to the device's primary context, as does `cust::context::Context`. Make them
//! while [`CudaDevice::enter`]'s guard is kept, or after `cust`'s own context was made current;
//! [`require_current`] checks that.
//!
//! `cust`'s copies that are not `async` wait for its streams, and the streams for them. A thread that drives
//! several ranks makes none from its first rank's dispatch until all ranks' rounds have ended: such a
//! copy would wait for a kernel that waits for a rank whose turn has not come.
//!
//! The caller of [`Lease::new`](crate::Lease::new) promises that buffers are neither used nor dropped, and
//! the stream is not dropped, until all enqueued work has ended.
//!
//! `cust` links the CUDA driver. Without a CUDA installation, its build looks for the library
//! to link with in the folder that the variable `CUDA_LIBRARY_PATH` names.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use cust::memory::DeviceBuffer;
//! use cust::stream::{Stream, StreamFlags};
//!
//! let group = ferry::Group::local(&[0], &ferry::GroupOptions::default())?;
//! let plan = ferry::Plan::new(&group, ferry::Config::new(8, 2, 7168, 4))?;
//! let rank = ferry::Communicator::new(&group, &plan)?.remove(0);
//! let device = group.cuda(ferry::Rank(0)).expect("a local group has CUDA devices");
//! let _current = device.enter()?;
//! let stream = Stream::new(StreamFlags::DEFAULT, None)?;
//! let x = DeviceBuffer::from_slice(&[0x3f80_u16; 4 * 7168])?;
//! // SAFETY: stream and buffer outlive the work enqueued with them below; no graph is captured.
//! let mut lease = unsafe { ferry::Lease::new(rank.device(), &stream)? };
//! let x = lease.tensor(&x, [4, 7168])?;
//! # let _ = x;
//! # Ok(())
//! # }
//! ```

use ::cust::memory::{DeviceBuffer, DeviceCopy};

use crate::cuda::CudaDevice;
use crate::device::Device;
use crate::error::Error;
use crate::interop::lease::{AsStream, AsTensor};
use crate::interop::{cuda, require_elements};
use crate::tensor::Tensor;
use crate::tensor::data_type::{TensorElement, has_its_bits};
use crate::tensor::handles::{DevicePtr, Stream};

/// Checks that `cust`'s current context, which is this thread's, is the primary one of `device`. Not
/// collective. Does not synchronize.
///
/// # Errors
/// [`Error::OtherDevice`], [`Error::Cuda`].
pub fn require_current(device: &CudaDevice) -> Result<(), Error> {
    device.require_current()
}

// SAFETY: a stream of `cust`'s is destroyed when it is dropped; its context is checked.
unsafe impl AsStream for ::cust::stream::Stream {
    unsafe fn as_stream(&self, device: &dyn Device) -> Result<Stream, Error> {
        // SAFETY: the stream is of the device, which is checked below, and outlives its use: documented on
        // `AsStream::as_stream`.
        let stream = unsafe { Stream::new(self.as_inner().addr() as u64) };
        // SAFETY: `self` is borrowed, so it is live.
        unsafe { cuda("the stream", device)?.require_stream(stream) }?;
        Ok(stream)
    }
}

// SAFETY: a buffer has memory for its elements until it is dropped; its device is checked.
unsafe impl<'a, S, T: DeviceCopy + TensorElement> AsTensor<'a, S> for &'a DeviceBuffer<T> {
    type Guard = ();

    unsafe fn as_tensor<const N: usize>(
        self,
        device: &dyn Device,
        _: &'a S,
        dims: [usize; N],
    ) -> Result<(Tensor<N>, ()), Error> {
        const { has_its_bits::<T>() };
        require_elements("buffer", self.len(), dims)?;
        let bytes = (self.len() * size_of::<T>()) as u64;
        if bytes == 0 {
            let nothing = Tensor::contiguous(DevicePtr::NULL, T::DATA_TYPE, dims);
            return Ok((nothing, ()));
        }
        // SAFETY: the buffer has `bytes` bytes, and outlives its use: documented on `AsTensor::as_tensor`.
        let memory = unsafe { DevicePtr::new(self.as_device_ptr().as_raw(), bytes) };
        cuda("the memory", device)?.require_memory(memory)?;
        Ok((Tensor::contiguous(memory, T::DATA_TYPE, dims), ()))
    }
}

// SAFETY: as above; nobody else uses the buffer.
unsafe impl<'a, S, T: DeviceCopy + TensorElement> AsTensor<'a, S> for &'a mut DeviceBuffer<T> {
    type Guard = ();

    unsafe fn as_tensor<const N: usize>(
        self,
        device: &dyn Device,
        stream: &'a S,
        dims: [usize; N],
    ) -> Result<(Tensor<N>, ()), Error> {
        let shared: &'a DeviceBuffer<T> = self;
        // SAFETY: the rules of `AsTensor::as_tensor` are the same for both references.
        unsafe { shared.as_tensor(device, stream, dims) }
    }
}
