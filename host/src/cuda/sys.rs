//! The functions of the driver that Ferry calls, with results as numbers.
//!
//! [`Library`] loads the driver when the first of them is called, so a program with them builds
//! without CUDA and starts without a driver. Without one, each returns [`NOT_LOADED`].
//!
//! The table below is our own because no crate's fits. `cust` links the driver. `cudarc` loads it,
//! but panics if the library or a function is missing, and must be told CUDA's version when it is
//! built. Both have a Rust enum as the result: a driver newer than that enum returns codes that it
//! does not have, and such a value must not exist in Rust. A test compares each signature with
//! `cust`'s bindings, and `cargo xtask` each name.

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;

use super::library::{Library, NAME, NotLoaded};

/// Declares the driver's handles: pointers to opaque types.
macro_rules! handles {
    ($($handle:ident to $object:ident,)*) => {$(
        /// Opaque target of a handle.
        #[repr(C)]
        pub(crate) struct $object {
            opaque: [u8; 0],
        }

        pub(crate) type $handle = *mut $object;
    )*};
}

handles! {
    CUcontext to Context,
    CUevent to Event,
    CUfunction to Function,
    CUgraph to Graph,
    CUgraphExec to GraphExec,
    CUgraphNode to GraphNode,
    CUmodule to Module,
    CUstream to Stream,
}

/// The driver's handle of a device.
pub(crate) type CUdevice = c_int;
/// An address in device memory.
pub(crate) type CUdeviceptr = c_ulonglong;

/// Result of a driver function.
pub(crate) type Code = u32;

/// Not a code of the driver: there is none, or a function is missing. [`why_not_loaded`] has the reason.
pub(crate) const NOT_LOADED: Code = Code::MAX;
/// `CUDA_SUCCESS`.
pub(crate) const SUCCESS: Code = 0;
/// `CUDA_ERROR_INVALID_VALUE`.
pub(crate) const INVALID_VALUE: Code = 1;
/// `CUDA_ERROR_STUB_LIBRARY`: the library is one to link with, not a driver.
pub(crate) const STUB_LIBRARY: Code = 34;
/// `CUDA_ERROR_NO_DEVICE`.
pub(crate) const NO_DEVICE: Code = 100;
/// `CUDA_ERROR_INVALID_PTX`.
pub(crate) const INVALID_PTX: Code = 218;
/// `CUDA_ERROR_UNSUPPORTED_PTX_VERSION`.
pub(crate) const UNSUPPORTED_PTX_VERSION: Code = 222;
/// `CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES`.
pub(crate) const LAUNCH_OUT_OF_RESOURCES: Code = 701;
/// `CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED`.
pub(crate) const PEER_ACCESS_ALREADY_ENABLED: Code = 704;

