//! Devices: memory and streams, for programs without a CUDA runtime and for the simulator.

use std::ffi::{c_char, c_void};
use std::sync::Arc;

use ferry::{Device, DevicePtr, Rank, Stream};

use crate::group::ferry_group;
use crate::handle::{Opaque, get, make, require, store, take, values};
use crate::status::{Failure, ferry_status, guard};

/// The device of a rank of this process. Any thread may use it.
pub struct ferry_device(());

/// Value of a [`ferry_device`].
pub(crate) struct DeviceOfRank {
    pub(crate) device: Arc<dyn Device>,
    /// The same device as CUDA's; `None` in the simulator.
    #[cfg(feature = "cuda")]
    pub(crate) cuda: Option<Arc<ferry::cuda::CudaDevice>>,
}

impl Opaque for ferry_device {
    type Value = DeviceOfRank;
    const NAME: &'static str = "ferry_device";
    const MAGIC: u64 = u64::from_le_bytes(*b"ferry/de");
}

/// Stores a handle for the device of a rank that this process drives. Not collective. Does not synchronise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_group_device(
    group: *const ferry_group,
    rank: u32,
    device: *mut *mut ferry_device,
) -> ferry_status {
    guard("ferry_group_device", || {
        // SAFETY: the rules of pointers and handles.
        unsafe {
            make(device, "device", || {
                let group = get(group, "group")?;
                Ok(DeviceOfRank {
                    device: group.device(Rank(rank))?,
                    #[cfg(feature = "cuda")]
                    cuda: group.cuda(Rank(rank)),
                })
            })
        }
    })
}

/// Frees the handle and sets `*device` to NULL. Memory, streams, kernels and graphs stay, and running work
/// goes on. Not collective. Does not synchronise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_device_free(device: *mut *mut ferry_device) -> ferry_status {
    guard("ferry_device_free", || {
        // SAFETY: the rules of pointers and handles.
        unsafe { take(device, "*device") }.map(drop)
    })
}

/// Copies the device's human-readable name to `name`, a buffer of `room` bytes. The name is cut if it does
/// not fit, and always ends with a zero byte. Not collective. Does not synchronise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_device_name(
    device: *const ferry_device,
    name: *mut c_char,
    room: usize,
) -> ferry_status {
    guard("ferry_device_name", || {
        // SAFETY: the rule of handles.
        let text = unsafe { get(device, "device")? }.device.name();
        require(name, "name")?;
        let Some(most) = room.checked_sub(1) else {
            return Err(Failure::value(
                "room",
                room,
                "it must be at least 1, for the zero byte",
            ));
        };
        let bytes = text.as_bytes();
        let copied = bytes.len().min(most);
        // SAFETY: the rule of pointers: `room` bytes may be written, more than are copied.
        unsafe {
            name.cast::<u8>()
                .copy_from_nonoverlapping(bytes.as_ptr(), copied);
            name.add(copied).write(0);
        }
        Ok(())
    })
}

/// Allocates `bytes` bytes of device memory, aligned for any tensor; not cleared. Stores the address in
/// `address`. Not collective. Synchronises.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_device_alloc(
    device: *const ferry_device,
    bytes: u64,
    address: *mut u64,
) -> ferry_status {
    guard("ferry_device_alloc", || {
        // SAFETY: the rule of handles.
        let device = unsafe { get(device, "device")? };
        // Checks the pointer before anything is allocated.
        // SAFETY: the rule of pointers.
        unsafe { store(address, "address", 0)? };
        let at = device.device.alloc(bytes)?;
        // SAFETY: the rule of pointers.
        unsafe { store(address, "address", at.address()) }
    })
}

/// Frees memory allocated by ferry_device_alloc on this device. The memory must be unused: no enqueued
/// kernel and no graph that will be launched may name it. Address 0 is ignored. Not collective.
/// Synchronises.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_device_release(
    device: *const ferry_device,
    address: u64,
) -> ferry_status {
    guard("ferry_device_release", || {
        // SAFETY: the rule of handles.
        let device = unsafe { get(device, "device")? };
        if address == 0 {
            return Ok(());
        }
        // SAFETY: `ferry_device_alloc` returned the address, and nothing uses it any more: documented on this
        // function.
        unsafe { device.device.free(DevicePtr::new(address, 0)) }?;
        Ok(())
    })
}

