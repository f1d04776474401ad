//! Memory of a rank's device, for the Python sources.

use ferry::DevicePtr;
use pyo3::prelude::*;

use crate::communicator::{Communicator, handle};
use crate::errors;
use crate::interrupt;

#[pymethods]
impl Communicator {
    /// Allocates device memory, and returns its address. Synchronizes.
    fn alloc(&self, py: Python<'_>, bytes: u64) -> PyResult<u64> {
        if self.closed()? {
            return Err(self.is_closed());
        }
        let device = self.device_of()?;
        let at = py.detach(|| device.alloc(bytes)).map_err(errors::from)?;
        Ok(at.address())
    }

    /// Frees memory of `alloc`, which nothing uses any more. Synchronizes.
    fn free(&self, py: Python<'_>, address: u64) -> PyResult<()> {
        let device = self.device_of()?;
        // SAFETY: the Python sources pass what `alloc` returned, once, after the work that used it.
        let freed = py.detach(|| unsafe { device.free(DevicePtr::new(address, 0)) });
        freed.map_err(errors::from)
    }

    /// Copies `bytes` bytes from the host to the device. Synchronizes.
    fn upload(&self, py: Python<'_>, to: u64, from_: usize, bytes: usize) -> PyResult<()> {
        if bytes == 0 {
            return Ok(());
        }
        require_memory(from_)?;
        let device = self.device_of()?;
        py.detach(|| {
            // SAFETY: the Python sources pass the address and size of an array that they hold, and whose
            // memory they have compared with its shape.
            let source = unsafe { std::slice::from_raw_parts(from_ as *const u8, bytes) };
            // SAFETY: the Python sources pass memory of `alloc`, at least as long.
            let to = unsafe { DevicePtr::new(to, bytes as u64) };
            device.upload(to, source)
        })
        .map_err(errors::from)
    }

    /// Copies `bytes` bytes from the device to the host. Synchronizes.
    fn download(&self, py: Python<'_>, from_: u64, to: usize, bytes: usize) -> PyResult<()> {
        if bytes == 0 {
            return Ok(());
        }
        require_memory(to)?;
        let device = self.device_of()?;
        py.detach(|| {
            // SAFETY: the Python sources pass the address and size of an array that they hold, whose memory
            // they have compared with its shape, and that no other thread uses meanwhile.
            let target = unsafe { std::slice::from_raw_parts_mut(to as *mut u8, bytes) };
            // SAFETY: the Python sources pass memory of `alloc`, at least as long.
            let from = unsafe { DevicePtr::new(from_, bytes as u64) };
            device.download(from, target)
        })
        .map_err(errors::from)
    }

    /// Waits for everything enqueued on `stream`, and looks for no fault.
    fn wait(&self, py: Python<'_>, stream: u64) -> PyResult<()> {
        let device = self.device_of()?;
        let waited = interrupt::detach(py, || device.synchronize(handle(stream)))?;
        waited.map_err(errors::from)
    }

    /// Number of the capture that `stream` is in, if it is.
    fn capture(&self, stream: u64) -> PyResult<Option<u64>> {
        Ok(self.device_of()?.capture(handle(stream)))
    }
}

/// Refuses the address of an array without memory.
fn require_memory(address: usize) -> PyResult<()> {
    match address {
        0 => Err(errors::tensor("array", "memory", "none: its address is 0")),
        _ => Ok(()),
    }
}
