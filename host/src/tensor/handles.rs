//! Device memory and streams as raw numbers: any engine's tensors and streams can be passed in.

use crate::error::Error;

/// Device memory: an address (`CUdeviceptr`, or one in the simulator's memory) and the number of bytes that
/// may be used from there on.
///
/// Memory of [`Device::alloc`](crate::Device::alloc) is for that device, and for those that can address its
/// memory: pass it to no others. The device cannot be told from the address, so no call checks it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DevicePtr {
    address: u64,
    bytes: u64,
}

impl DevicePtr {
    /// No memory.
    pub const NULL: Self = Self {
        address: 0,
        bytes: 0,
    };

    /// `bytes` bytes of device memory from `address` on: another library's tensor, say.
    ///
    /// # Safety
    /// For as long as this value or a copy is passed to anything, and until all work enqueued with it has
    /// ended and no graph of it is launched any more, these bytes are memory that the device to which it is
    /// passed may read and write, and the host has no reference to them.
    pub const unsafe fn new(address: u64, bytes: u64) -> Self {
        Self { address, bytes }
    }

    /// The address; 0 for no memory.
    pub const fn address(self) -> u64 {
        self.address
    }

    /// Number of bytes that may be used from the address on.
    pub const fn bytes(self) -> u64 {
        self.bytes
    }

    /// Offsets the pointer by `bytes`; empty past the end.
    pub const fn plus(self, bytes: u64) -> Self {
        Self {
            address: self.address.wrapping_add(bytes),
            bytes: self.bytes.saturating_sub(bytes),
        }
    }

    /// Checks that there are `bytes` bytes for `call`.
    pub(crate) const fn require(self, call: &'static str, bytes: u64) -> Result<(), Error> {
        if bytes <= self.bytes {
            return Ok(());
        }
        Err(Error::MemoryTooShort {
            call,
            address: self.address,
            wanted: bytes,
            given: self.bytes,
        })
    }
}

/// A stream (`CUstream`). The simulator has one per rank and ignores the handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Stream(u64);

impl Stream {
    /// The default stream, which every device has.
    pub const DEFAULT: Self = Self(0);

    /// The stream with this handle (a `CUstream` as a number).
    ///
    /// # Safety
    /// For as long as this value or a copy is passed to anything, it is a live stream of the primary context
    /// of the device to which it is passed, and it is destroyed only after all work that communicators
    /// enqueued on it has ended. While a call enqueues on it, nobody but `CudaDevice::capture` begins or ends
    /// a capture that it is a part of.
    pub const unsafe fn new(handle: u64) -> Self {
        Self(handle)
    }

    /// The stream's handle.
    pub const fn handle(self) -> u64 {
        self.0
    }
}
