//! Streams and memory of the crate `cudarc`.
//!
//! A [`Lease`] gives slices and views of `cudarc` as tensors, and its stream, to the calls of one rank. It
//! keeps `cudarc`'s guards: dropped after the calls, it tells `cudarc` that the stream has used the
//! memory, so that other streams of `cudarc` wait, and a slice that is dropped is freed behind the kernels.
//! Ferry and `CudaContext::new` use the same context, the device's primary one; what is of another context or
//! device is refused.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use cudarc::driver::CudaContext;
//! use ferry::cudarc::Lease;
//! use ferry::*;
//! use half::bf16;
//!
//! let group = Group::local(&[0], &GroupOptions::default())?;
//! let plan = Plan::new(&group, Config::new(8, 2, 7168, 4))?;
//! let mut rank = Communicator::new(&group, &plan)?.remove(0);
//! let device = group.cuda(Rank(0)).expect("a local group has CUDA devices");
//! let rows = DispatchBuffers::new(rank.device(), &plan)?;
//! let sums = CombineBuffers::new(rank.device(), &plan)?;
//!
//! let stream = CudaContext::new(device.ordinal())?.new_stream()?;
//! let x = stream.clone_htod(&vec![bf16::ONE; 4 * 7168])?;
//! let topk_ids = stream.clone_htod(&[0, 1, 2, 3, 4, 5, 6, 7])?;
//! // SAFETY: its tensors are used until `drop`, and no graph is captured.
//! let mut lease = unsafe { Lease::new(&device, &stream)? };
//! let input = DispatchInput::new(lease.read(&x, [4, 7168])?, lease.read(&topk_ids, [4, 2])?);
//! rank.dispatch(lease.stream(), &input, rows.output())?;
//! let experts = CombineInput::new(rows.output().tokens);
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
//!   `end_capture`. Else the guards wait for, and record, events of streams outside the capture, which
//!   the driver refuses.
//! - The graph keeps neither slices nor communicators. Drop it before the slices, and say that it is gone,
//!   so that the communicator can be closed:
//!   [`assume_no_foreign_graphs`](crate::Communicator::assume_no_foreign_graphs).
//!   [`CudaDevice::capture`] makes a graph that keeps what it needs of Ferry.
//! - A captured round is collective: every rank replays its graph as often as the others.

use std::sync::Arc;

use ::cudarc::driver::{CudaContext, CudaStream, DevicePtr as Readable, DevicePtrMut as Writable};
use ::cudarc::driver::{DeviceRepr, SyncOnDrop};

use crate::cuda::CudaDevice;
use crate::error::{Error, TensorError};
use crate::tensor::Tensor;
use crate::tensor::data_type::{DataType, TensorElement, has_its_bits};
use crate::tensor::handles::{DevicePtr, Stream};

/// Checks that a context is the primary one of `device`, as those of `CudaContext::new` are. Not collective.
/// Does not synchronise.
///
/// # Errors
/// [`Error::OtherDevice`], [`Error::Cuda`].
pub fn require_context(device: &CudaDevice, context: &CudaContext) -> Result<(), Error> {
    require(device, "the context", context)
}

fn require(device: &CudaDevice, what: &'static str, context: &CudaContext) -> Result<(), Error> {
    // SAFETY: `context` is borrowed, so it lives.
    unsafe { device.require_context(what, context.cu_ctx().cast()) }
}

/// Memory of `cudarc` for calls on one of its streams, until it is dropped.
///
/// The slices stay borrowed, and the guards stay, while it lives. Keep one for the calls of a
/// round, or one for each call.
#[must_use]
pub struct Lease<'a> {
    device: &'a CudaDevice,
    stream: &'a CudaStream,
    guards: Vec<SyncOnDrop<'a>>,
}

impl<'a> Lease<'a> {
    /// Begins a lease for calls on `device` and `stream`. Not collective. Does not synchronise.
    ///
    /// # Safety
    /// Until the last copy of what [`stream`](Self::stream), [`read`](Self::read), [`write`](Self::write) and
    /// the methods beside them gave was passed to a call, the lease lives. A split call's wait is one, too.
    /// What `read` and `read_bytes` gave is no output of a call. The lease is dropped, not forgotten. Where
    /// the stream is that of `CudaContext::per_thread_stream`, the lease, its calls and whatever else uses
    /// the slices stay on one thread.
    /// Where event tracking is disabled, the caller orders streams and frees no slice before the kernels
    /// have ended. A graph that is captured meanwhile is not launched after a slice was dropped. No capture
    /// of the stream begins or ends during a call.
    ///
    /// # Errors
    /// [`Error::OtherDevice`] where the stream is not of the device's primary context, [`Error::Cuda`].
    pub unsafe fn new(device: &'a CudaDevice, stream: &'a Arc<CudaStream>) -> Result<Self, Error> {
        require(device, "the stream", stream.context())?;
        Ok(Self {
            device,
            stream,
            guards: Vec::new(),
        })
    }

