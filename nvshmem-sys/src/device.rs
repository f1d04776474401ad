//! Functions that kernels call for peers whose memory is not mapped.
//!
//! Call them only in code for the GPU, in a module that the host registered with
//! `nvshmemx_cumodule_init`. Names and parameters are NVSHMEM's own.

#[allow(
    dead_code,
    missing_docs,
    non_camel_case_types,
    non_upper_case_globals,
    clippy::all
)]
#[path = "generated/device.rs"]
mod generated;

pub use generated::nvshmem_quiet;
pub use generated::nvshmemx_putmem_signal_nbi_warp;
pub use generated::nvshmemx_signal_op;

/// `sig_op` that sets the remote signal word.
pub const SIGNAL_SET: core::ffi::c_int =
    generated::nvshmemx_signal_op_t::NVSHMEM_SIGNAL_SET as core::ffi::c_int;

/// `sig_op` that adds to the remote signal word.
pub const SIGNAL_ADD: core::ffi::c_int =
    generated::nvshmemx_signal_op_t::NVSHMEM_SIGNAL_ADD as core::ffi::c_int;
