//! Stand-ins for NVSHMEM in kernels without unmapped peers. `Gpu::new` checks at compile time that they are
//! not needed, and nothing of them is left in the PTX.

use crate::ptx::thread;

/// Traps; never called.
#[inline(always)]
pub fn has_room() -> bool {
    thread::trap()
}

/// Traps; never called.
///
/// # Safety
/// No requirements.
#[inline(always)]
pub unsafe fn put_row(_: u32, _: u64, _: u64, _: u32) {
    thread::trap()
}

/// Traps; never called.
///
/// # Safety
/// No requirements.
#[inline(always)]
pub unsafe fn put_words(_: u32, _: u64, _: u64, _: u32) {
    thread::trap()
}

/// Traps; never called.
///
/// # Safety
/// No requirements.
#[inline(always)]
pub unsafe fn fence() {
    thread::trap()
}
