//! Memory that is allocated piece by piece, and freed together.

use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::device::Device;
use crate::error::Error;
use crate::error::leak;
use crate::tensor::handles::DevicePtr;

/// Bytes of allocations that this process has dropped.
static DROPPED: AtomicU64 = AtomicU64::new(0);

/// Allocations on one device. A drop leaks them: addresses are plain values, so kernels, graphs and copies
/// may use them for as long as the process runs. The next allocation says so: a program that ends with its
/// buffers has lost nothing.
pub(crate) struct Allocations {
    device: Arc<dyn Device>,
    at: Vec<DevicePtr>,
}

impl Allocations {
    /// Calls `make`, which allocates. If it fails, frees all that it had allocated.
    pub(crate) fn with<T>(
        device: &Arc<dyn Device>,
        make: impl FnOnce(&mut Self) -> Result<T, Error>,
    ) -> Result<(T, Self), Error> {
        let dropped = DROPPED.load(Ordering::Relaxed);
        if dropped > 0 {
            leak::tell_of_buffers(dropped);
        }
        let mut memory = Self {
            device: device.clone(),
            at: Vec::new(),
        };
        match make(&mut memory) {
            Ok(made) => Ok((made, memory)),
            Err(error) => {
                // SAFETY: `make` failed, so that nobody has the addresses.
                if let Err(error) = unsafe { memory.free() } {
                    tracing::warn!(%error, "cannot free a part of some buffers");
                }
                Err(error)
            }
        }
    }

    /// Allocates `bytes` bytes, not cleared.
    pub(crate) fn alloc(&mut self, bytes: u64) -> Result<DevicePtr, Error> {
        let at = self.device.alloc(bytes)?;
        self.at.push(at);
        Ok(at)
    }

    /// The device of the memory.
    pub(crate) const fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// All allocations, in order.
    pub(crate) fn at(&self) -> &[DevicePtr] {
        &self.at
    }

    /// Sets every byte.
    pub(crate) fn fill(&self, value: u8) -> Result<(), Error> {
        let mut all = self.at.iter();
        all.try_for_each(|&at| self.device.fill(at, value, at.bytes()))
    }

    /// Frees all allocations, also after one that cannot be freed.
    ///
    /// # Safety
    /// As [`Device::free`], for every allocation.
    pub(crate) unsafe fn free(mut self) -> Result<(), Error> {
        let all = mem::take(&mut self.at).into_iter();
        // SAFETY: this device's `alloc` returned them, and each is freed once; that nothing uses them any
        // more is documented on this function.
        let freed = all.map(|at| unsafe { self.device.free(at) });
        freed.fold(Ok(()), Result::and)
    }
}

impl Drop for Allocations {
    fn drop(&mut self) {
        let bytes = self.at.iter().map(|at| at.bytes()).sum();
        if bytes > 0 {
            DROPPED.fetch_add(bytes, Ordering::Relaxed);
            tracing::warn!(
                bytes,
                device = self.device.name(),
                "buffers dropped without free: leaked"
            );
        }
    }
}
