//! The driver functions that are called, with results as numbers.
//!
//! `cust` binds them too, but with a Rust enum as the result. A driver newer than that enum
//! returns codes that it does not have, and such a value must not exist in Rust. So only the
//! types are taken from `cust`, and its link to the driver library.

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};

pub(super) use cust::sys::{
    CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUgraph, CUgraphExec, CUjit_option,
    CUmodule, CUstream, CUstreamCaptureMode,
};

/// What a driver function returns.
pub(super) type Code = u32;

/// `CUDA_SUCCESS`.
pub(super) const SUCCESS: Code = 0;
/// `CUDA_ERROR_INVALID_VALUE`.
pub(super) const INVALID_VALUE: Code = 1;
/// `CUDA_ERROR_STUB_LIBRARY`: the library is one to link with, not a driver.
pub(super) const STUB_LIBRARY: Code = 34;
/// `CUDA_ERROR_NO_DEVICE`.
pub(super) const NO_DEVICE: Code = 100;
/// `CUDA_ERROR_INVALID_PTX`.
pub(super) const INVALID_PTX: Code = 218;
/// `CUDA_ERROR_UNSUPPORTED_PTX_VERSION`.
pub(super) const UNSUPPORTED_PTX_VERSION: Code = 222;
/// `CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES`.
pub(super) const LAUNCH_OUT_OF_RESOURCES: Code = 701;
/// `CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED`.
pub(super) const PEER_ACCESS_ALREADY_ENABLED: Code = 704;