/// `CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT`.
pub(crate) const MULTIPROCESSOR_COUNT: c_int = 16;
/// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR`.
pub(crate) const COMPUTE_CAPABILITY_MAJOR: c_int = 75;
/// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR`.
pub(crate) const COMPUTE_CAPABILITY_MINOR: c_int = 76;
/// `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING`.
#[cfg(feature = "nvshmem")]
pub(crate) const RDMA_WRITES_ORDERING: c_int = 118;
/// `CU_EXEC_AFFINITY_TYPE_SM_COUNT`.
pub(crate) const EXEC_AFFINITY_SM_COUNT: c_int = 0;
/// `CU_JIT_MAX_REGISTERS`.
pub(crate) const JIT_MAX_REGISTERS: c_int = 0;
/// `CU_JIT_INFO_LOG_BUFFER`.
pub(crate) const JIT_INFO_LOG_BUFFER: c_int = 3;
/// `CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES`.
pub(crate) const JIT_INFO_LOG_BYTES: c_int = 4;
/// `CU_JIT_ERROR_LOG_BUFFER`.
pub(crate) const JIT_ERROR_LOG_BUFFER: c_int = 5;
/// `CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES`.
pub(crate) const JIT_ERROR_LOG_BYTES: c_int = 6;
/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`.
pub(crate) const FUNC_MAX_DYNAMIC_SHARED_BYTES: c_int = 8;
/// `CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL`.
#[cfg(feature = "cust")]
pub(crate) const POINTER_DEVICE_ORDINAL: c_int = 9;
/// `CU_STREAM_NON_BLOCKING`: no implicit order with the legacy default stream.
pub(crate) const STREAM_NON_BLOCKING: c_uint = 1;
/// `CU_EVENT_DEFAULT`: with timing.
pub(crate) const EVENT_DEFAULT: c_uint = 0;
/// `CU_MEMHOSTALLOC_PORTABLE`: pinned for every context.
pub(crate) const MEMHOSTALLOC_PORTABLE: c_uint = 1;
/// `CU_MEMHOSTALLOC_DEVICEMAP`: devices may address it.
pub(crate) const MEMHOSTALLOC_DEVICEMAP: c_uint = 2;

/// `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`: the kernel may begin when each block of
/// the preceding one has ended or allows it, and waits for its end by itself.
const PROGRAMMATIC_STREAM_SERIALIZATION: c_uint = 6;

/// `CUlaunchAttribute`.
#[repr(C)]
pub(crate) struct LaunchAttribute {
    id: c_uint,
    padding: c_uint,
    value: [c_ulonglong; 8],
}

impl LaunchAttribute {
    /// The kernel waits for its predecessors by itself.
    pub(crate) const PROGRAMMATIC: Self = Self {
        id: PROGRAMMATIC_STREAM_SERIALIZATION,
        padding: 0,
        value: [1, 0, 0, 0, 0, 0, 0, 0],
    };
}

/// `CUlaunchConfig`.
#[repr(C)]
pub(crate) struct LaunchConfig {
    pub(crate) grid: [c_uint; 3],
    pub(crate) block: [c_uint; 3],
    pub(crate) shared_bytes: c_uint,
    pub(crate) stream: CUstream,
    pub(crate) attributes: *const LaunchAttribute,
    pub(crate) attribute_count: c_uint,
}

/// `CU_STREAM_LEGACY`: a handle of the default stream; null is another.
pub(crate) const STREAM_LEGACY: usize = 1;
/// `CU_STREAM_CAPTURE_MODE_THREAD_LOCAL`.
pub(crate) const CAPTURE_THREAD_LOCAL: c_int = 1;
/// `CU_STREAM_CAPTURE_STATUS_ACTIVE`.
pub(crate) const CAPTURE_ACTIVE: c_uint = 1;
/// `CU_DEV_RESOURCE_TYPE_SM`.
pub(crate) const RESOURCE_SM: c_uint = 1;
/// The first CUDA version with green contexts, in the driver's notation.
pub(crate) const GREEN_CONTEXTS_VERSION: c_int = 12_040;

/// `CUgreenCtx`.
pub(crate) type GreenContext = *mut c_void;
/// `cuStreamGetGreenCtx`, of CUDA 12.4.
pub(crate) type StreamGetGreenCtx =
    unsafe extern "C" fn(stream: CUstream, context: *mut GreenContext) -> Code;
/// `cuGreenCtxGetDevResource`, of CUDA 12.4.
pub(crate) type GreenCtxGetDevResource =
    unsafe extern "C" fn(context: GreenContext, resource: *mut DevResource, kind: c_uint) -> Code;

/// `CUdevResource` (`CUdevResource_v1`), of multiprocessors.
#[repr(C, align(8))]
pub(crate) struct DevResource {
    pub(crate) kind: c_uint,
    padding: [u8; 92],
    pub(crate) multiprocessors: c_uint,
    /// The union has 48 bytes. Later versions may have more, so there is room.
    rest: [u8; 412],
}

impl DevResource {
    pub(crate) const EMPTY: Self = Self {
        kind: 0,
        padding: [0; 92],
        multiprocessors: 0,
        rest: [0; 412],
    };
}

/// Declares functions of the driver: each looks up its address in the table that is filled when the
/// driver is loaded.
macro_rules! driver_functions {
    ($(
        $(#[$condition:meta])*
        $visibility:vis fn $name:ident($($parameter:ident: $type:ty),* $(,)?) -> Code;
    )*) => {
        /// Addresses of the driver's functions.
        #[expect(non_snake_case, reason = "the driver's names")]
        struct Functions {
            $($(#[$condition])* $name: unsafe extern "C" fn($($type),*) -> Code,)*
        }

        impl Functions {
            fn of(library: &Library) -> Result<Self, NotLoaded> {
                Ok(Self {
                    // SAFETY: the signatures are those of `cuda.h`, which never change for a name.
                    $($(#[$condition])* $name: unsafe { library.function(stringify!($name)) }?,)*
                })
            }
        }

        $(
            $(#[$condition])*
            #[expect(non_snake_case, reason = "the driver's name")]
            $visibility unsafe fn $name($($parameter: $type),*) -> Code {
                match driver() {
                    // SAFETY: the rules of the driver's function, as `cuda.h` documents them, are those of
                    // this one.
                    Ok(driver) => unsafe { (driver.$name)($($parameter),*) },
                    Err(_) => NOT_LOADED,
                }
            }
        )*

        /// Compiles only if each signature is the one in `cust`'s bindings.
        #[cfg(all(test, feature = "cust"))]
        #[test]
        fn signatures_are_those_of_the_bindings() {
            $(same_abi::require::<unsafe extern "C" fn($($type),*) -> Code, _>(
                same_abi::bindings::$name as unsafe extern "C" fn($(same_abi::any!($parameter)),*) -> _,
            );)*
        }
    };
}

// Signatures and symbol names are those of `cuda.h`, where a macro gives some names a version.
driver_functions! {
    pub(crate) fn cuInit(flags: c_uint) -> Code;
    pub(crate) fn cuGetProcAddress(
        symbol: *const c_char,
        function: *mut *mut c_void,
        version: c_int,
        flags: c_ulonglong,
    ) -> Code;
    pub(crate) fn cuGetErrorName(code: Code, name: *mut *const c_char) -> Code;
    pub(crate) fn cuDriverGetVersion(version: *mut c_int) -> Code;
    pub(crate) fn cuDeviceGetCount(count: *mut c_int) -> Code;
    pub(crate) fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int) -> Code;
    pub(crate) fn cuDeviceGetName(name: *mut c_char, bytes: c_int, device: CUdevice) -> Code;
    pub(crate) fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: CUdevice) -> Code;
    pub(crate) fn cuDeviceGetUuid(uuid: *mut [u8; 16], device: CUdevice) -> Code;
    pub(crate) fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: CUdevice) -> Code;
    pub(crate) fn cuDeviceGetExecAffinitySupport(
        supported: *mut c_int,
        kind: c_int,
        device: CUdevice,
    ) -> Code;
    pub(crate) fn cuDeviceCanAccessPeer(can: *mut c_int, from: CUdevice, to: CUdevice) -> Code;

    pub(crate) fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice) -> Code;
    pub(crate) fn cuCtxGetCurrent(context: *mut CUcontext) -> Code;
    #[cfg(any(feature = "cust", feature = "cudarc"))]
    pub(crate) fn cuCtxGetDevice(device: *mut CUdevice) -> Code;
    pub(crate) fn cuCtxPushCurrent_v2(context: CUcontext) -> Code;
    pub(crate) fn cuCtxPopCurrent_v2(context: *mut CUcontext) -> Code;
    pub(crate) fn cuCtxSynchronize() -> Code;
    pub(crate) fn cuCtxEnablePeerAccess(peer: CUcontext, flags: c_uint) -> Code;

    pub(crate) fn cuModuleLoadDataEx(
        module: *mut CUmodule,
        image: *const c_void,
        options: c_uint,
        option_names: *mut c_int,
        option_values: *mut *mut c_void,
    ) -> Code;
    pub(crate) fn cuModuleUnload(module: CUmodule) -> Code;
    pub(crate) fn cuModuleGetFunction(
        function: *mut CUfunction,
        module: CUmodule,
        name: *const c_char,
    ) -> Code;
    #[cfg(feature = "nvshmem")]
    pub(crate) fn cuModuleGetGlobal_v2(
        at: *mut CUdeviceptr,
        bytes: *mut usize,
        module: CUmodule,
        name: *const c_char,
    ) -> Code;
    pub(crate) fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks: *mut c_int,
        function: CUfunction,
        threads_per_block: c_int,
        shared_bytes: usize,
    ) -> Code;
    pub(crate) fn cuFuncSetAttribute(function: CUfunction, attribute: c_int, value: c_int) -> Code;
    pub(crate) fn cuLaunchKernelEx(
        launch: *const LaunchConfig,
        function: CUfunction,
        parameters: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) -> Code;

    #[cfg(feature = "cust")]
    pub(crate) fn cuPointerGetAttribute(
        value: *mut c_void,
        attribute: c_int,
        at: CUdeviceptr,
    ) -> Code;
    pub(crate) fn cuMemAlloc_v2(at: *mut CUdeviceptr, bytes: usize) -> Code;
    pub(crate) fn cuMemFree_v2(at: CUdeviceptr) -> Code;
    pub(crate) fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> Code;
    pub(crate) fn cuMemGetAddressRange_v2(
        base: *mut CUdeviceptr,
        bytes: *mut usize,
        at: CUdeviceptr,
    ) -> Code;
    pub(crate) fn cuMemHostAlloc(at: *mut *mut c_void, bytes: usize, flags: c_uint) -> Code;
    pub(crate) fn cuMemHostGetDevicePointer_v2(
        device: *mut CUdeviceptr,
        host: *mut c_void,
        flags: c_uint,
    ) -> Code;
    pub(crate) fn cuMemFreeHost(at: *mut c_void) -> Code;
    pub(crate) fn cuMemcpyHtoDAsync_v2(
        to: CUdeviceptr,
        from: *const c_void,
        bytes: usize,
        stream: CUstream,
    ) -> Code;
    pub(crate) fn cuMemcpyDtoHAsync_v2(
        to: *mut c_void,
        from: CUdeviceptr,
        bytes: usize,
        stream: CUstream,
    ) -> Code;
    pub(crate) fn cuMemsetD8Async(
        at: CUdeviceptr,
        value: u8,
        bytes: usize,
        stream: CUstream,
    ) -> Code;

    pub(crate) fn cuStreamCreate(stream: *mut CUstream, flags: c_uint) -> Code;
    pub(crate) fn cuStreamDestroy_v2(stream: CUstream) -> Code;
    pub(crate) fn cuStreamSynchronize(stream: CUstream) -> Code;
    #[cfg(feature = "cust")]
    pub(crate) fn cuStreamGetCtx(stream: CUstream, context: *mut CUcontext) -> Code;
    pub(crate) fn cuStreamBeginCapture_v2(stream: CUstream, mode: c_int) -> Code;
    pub(crate) fn cuStreamGetCaptureInfo_v2(
        stream: CUstream,
        status: *mut c_uint,
        id: *mut c_ulonglong,
        graph: *mut CUgraph,
        dependencies: *mut *const CUgraphNode,
        dependency_count: *mut usize,
    ) -> Code;
    pub(crate) fn cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph) -> Code;
    pub(crate) fn cuGraphInstantiateWithFlags(
        executable: *mut CUgraphExec,
        graph: CUgraph,
        flags: c_ulonglong,
    ) -> Code;
    pub(crate) fn cuGraphLaunch(executable: CUgraphExec, stream: CUstream) -> Code;
    pub(crate) fn cuGraphDestroy(graph: CUgraph) -> Code;
    pub(crate) fn cuGraphExecDestroy(executable: CUgraphExec) -> Code;

    pub(crate) fn cuEventCreate(event: *mut CUevent, flags: c_uint) -> Code;
    pub(crate) fn cuEventRecord(event: CUevent, stream: CUstream) -> Code;
    pub(crate) fn cuEventSynchronize(event: CUevent) -> Code;
    pub(crate) fn cuEventElapsedTime(milliseconds: *mut f32, start: CUevent, end: CUevent) -> Code;
    pub(crate) fn cuEventDestroy_v2(event: CUevent) -> Code;

    pub(crate) fn cuIpcGetMemHandle(handle: *mut IpcMemHandle, at: CUdeviceptr) -> Code;
    pub(crate) fn cuIpcOpenMemHandle_v2(
        at: *mut CUdeviceptr,
        handle: IpcMemHandle,
        flags: c_uint,
    ) -> Code;
    pub(crate) fn cuIpcCloseMemHandle(at: CUdeviceptr) -> Code;
}

/// `CUipcMemHandle`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct IpcMemHandle(pub(crate) [u8; 64]);

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`: opening a handle also gives access to the memory's device.
pub(crate) const IPC_MEM_LAZY_ENABLE_PEER_ACCESS: c_uint = 1;

/// The driver, loaded by the first call that finds one.
#[inline]
fn driver() -> Result<&'static Functions, NotLoaded> {
    static DRIVER: OnceLock<Functions> = OnceLock::new();
    kept(&DRIVER, || Functions::of(&Library::load(NAME)?))
}

/// Returns the loaded value, or loads it. A failure is not kept: the library may be installed later.
#[inline]
fn kept<T>(
    once: &OnceLock<T>,
    load: impl FnOnce() -> Result<T, NotLoaded>,
) -> Result<&T, NotLoaded> {
    match once.get() {
        Some(loaded) => Ok(loaded),
        None => Ok(once.get_or_init({
            let loaded = load()?;
            || loaded
        })),
    }
}

/// Reason why there is no driver, if there is none.
pub(crate) fn why_not_loaded() -> Option<NotLoaded> {
    driver().err()
}

#[cfg(all(test, feature = "cust"))]
#[path = "same_abi.rs"]
mod same_abi;

#[cfg(test)]
#[path = "sys_tests.rs"]
mod tests;
