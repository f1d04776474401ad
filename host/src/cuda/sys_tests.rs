//! The functions that the driver must have, and errors if it has not.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::*;
use crate::error::{DriverError, Error};

#[test]
fn a_library_that_is_missing_is_named_with_what_helps() {
    let why = Library::load("no/such/libcuda.so.1").err().unwrap();
    let error = Error::from(why);
    assert!(matches!(error, Error::LibraryMissing { .. }), "{error}");
    let text = error.to_string();
    for part in [
        "no/such/libcuda.so.1: cannot open",
        "NVIDIA driver",
        "--gpus",
    ] {
        assert!(text.contains(part), "{text}");
    }
}

/// Compiles a library from this C code, in place of a driver.
fn stand_in(folder: &Path, code: &str) -> PathBuf {
    let (source, library) = (folder.join("a.c"), folder.join(NAME));
    std::fs::write(&source, code).unwrap();
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-o"]).arg(&library);
    assert!(compiler.arg(&source).status().unwrap().success());
    library
}

/// The error of loading a driver made from this C code.
fn error_of(code: &str) -> Error {
    let folder = tempfile::tempdir().unwrap();
    let library = stand_in(folder.path(), code);
    let loaded = Library::load(library.to_str().unwrap()).unwrap();
    let error = Functions::of(&loaded).err().unwrap();
    error.into()
}

#[test]
fn a_function_that_a_driver_lacks_is_named_with_the_drivers_version() {
    let code = "int cuInit(unsigned f) { return 0; }
                int cuDriverGetVersion(int *version) { *version = 11020; return 0; }";
    let error = error_of(code);
    let Error::Driver(DriverError::TooOld { function, driver }) = &error else {
        panic!("{error}");
    };
    assert_eq!((*function, driver.as_str()), ("cuGetProcAddress", "11.2"));
    let text = error.to_string();
    assert!(
        text.contains("cuGetProcAddress") && text.contains("11.2"),
        "{text}"
    );
}

#[test]
fn a_library_that_is_no_driver_is_refused() {
    let error = error_of("int other(void) { return 0; }");
    let Error::Driver(DriverError::TooOld { function, driver }) = &error else {
        panic!("{error}");
    };
    assert_eq!(
        (*function, driver.as_str()),
        ("cuInit", "of an unknown version")
    );
}

#[test]
fn a_driver_that_is_missing_is_looked_for_again() {
    let once = OnceLock::new();
    let missing = || NotLoaded::Library {
        name: NAME.into(),
        reason: "not there".into(),
    };
    assert!(kept(&once, || Err::<i32, _>(missing())).is_err());
    assert!(matches!(kept(&once, || Ok(1)), Ok(1)));
    assert!(matches!(kept(&once, || Err(missing())), Ok(1)));
}

/// `cuda.h` of CUDA 13.0, for which no bindings are at hand.
#[test]
fn what_a_launch_is_given_lies_as_the_header_has_it() {
    use std::mem::offset_of;

    let config = [
        offset_of!(LaunchConfig, grid),
        offset_of!(LaunchConfig, block),
        offset_of!(LaunchConfig, shared_bytes),
        offset_of!(LaunchConfig, stream),
        offset_of!(LaunchConfig, attributes),
        offset_of!(LaunchConfig, attribute_count),
        size_of::<LaunchConfig>(),
    ];
    assert_eq!(config, [0, 12, 24, 32, 40, 48, 56]);
    let attribute = [
        offset_of!(LaunchAttribute, id),
        offset_of!(LaunchAttribute, value),
        size_of::<LaunchAttribute>(),
    ];
    assert_eq!(attribute, [0, 8, 72]);
    assert_eq!(PROGRAMMATIC_STREAM_SERIALIZATION, 6);
    assert_eq!(size_of::<IpcMemHandle>(), 64);
}

/// Numbers of the header.
#[cfg(feature = "cust")]
#[test]
fn numbers_are_those_of_the_bindings() {
    use cust::sys::*;

    let numbers = [
        (
            MULTIPROCESSOR_COUNT,
            CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT as i32,
        ),
        (
            COMPUTE_CAPABILITY_MAJOR,
            CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as i32,
        ),
        (
            COMPUTE_CAPABILITY_MINOR,
            CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as i32,
        ),
        (JIT_MAX_REGISTERS, CUjit_option::CU_JIT_MAX_REGISTERS as i32),
        (
            JIT_INFO_LOG_BUFFER,
            CUjit_option::CU_JIT_INFO_LOG_BUFFER as i32,
        ),
        (
            JIT_INFO_LOG_BYTES,
            CUjit_option::CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES as i32,
        ),
        (
            JIT_ERROR_LOG_BUFFER,
            CUjit_option::CU_JIT_ERROR_LOG_BUFFER as i32,
        ),
        (
            JIT_ERROR_LOG_BYTES,
            CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES as i32,
        ),
        (
            CAPTURE_THREAD_LOCAL,
            CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL as i32,
        ),
        (
            CAPTURE_ACTIVE as i32,
            CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE as i32,
        ),
        (
            FUNC_MAX_DYNAMIC_SHARED_BYTES,
            CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as i32,
        ),
        (
            POINTER_DEVICE_ORDINAL,
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL as i32,
        ),
        (
            STREAM_NON_BLOCKING as i32,
            CUstream_flags::CU_STREAM_NON_BLOCKING as i32,
        ),
        (
            MEMHOSTALLOC_PORTABLE as i32,
            CU_MEMHOSTALLOC_PORTABLE as i32,
        ),
        (
            MEMHOSTALLOC_DEVICEMAP as i32,
            CU_MEMHOSTALLOC_DEVICEMAP as i32,
        ),
    ];
    assert_eq!(EVENT_DEFAULT, CUevent_flags_enum::CU_EVENT_DEFAULT as u32);
    assert_eq!(
        IPC_MEM_LAZY_ENABLE_PEER_ACCESS,
        CUipcMem_flags_enum::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32
    );
    for (index, (ours, theirs)) in numbers.into_iter().enumerate() {
        assert_eq!(ours, theirs, "number {index}");
    }
}

/// Results of calls without a driver.
#[cfg(feature = "cust")]
#[test]
fn results_are_those_of_the_bindings() {
    use cust::sys::CUresult;

    let codes = [
        (SUCCESS, CUresult::CUDA_SUCCESS),
        (INVALID_VALUE, CUresult::CUDA_ERROR_INVALID_VALUE),
        (STUB_LIBRARY, CUresult::CUDA_ERROR_STUB_LIBRARY),
        (NO_DEVICE, CUresult::CUDA_ERROR_NO_DEVICE),
        (INVALID_PTX, CUresult::CUDA_ERROR_INVALID_PTX),
        (
            UNSUPPORTED_PTX_VERSION,
            CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
        ),
        (
            LAUNCH_OUT_OF_RESOURCES,
            CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,
        ),
        (
            PEER_ACCESS_ALREADY_ENABLED,
            CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED,
        ),
    ];
    for (ours, theirs) in codes {
        assert_eq!(ours, theirs as u32);
    }
}
