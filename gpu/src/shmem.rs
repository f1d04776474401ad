//! NVSHMEM, for peers whose windows are not mapped.
//!
//! Addresses are symmetric: those of the same place in the own window.

use core::ffi::c_int;
use core::mem::offset_of;

use ferry_protocol::PUTS_AT_ONCE;
use nvshmem_sys::device::{
    CHANNEL_BYTES, DeviceState, nvshmem_fence, nvshmem_putmem_nbi, nvshmemx_putmem_nbi_warp,
};

use crate::ptx::memory::{self, load_nvshmem_state as state};

/// Bytes of requests that warps may have looked for and not issued yet: a fence and [`PUTS_AT_ONCE`] puts
/// each, of all warps that fit on 192 multiprocessors. Sizes: `PROXY_DMA_REQ_BYTES` of NVSHMEM, and a word.
const UNSEEN_BYTES: u64 = 192 * 64 * (32 * PUTS_AT_ONCE as u64 + 8);
const _: () = assert!(UNSEEN_BYTES < CHANNEL_BYTES, "a channel that is never free");

/// Whether NVSHMEM's channel takes [`PUTS_AT_ONCE`] puts and a fence at once, whatever other warps issue
/// meanwhile: NVSHMEM's own functions wait for room without end. True where there is no channel.
#[inline(always)]
pub fn has_room() -> bool {
    const ISSUED: usize = offset_of!(DeviceState, proxy_channels_issue);
    const COMPLETE: usize = offset_of!(DeviceState, proxy_channels_complete);
    const COMPLETE_HERE: usize = offset_of!(DeviceState, proxy_channels_complete_local_ptr);
    let issued = state::<ISSUED>();
    if issued == 0 {
        return true;
    }
    // SAFETY: words that NVSHMEM made for this module when it was registered. What the thread has read it
    // tells a kilobyte late.
    unsafe {
        let wanted = memory::load_relaxed_gpu(issued) + UNSEEN_BYTES;
        let has_room = |complete: u64| wanted <= complete + CHANNEL_BYTES;
        // NVSHMEM renews its copy in the GPU's memory only when that shows no room.
        has_room(memory::load_relaxed_gpu(state::<COMPLETE_HERE>()))
            || has_room(memory::load_relaxed_sys(state::<COMPLETE>()))
    }
}

/// Sends `bytes` bytes from `from` to the place `to` of `peer`. All lanes.
///
/// # Safety
/// Both addresses lie in the symmetric heap and have `bytes` bytes; the module is registered with NVSHMEM;
/// `from` does not change until the bytes have arrived.
#[inline(always)]
pub unsafe fn put_row(peer: u32, to: u64, from: u64, bytes: u32) {
    // SAFETY: symmetric addresses with `bytes` bytes, of which `from` does not change: documented above.
    unsafe {
        nvshmemx_putmem_nbi_warp(
            to as *mut _,
            from as *const _,
            bytes as usize,
            peer as c_int,
        );
    }
}

/// Sends bytes like [`put_row`]. For one lane.
///
/// # Safety
/// As for [`put_row`].
#[inline(always)]
pub unsafe fn put_words(peer: u32, to: u64, from: u64, bytes: u32) {
    // SAFETY: symmetric addresses with `bytes` bytes, of which `from` does not change: documented above.
    unsafe {
        nvshmem_putmem_nbi(
            to as *mut _,
            from as *const _,
            bytes as usize,
            peer as c_int,
        );
    }
}

/// Lets what this rank puts afterwards arrive after what it has put before. For one lane.
///
/// # Safety
/// The module is registered with NVSHMEM.
#[inline(always)]
pub unsafe fn fence() {
    // SAFETY: a registered module: documented above.
    unsafe { nvshmem_fence() }
}
