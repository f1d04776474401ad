//! Streams and memory of other libraries as [`Stream`]s and [`Tensor`]s.

use std::sync::Arc;

use crate::device::Device;
use crate::error::Error;
use crate::tensor::Tensor;
use crate::tensor::handles::Stream;

/// A stream of another library that can be used as a [`Stream`].
///
/// Implemented for `CudaStream` of cudarc, `Stream` of cust, candle's `Device` (features of these names),
/// and Ferry's own [`Stream`].
///
/// # Safety
/// The stream that [`as_stream`](Self::as_stream) returns is live for as long as `self` is, and of the
/// primary context of `device`.
pub unsafe trait AsStream {
    /// Returns the stream, for calls on `device`. Not collective. Does not synchronize.
    ///
    /// # Safety
    /// As [`Stream::new`], except that the stream is of the device, which is checked: `self` is
    /// not dropped while this value or a copy is passed to anything, nor before enqueued work has ended.
    ///
    /// # Errors
    /// [`Error::OtherDevice`], and errors of the library.
    unsafe fn as_stream(&self, device: &dyn Device) -> Result<Stream, Error>;
}

// SAFETY: a `Stream` is live while it is passed to anything, and of the device to which it is passed:
// documented on `Stream::new`.
unsafe impl AsStream for Stream {
    unsafe fn as_stream(&self, _: &dyn Device) -> Result<Stream, Error> {
        Ok(*self)
    }
}

/// Memory of another library that can be used as a [`Tensor`], for calls on a stream of type `S`: through
/// a shared reference to be read, through an exclusive one to be written.
///
/// Implemented for references to slices and views of cudarc, buffers of cust and tensors of candle (features
/// of these names). Implement it for a type of yours:
///
/// ```
/// use ferry::*;
///
/// /// Words of some engine on its device.
/// struct Words {
///     address: u64,
///     count: usize,
/// }
///
/// // SAFETY: the engine has `count` words at `address`, for as long as the value lives.
/// unsafe impl<'a, S> AsTensor<'a, S> for &'a Words {
///     type Guard = ();
///
///     unsafe fn as_tensor<const N: usize>(
///         self,
///         _: &dyn Device,
///         _: &'a S,
///         dims: [usize; N],
///     ) -> Result<(Tensor<N>, ()), Error> {
///         // SAFETY: the words are there, and outlive their use: documented on `AsTensor::as_tensor`.
///         let at = unsafe { DevicePtr::new(self.address, 4 * self.count as u64) };
///         Ok((Tensor::contiguous(at, DataType::I32, dims), ()))
///     }
/// }
///
/// # fn main() -> Result<(), Error> {
/// # let group = Group::simulated(1, 7)?;
/// # let device = group.device(Rank(0))?;
/// # let upload = device.upload_tensor([4], &[1, 2, 3, 4])?;
/// let words = Words { address: upload.at.address(), count: 4 };
/// // SAFETY: nothing is enqueued.
/// let mut lease = unsafe { Lease::new(&device, &Stream::DEFAULT)? };
/// let ids = lease.tensor(&words, [2, 2])?;
/// # assert_eq!(device.download_tensor::<i32, 2>(&ids)?, [1, 2, 3, 4]);
/// # Ok(())
/// # }
/// ```
///
/// # Safety
/// The tensor's [`at`](Tensor::at) is memory that calls on `device` and `stream` may read, and write if
/// `self` is an exclusive reference, as [`DevicePtr::new`](crate::DevicePtr::new) promises it, provided that
/// the caller keeps the promise of [`as_tensor`](Self::as_tensor).
pub unsafe trait AsTensor<'a, S>: Sized {
    /// A value that is kept until the calls have been enqueued, such as a lock, or an event that is recorded
    /// then; `()` if there is none.
    type Guard: 'a;

    /// Returns a tensor without gaps of this shape, and the guard. [`Lease::tensor`] calls it.
    ///
    /// # Safety
    /// The guard is dropped after the last copy of the tensor was passed to a call on `stream`, and the
    /// rules of [`Lease::new`] for memory are kept.
    ///
    /// # Errors
    /// [`Error::Tensor`] if the memory has another shape, or fewer elements; [`Error::OtherDevice`]; errors
    /// of the library.
    #[expect(clippy::wrong_self_convention, reason = "`self` is a reference")]
    unsafe fn as_tensor<const N: usize>(
        self,
        device: &dyn Device,
        stream: &'a S,
        dims: [usize; N],
    ) -> Result<(Tensor<N>, Self::Guard), Error>;
}

/// A guard of any type.
pub(super) trait Guard {}

impl<T> Guard for T {}

