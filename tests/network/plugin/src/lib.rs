//! The library that NVSHMEM loads as its transport for UCX (`NVSHMEM_REMOTE_TRANSPORT=ucx`) if it is
//! preloaded (`LD_PRELOAD`). It also tells NVSHMEM the host's name.

use core::ffi::{c_char, c_int, c_void};

use ferry_network::interface::Transport;
use ferry_network::{entry, host_name};

/// NVSHMEM's only way in.
///
/// # Safety
/// `out` is where the transport goes. The thread has the context of the GPU that NVSHMEM uses.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvshmemt_init(
    out: *mut *mut Transport,
    _cuda: *mut c_void,
    version: c_int,
) -> c_int {
    // SAFETY: as the caller promises.
    unsafe { entry::init(out, version) }
}

/// The C library's function, except for NVSHMEM.
///
/// # Safety
/// So many bytes can be written there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gethostname(name: *mut c_char, length: usize) -> c_int {
    // SAFETY: as the caller promises.
    unsafe { host_name::get(name, length) }
}