/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`.
pub(super) const FUNC_MAX_DYNAMIC_SHARED_BYTES: c_int = 8;
/// `CU_STREAM_NON_BLOCKING`: no implicit order with the legacy default stream.
pub(super) const STREAM_NON_BLOCKING: c_uint = 1;
/// `CU_EVENT_DEFAULT`: with timing.
pub(super) const EVENT_DEFAULT: c_uint = 0;
/// `CU_MEMHOSTALLOC_PORTABLE`: pinned for every context.
pub(super) const MEMHOSTALLOC_PORTABLE: c_uint = 1;
/// `CU_MEMHOSTALLOC_DEVICEMAP`: devices may address it.
pub(super) const MEMHOSTALLOC_DEVICEMAP: c_uint = 2;

/// `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`: the kernel may begin when each block of
/// the one before it has ended or allows it, and says itself where it waits for its end.
const PROGRAMMATIC_STREAM_SERIALIZATION: c_uint = 6;

/// `CUlaunchAttribute`.
#[repr(C)]
pub(super) struct LaunchAttribute {
    id: c_uint,
    padding: c_uint,
    value: [c_ulonglong; 8],
}

impl LaunchAttribute {
    /// The kernel waits by itself for those before it.
    pub(super) const PROGRAMMATIC: Self = Self {
        id: PROGRAMMATIC_STREAM_SERIALIZATION,
        padding: 0,
        value: [1, 0, 0, 0, 0, 0, 0, 0],
    };
}

/// `CUlaunchConfig`.
#[repr(C)]
pub(super) struct LaunchConfig {
    pub(super) grid: [c_uint; 3],
    pub(super) block: [c_uint; 3],
    pub(super) shared_bytes: c_uint,
    pub(super) stream: CUstream,
    pub(super) attributes: *const LaunchAttribute,
    pub(super) attribute_count: c_uint,
}

/// `CU_STREAM_CAPTURE_STATUS_ACTIVE`.
pub(super) const CAPTURE_ACTIVE: c_uint = 1;
/// `CU_DEV_RESOURCE_TYPE_SM`.
pub(super) const RESOURCE_SM: c_uint = 1;
/// The CUDA version that has green contexts, as the driver writes it.
pub(super) const GREEN_CONTEXTS_VERSION: c_int = 12_040;

/// `CUgreenCtx`.
pub(super) type GreenContext = *mut c_void;
/// `cuStreamGetGreenCtx`, of CUDA 12.4.
pub(super) type StreamGetGreenCtx =
    unsafe extern "C" fn(stream: CUstream, context: *mut GreenContext) -> Code;
/// `cuGreenCtxGetDevResource`, of CUDA 12.4.
pub(super) type GreenCtxGetDevResource =
    unsafe extern "C" fn(context: GreenContext, resource: *mut DevResource, kind: c_uint) -> Code;

/// `CUdevResource` (`CUdevResource_v1`), of multiprocessors.
#[repr(C, align(8))]
pub(super) struct DevResource {
    pub(super) kind: c_uint,
    padding: [u8; 92],
    pub(super) multiprocessors: c_uint,
    /// The union has 48 bytes. Later versions may have more, so there is room.
    rest: [u8; 412],
}

impl DevResource {
    pub(super) const EMPTY: Self = Self {
        kind: 0,
        padding: [0; 92],
        multiprocessors: 0,
        rest: [0; 412],
    };
}

// Signatures and symbol names are those of `cuda.h`, where a macro gives some names a version.
unsafe extern "C" {
    pub(super) fn cuInit(flags: c_uint) -> Code;
    pub(super) fn cuGetProcAddress(
        symbol: *const c_char,
        function: *mut *mut c_void,
        version: c_int,
        flags: c_ulonglong,
    ) -> Code;
    pub(super) fn cuGetErrorName(code: Code, name: *mut *const c_char) -> Code;
    pub(super) fn cuDriverGetVersion(version: *mut c_int) -> Code;
    pub(super) fn cuDeviceGetCount(count: *mut c_int) -> Code;
    pub(super) fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: CUdevice) -> Code;
    pub(super) fn cuDeviceCanAccessPeer(can: *mut c_int, from: CUdevice, to: CUdevice) -> Code;

    pub(super) fn cuCtxGetCurrent(context: *mut CUcontext) -> Code;
    pub(super) fn cuCtxSetCurrent(context: CUcontext) -> Code;
    pub(super) fn cuCtxPushCurrent_v2(context: CUcontext) -> Code;
    pub(super) fn cuCtxPopCurrent_v2(context: *mut CUcontext) -> Code;
    pub(super) fn cuCtxSynchronize() -> Code;
    pub(super) fn cuCtxEnablePeerAccess(peer: CUcontext, flags: c_uint) -> Code;

    pub(super) fn cuModuleLoadDataEx(
        module: *mut CUmodule,
        image: *const c_void,
        options: c_uint,
        option_names: *mut CUjit_option,
        option_values: *mut *mut c_void,
    ) -> Code;
    pub(super) fn cuModuleUnload(module: CUmodule) -> Code;
    pub(super) fn cuModuleGetFunction(
        function: *mut CUfunction,
        module: CUmodule,
        name: *const c_char,
    ) -> Code;
    pub(super) fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks: *mut c_int,
        function: CUfunction,
        threads_per_block: c_int,
        shared_bytes: usize,
    ) -> Code;
    pub(super) fn cuFuncSetAttribute(function: CUfunction, attribute: c_int, value: c_int) -> Code;
    pub(super) fn cuLaunchKernelEx(
        launch: *const LaunchConfig,
        function: CUfunction,
        parameters: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) -> Code;

    pub(super) fn cuMemAlloc_v2(at: *mut CUdeviceptr, bytes: usize) -> Code;
    pub(super) fn cuMemFree_v2(at: CUdeviceptr) -> Code;
    pub(super) fn cuMemHostAlloc(at: *mut *mut c_void, bytes: usize, flags: c_uint) -> Code;
    pub(super) fn cuMemHostGetDevicePointer_v2(
        device: *mut CUdeviceptr,
        host: *mut c_void,
        flags: c_uint,
    ) -> Code;
    pub(super) fn cuMemFreeHost(at: *mut c_void) -> Code;
    pub(super) fn cuMemcpyHtoDAsync_v2(
        to: CUdeviceptr,
        from: *const c_void,
        bytes: usize,
        stream: CUstream,
    ) -> Code;
    pub(super) fn cuMemcpyDtoHAsync_v2(
        to: *mut c_void,
        from: CUdeviceptr,
        bytes: usize,
        stream: CUstream,
    ) -> Code;
    pub(super) fn cuMemsetD8Async(
        at: CUdeviceptr,
        value: u8,
        bytes: usize,
        stream: CUstream,
    ) -> Code;

    pub(super) fn cuStreamCreate(stream: *mut CUstream, flags: c_uint) -> Code;
    pub(super) fn cuStreamDestroy_v2(stream: CUstream) -> Code;
    pub(super) fn cuStreamSynchronize(stream: CUstream) -> Code;
    pub(super) fn cuStreamBeginCapture_v2(stream: CUstream, mode: CUstreamCaptureMode) -> Code;
    pub(super) fn cuStreamGetCaptureInfo_v2(
        stream: CUstream,
        status: *mut c_uint,
        id: *mut c_ulonglong,
        graph: *mut CUgraph,
        dependencies: *mut *const c_void,
        dependency_count: *mut usize,
    ) -> Code;
    pub(super) fn cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph) -> Code;
    pub(super) fn cuGraphInstantiateWithFlags(
        executable: *mut CUgraphExec,
        graph: CUgraph,
        flags: c_ulonglong,
    ) -> Code;
    pub(super) fn cuGraphLaunch(executable: CUgraphExec, stream: CUstream) -> Code;
    pub(super) fn cuGraphDestroy(graph: CUgraph) -> Code;
    pub(super) fn cuGraphExecDestroy(executable: CUgraphExec) -> Code;

    pub(super) fn cuEventCreate(event: *mut CUevent, flags: c_uint) -> Code;
    pub(super) fn cuEventRecord(event: CUevent, stream: CUstream) -> Code;
    pub(super) fn cuEventSynchronize(event: CUevent) -> Code;
    pub(super) fn cuEventElapsedTime(milliseconds: *mut f32, start: CUevent, end: CUevent) -> Code;
    pub(super) fn cuEventDestroy_v2(event: CUevent) -> Code;
}