    /// The stream, for calls.
    pub fn stream(&self) -> Stream {
        // SAFETY: it is of the device's primary context, and the caller of `new` promised the rest.
        unsafe { Stream::new(self.stream.cu_stream().addr() as u64) }
    }

    /// A `CudaSlice` or a view as a tensor without gaps that calls read: its first elements, of which it may
    /// have more. The stream waits for what was written to it on other streams of `cudarc`. Not
    /// collective. Does not synchronise.
    ///
    /// # Errors
    /// [`Error::Tensor`] where there are fewer elements, [`Error::OtherDevice`], [`Error::Cuda`].
    pub fn read<T: DeviceRepr + TensorElement, const N: usize>(
        &mut self,
        memory: &'a impl Readable<T>,
        dims: [usize; N],
    ) -> Result<Tensor<N>, Error> {
        const { has_its_bits::<T>() };
        require_elements(memory.len(), dims)?;
        Ok(Tensor::contiguous(
            self.read_bytes(memory)?,
            T::DATA_TYPE,
            dims,
        ))
    }

    /// As [`read`](Self::read), for what calls write. The stream waits for what used it on other
    /// streams of `cudarc`, too.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn write<T: DeviceRepr + TensorElement, const N: usize>(
        &mut self,
        memory: &'a mut impl Writable<T>,
        dims: [usize; N],
    ) -> Result<Tensor<N>, Error> {
        const { has_its_bits::<T>() };
        require_elements(memory.len(), dims)?;
        Ok(Tensor::contiguous(
            self.write_bytes(memory)?,
            T::DATA_TYPE,
            dims,
        ))
    }

    /// All memory of a `CudaSlice` or a view, for calls to read: elements of 4 bits are made a [`Tensor`] of.
    ///
    /// # Errors
    /// [`Error::OtherDevice`], [`Error::Cuda`].
    pub fn read_bytes<T: DeviceRepr>(
        &mut self,
        memory: &'a impl Readable<T>,
    ) -> Result<DevicePtr, Error> {
        require(self.device, "the memory", memory.stream().context())?;
        let bytes = memory.num_bytes();
        let (address, guard) = memory.device_ptr(self.stream);
        Ok(self.keep(address, bytes, guard))
    }

    /// All memory of a `CudaSlice` or a view, for calls to write.
    ///
    /// # Errors
    /// As [`read_bytes`](Self::read_bytes).
    pub fn write_bytes<T: DeviceRepr>(
        &mut self,
        memory: &'a mut impl Writable<T>,
    ) -> Result<DevicePtr, Error> {
        require(self.device, "the memory", memory.stream().context())?;
        let bytes = memory.num_bytes();
        let (address, guard) = memory.device_ptr_mut(self.stream);
        Ok(self.keep(address, bytes, guard))
    }

    fn keep(&mut self, address: u64, bytes: usize, guard: SyncOnDrop<'a>) -> DevicePtr {
        self.guards.push(guard);
        if bytes == 0 {
            return DevicePtr::NULL;
        }
        // SAFETY: `cudarc` has so many bytes there, of the device's primary context, borrowed as long as the
        // lease lives; the caller of `new` promised that nothing is enqueued later.
        unsafe { DevicePtr::new(address, bytes as u64) }
    }
}

fn require_elements<const N: usize>(given: usize, dims: [usize; N]) -> Result<(), Error> {
    let wanted = Tensor::contiguous(DevicePtr::NULL, DataType::U8, dims).elements();
    if wanted <= given {
        return Ok(());
    }
    Err(Error::from(TensorError {
        tensor: "slice",
        wanted: format!("{wanted} elements (shape {dims:?})"),
        given: given.to_string(),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slice_is_as_long_as_its_shape_at_least() {
        assert!(require_elements(12, [3, 4]).is_ok());
        assert!(require_elements(0, [0, 4]).is_ok());
        let error = require_elements(11, [3, 4]).unwrap_err().to_string();
        assert_eq!(
            error,
            "tensor slice: wanted 12 elements (shape [3, 4]), given 11"
        );
        assert!(require_elements(usize::MAX - 1, [usize::MAX, 2]).is_err());
    }
}
