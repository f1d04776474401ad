//! In place of NVSHMEM, where no kernel has peers whose windows are not mapped: `Gpu::new` makes sure of that
//! when it is compiled, and nothing of this is left in the PTX.

use crate::ptx::thread;

/// Is not called.
///
/// # Safety
/// None is needed.
#[inline(always)]
pub unsafe fn put_signal(_: u32, _: u64, _: u64, _: u32, _: u64, _: u64) {
    thread::trap()
}

/// Is not called.
///
/// # Safety
/// None is needed.
#[inline(always)]
pub unsafe fn signal(_: u32, _: u64, _: u64) {
    thread::trap()
}
