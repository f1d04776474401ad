//! NVSHMEM, for peers whose windows are not mapped.
//!
//! Addresses are symmetric: those of the same place in the own window.

use core::ffi::c_int;

use nvshmem_sys::device::{SIGNAL_SET, nvshmemx_putmem_signal_nbi_warp, nvshmemx_signal_op};

/// Sends `bytes` bytes from `from` to the place `to` of `peer`, then sets its word `signal`. NVSHMEM orders
/// the signal after the data of the same call, on every transport. All lanes.
///
/// # Safety
/// All three addresses lie in the symmetric heap, and `from` and `to` have `bytes` bytes; the module is
/// registered with NVSHMEM; `from` does not change until the peer has answered.
#[inline(always)]
pub unsafe fn put_signal(peer: u32, to: u64, from: u64, bytes: u32, signal: u64, value: u64) {
    // SAFETY: symmetric addresses with `bytes` bytes, of which `from` does not change: documented above.
    unsafe {
        nvshmemx_putmem_signal_nbi_warp(
            to as *mut _,
            from as *const _,
            bytes as usize,
            signal as *mut u64,
            value,
            SIGNAL_SET,
            peer as c_int,
        );
    }
}

/// Sets the word `signal` of `peer`. For one lane.
///
/// # Safety
/// The address lies in the symmetric heap; the module is registered with NVSHMEM.
#[inline(always)]
pub unsafe fn signal(peer: u32, signal: u64, value: u64) {
    // SAFETY: a symmetric address: documented above.
    unsafe { nvshmemx_signal_op(signal as *mut u64, value, SIGNAL_SET, peer as c_int) }
}