/// Memory and a stream of another library for calls of one rank: its methods return the [`Tensor`]s and the
/// [`Stream`].
///
/// The memory stays borrowed, and the library's guards stay, while the lease lives. Keep one for the calls
/// of a round, or one for each call.
#[must_use]
pub struct Lease<'a, S> {
    pub(super) device: Arc<dyn Device>,
    pub(super) stream: &'a S,
    handle: Stream,
    pub(super) guards: Vec<Box<dyn Guard + 'a>>,
}

impl<'a, S: AsStream> Lease<'a, S> {
    /// Begins a lease for calls on `device` and `stream`. Not collective. Does not synchronize.
    ///
    /// # Safety
    /// - The lease lives until the last copy of each tensor that it returned was passed to a call. A split
    ///   call's wait is one, too. It is dropped, not forgotten.
    /// - What was leased by a shared reference is no output of a call, except tensors of candle.
    /// - The stream lives while [`stream`](Self::stream)'s value or a copy is passed to anything, and
    ///   outlives the work enqueued on it. No capture of it begins or ends during a call, and a graph that is
    ///   captured meanwhile is not launched after the memory was freed.
    /// - The library's rules are kept, which are in the documentation of the modules `ferry::cudarc`,
    ///   `ferry::cust` and `ferry::candle`. For a library without rules: the memory is neither used nor freed
    ///   until all enqueued work has ended.
    ///
    /// # Errors
    /// [`Error::OtherDevice`] if the stream is not of the device's primary context, and errors of the
    /// library.
    pub unsafe fn new(device: &Arc<dyn Device>, stream: &'a S) -> Result<Self, Error> {
        Ok(Self {
            // SAFETY: the stream outlives its use: documented on this function.
            handle: unsafe { stream.as_stream(&**device) }?,
            device: device.clone(),
            stream,
            guards: Vec::new(),
        })
    }

    /// The stream, for calls.
    pub const fn stream(&self) -> Stream {
        self.handle
    }

    /// Returns memory as a tensor without gaps: `&memory` to be read by calls, `&mut memory` to be written.
    /// Memory without a shape may have more elements: the first ones are the tensor. Elements of 4 bits are
    /// leased as bytes, and made a [`Tensor`] of by its [`at`](Tensor::at). Not collective. Does not
    /// synchronize.
    ///
    /// # Errors
    /// Those of [`AsTensor::as_tensor`].
    pub fn tensor<M: AsTensor<'a, S>, const N: usize>(
        &mut self,
        memory: M,
        dims: [usize; N],
    ) -> Result<Tensor<N>, Error> {
        // SAFETY: the guard is kept until the lease is dropped; the memory's use is documented on
        // `Lease::new`.
        let (tensor, guard) = unsafe { memory.as_tensor(&*self.device, self.stream, dims) }?;
        self.guards.push(Box::new(guard));
        Ok(tensor)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use ferry_layout::Rank;

    use super::*;
    use crate::group::Group;
    use crate::tensor::data_type::DataType;
    use crate::tensor::handles::DevicePtr;

    /// Memory that counts the guards that it gave and that were dropped.
    #[derive(Default)]
    struct Counted {
        held: Cell<u32>,
    }

    struct Held<'a>(&'a Cell<u32>);

    impl Drop for Held<'_> {
        fn drop(&mut self) {
            self.0.set(self.0.get() - 1);
        }
    }

    // SAFETY: it has no memory.
    unsafe impl<'a> AsTensor<'a, Stream> for &'a Counted {
        type Guard = Held<'a>;

        unsafe fn as_tensor<const N: usize>(
            self,
            _: &dyn Device,
            _: &'a Stream,
            dims: [usize; N],
        ) -> Result<(Tensor<N>, Held<'a>), Error> {
            self.held.set(self.held.get() + 1);
            let tensor = Tensor::contiguous(DevicePtr::NULL, DataType::U8, dims);
            Ok((tensor, Held(&self.held)))
        }
    }

    #[test]
    fn guards_are_kept_until_the_lease_is_dropped() {
        let group = Group::simulated(1, 1).unwrap();
        let device = group.device(Rank(0)).unwrap();
        let (memory, stream) = (Counted::default(), Stream::DEFAULT);
        // SAFETY: nothing is enqueued.
        let mut lease = unsafe { Lease::new(&device, &stream) }.unwrap();
        assert_eq!(lease.stream(), stream);
        assert_eq!(lease.tensor(&memory, [0, 8]).unwrap().dims, [0, 8]);
        assert_eq!(lease.tensor(&memory, [0]).unwrap().dims, [0]);
        assert_eq!(memory.held.get(), 2);
        drop(lease);
        assert_eq!(memory.held.get(), 0);
    }
}