/// Copies `bytes` bytes of host memory to device memory. Not collective. Synchronises the device's own
/// stream only.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_device_upload(
    device: *const ferry_device,
    address: u64,
    from: *const c_void,
    bytes: usize,
) -> ferry_status {
    guard("ferry_device_upload", || {
        // SAFETY: the rule of handles.
        let device = unsafe { get(device, "device")? };
        // SAFETY: the rule of pointers.
        let from = unsafe { values(from.cast::<u8>(), "from", bytes)? };
        // SAFETY: the rule of memory.
        let to = unsafe { DevicePtr::new(require_address(address, bytes)?, bytes as u64) };
        Ok(device.device.upload(to, from)?)
    })
}

/// Copies `bytes` bytes of device memory to host memory. Not collective. Synchronises the device's own
/// stream only: call ferry_device_synchronize first on streams that write the memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_device_download(
    device: *const ferry_device,
    to: *mut c_void,
    address: u64,
    bytes: usize,
) -> ferry_status {
    guard("ferry_device_download", || {
        // SAFETY: the rule of handles.
        let device = unsafe { get(device, "device")? };
        if bytes == 0 {
            return Ok(());
        }
        require(to.cast::<u8>(), "to")?;
        // SAFETY: the rule of pointers: `bytes` bytes may be written. They are initialised first.
        let to = unsafe {
            to.cast::<u8>().write_bytes(0, bytes);
            std::slice::from_raw_parts_mut(to.cast::<u8>(), bytes)
        };
        // SAFETY: the rule of memory.
        let from = unsafe { DevicePtr::new(require_address(address, bytes)?, bytes as u64) };
        Ok(device.device.download(from, to)?)
    })
}

/// Sets `bytes` bytes of device memory to `value`, 0 to 255. Not collective. Synchronises.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_device_fill(
    device: *const ferry_device,
    address: u64,
    value: u8,
    bytes: u64,
) -> ferry_status {
    guard("ferry_device_fill", || {
        // SAFETY: the rule of handles.
        let device = unsafe { get(device, "device")? };
        let count = usize::try_from(bytes).unwrap_or(usize::MAX);
        // SAFETY: the rule of memory.
        let at = unsafe { DevicePtr::new(require_address(address, count)?, bytes) };
        Ok(device.device.fill(at, value, bytes)?)
    })
}

/// Creates a stream (a CUstream), which lives until the process ends. In the simulator each rank has one
/// stream, NULL. Not collective. Does not synchronise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_device_stream(
    device: *const ferry_device,
    stream: *mut *mut c_void,
) -> ferry_status {
    guard("ferry_device_stream", || {
        // SAFETY: the rule of handles.
        let device = unsafe { get(device, "device")? };
        // SAFETY: the rule of pointers.
        unsafe { store(stream, "stream", std::ptr::null_mut())? };
        let made = device.device.stream()?.handle() as usize;
        let made = std::ptr::with_exposed_provenance_mut(made);
        // SAFETY: the rule of pointers.
        unsafe { store(stream, "stream", made) }
    })
}

/// Waits for everything enqueued on a stream. Does not report faults: ferry_synchronize does. Not
/// collective, but waits for the peers that kernels wait for. Synchronises.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_device_synchronize(
    device: *const ferry_device,
    stream: *mut c_void,
) -> ferry_status {
    guard("ferry_device_synchronize", || {
        // SAFETY: the rule of handles.
        let device = unsafe { get(device, "device")? };
        // SAFETY: the rule of streams.
        Ok(device.device.synchronize(unsafe { stream_of(stream) })?)
    })
}

/// Converts a stream's handle.
///
/// # Safety
/// The rule of streams.
pub(crate) unsafe fn stream_of(stream: *mut c_void) -> Stream {
    // SAFETY: the rule of streams.
    unsafe { Stream::new(stream.expose_provenance() as u64) }
}

fn require_address(address: u64, bytes: usize) -> Result<u64, Failure> {
    match (address, bytes) {
        (0, 1..) => {
            let rule = format!("{bytes} bytes cannot be at NULL");
            Err(Failure::value("address", 0, &rule))
        }
        _ => Ok(address),
    }
}
