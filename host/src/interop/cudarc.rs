//! Streams and memory of the crate `cudarc`.
//!
//! A [`Lease`](crate::Lease) of a stream passes slices and views to the calls of one rank. It
//! keeps `cudarc`'s guards: dropped after the calls, it tells `cudarc` that the stream has used the
//! memory, so that other streams of `cudarc` wait, and a slice that is dropped is freed after the kernels.
//! Ferry and `CudaContext::new` use the same context, the device's primary one; streams and memory of another
//! context or device are refused.
//!
//! The caller of [`Lease::new`](crate::Lease::new) promises for `CudaContext::per_thread_stream` that the
//! lease, its calls and all other uses of the slices stay on one thread; and if event tracking is disabled,
//! to order streams and to free no slice before the kernels have ended.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use cudarc::driver::CudaContext;
//! use ferry::*;
//! use half::bf16;
//!
//! let group = Group::local(&[0], &GroupOptions::default())?;
//! let plan = Plan::new(&group, Config::new(8, 2, 7168, 4))?;
//! let mut rank = Communicator::new(&group, &plan)?.remove(0);
//! let rows = DispatchBuffers::new(rank.device(), &plan)?;
//! let sums = CombineBuffers::new(rank.device(), &plan)?;
//!
//! let stream = CudaContext::new(0)?.new_stream()?;
//! let x = stream.clone_htod(&vec![bf16::ONE; 4 * 7168])?;
//! let topk_ids = stream.clone_htod(&[0, 1, 2, 3, 4, 5, 6, 7])?;
//! // SAFETY: its tensors are used until `drop`, and no graph is captured.
//! let mut lease = unsafe { Lease::new(rank.device(), &stream)? };
//! let input = DispatchInput::new(lease.tensor(&x, [4, 7168])?, lease.tensor(&topk_ids, [4, 2])?);
//! rank.dispatch(lease.stream(), &input, rows.output())?;
//! let experts = CombineInput::new(rows.output().tokens()?);
//! rank.combine(lease.stream(), &experts, &sums.output(4)?)?;
//! drop(lease);
//! # Ok(())
//! # }
//! ```
//!
//! # Graphs
//!
//! A round is captured between `CudaStream::begin_capture` and `end_capture`, on a stream that is not the
//! default one. `cudarc`'s graph knows nothing of Ferry:
//!
//! - Before the capture, call `CudaContext::disable_event_tracking`, and drop the lease before
//!   `end_capture`. Otherwise the guards wait for, and record, events of streams outside the capture, which
//!   the driver refuses.
//! - The graph keeps neither slices nor communicators. Drop it before the slices, and say that it is gone,
//!   so that the communicator can be closed:
//!   [`assume_no_foreign_graphs`](crate::Communicator::assume_no_foreign_graphs).
//!   [`CudaDevice::capture`] makes a graph that keeps its communicators.
//! - A captured round is collective: every rank replays its graph as often as the others.

use std::sync::Arc;

use ::cudarc::driver::{CudaContext, CudaSlice, CudaStream, CudaView, CudaViewMut, UnifiedSlice};
use ::cudarc::driver::{
    DevicePtr as _, DevicePtrMut as _, DeviceRepr, DeviceSlice as _, SyncOnDrop,
};

use crate::cuda::CudaDevice;
use crate::device::Device;
use crate::error::Error;
use crate::interop::lease::{AsStream, AsTensor};
use crate::interop::{cuda, require_elements};
use crate::tensor::Tensor;
use crate::tensor::data_type::{TensorElement, has_its_bits};
use crate::tensor::handles::{DevicePtr, Stream};

/// Checks that a context is the primary one of `device`, as those of `CudaContext::new` are. Not collective.
/// Does not synchronize.
///
/// # Errors
/// [`Error::OtherDevice`], [`Error::Cuda`].
pub fn require_context(device: &CudaDevice, context: &CudaContext) -> Result<(), Error> {
    require(device, "the context", context)
}

fn require(device: &CudaDevice, what: &'static str, context: &CudaContext) -> Result<(), Error> {
    // SAFETY: `context` is borrowed, so it is live.
    unsafe { device.require_context(what, context.cu_ctx().cast()) }
}

// SAFETY: a stream of `cudarc`'s is destroyed when it is dropped; its context is checked.
unsafe impl AsStream for Arc<CudaStream> {
    unsafe fn as_stream(&self, device: &dyn Device) -> Result<Stream, Error> {
        require(cuda("the stream", device)?, "the stream", self.context())?;
        // SAFETY: it is of the device's primary context, and outlives its use: documented on
        // `AsStream::as_stream`.
        Ok(unsafe { Stream::new(self.cu_stream().addr() as u64) })
    }
}

macro_rules! memory {
    ($($reference:ty: $address:ident),+ $(,)?) => {$(
        // SAFETY: the memory has `num_bytes` bytes until it is dropped, and the guard orders `cudarc`'s other
        // streams; the memory's context is checked.
        unsafe impl<'a, T: DeviceRepr + TensorElement> AsTensor<'a, Arc<CudaStream>> for $reference {
            type Guard = SyncOnDrop<'a>;

            unsafe fn as_tensor<const N: usize>(
                self,
                device: &dyn Device,
                stream: &'a Arc<CudaStream>,
                dims: [usize; N],
            ) -> Result<(Tensor<N>, SyncOnDrop<'a>), Error> {
                const { has_its_bits::<T>() };
                require_elements("slice", self.len(), dims)?;
                require(cuda("the memory", device)?, "the memory", self.stream().context())?;
                let bytes = self.num_bytes() as u64;
                let (address, guard) = self.$address(stream);
                let at = match bytes {
                    0 => DevicePtr::NULL,
                    // SAFETY: the memory has `bytes` bytes, of the device's primary context, and outlives
                    // its use: documented on `AsTensor::as_tensor`.
                    _ => unsafe { DevicePtr::new(address, bytes) },
                };
                Ok((Tensor::contiguous(at, T::DATA_TYPE, dims), guard))
            }
        }
    )+};
}

memory!(
    &'a CudaSlice<T>: device_ptr,
    &'a CudaView<'_, T>: device_ptr,
    &'a CudaViewMut<'_, T>: device_ptr,
    &'a UnifiedSlice<T>: device_ptr,
    &'a mut CudaSlice<T>: device_ptr_mut,
    &'a mut CudaViewMut<'_, T>: device_ptr_mut,
    &'a mut UnifiedSlice<T>: device_ptr_mut,
);
