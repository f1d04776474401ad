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

pub use generated::nvshmem_fence;
pub use generated::nvshmem_putmem_nbi;
pub use generated::nvshmemi_device_host_state_v1 as DeviceState;
pub use generated::nvshmemx_putmem_nbi_warp;

/// Name of the [`DeviceState`] in a module that has NVSHMEM's code. The host library writes it when it
/// registers the module. Private to NVSHMEM, and laid out as in [`LINKED_VERSION`](crate::LINKED_VERSION).
pub const DEVICE_STATE: &core::ffi::CStr = c"nvshmemi_device_state_d";

/// Bytes of the channel of requests to NVSHMEM's thread on the host.
pub const CHANNEL_BYTES: u64 = 1 << generated::CHANNEL_BUF_SIZE_LOG;
