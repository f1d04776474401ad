//! Programs built for GPUs start without a CUDA driver, and say what is missing.
#![cfg(feature = "cuda")]

use std::env;

use ferry::error::DriverError;
use ferry::{Error, Group, GroupOptions};

/// The error of a call that needs a driver, unless this machine has one.
fn error_of<T>(result: Result<T, Error>) -> Option<Error> {
    match result {
        Err(error @ Error::LibraryMissing { .. }) => Some(error),
        Err(error @ Error::Driver(DriverError::TooOld { .. })) => panic!("{error}"),
        _ => {
            println!("skip: this machine has a CUDA driver");
            None
        }
    }
}

fn require_advice(error: &Error) {
    let text = error.to_string();
    for part in [
        "the CUDA driver",
        "libcuda.so.1",
        "install the NVIDIA driver",
        "--gpus",
    ] {
        assert!(text.contains(part), "{part} is not in: {text}");
    }
}

#[test]
fn a_local_group_without_a_driver_says_what_is_missing() {
    if let Some(error) = error_of(Group::local(&[0], &GroupOptions::default())) {
        require_advice(&error);
    }
}

#[test]
fn everything_else_that_needs_a_driver_says_the_same_each_time() {
    for _ in 0..2 {
        if let Some(error) = error_of(ferry::cuda::device_count()) {
            require_advice(&error);
        }
        if let Some(error) = error_of(ferry::cuda::CudaDevice::open(0)) {
            require_advice(&error);
        }
    }
}

/// An empty library, say, which is loaded with all functions, and then says that it is no driver.
#[test]
fn a_driver_in_the_loaders_path_has_every_function() {
    let paths = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    if !env::split_paths(&paths).any(|path| path.join("libcuda.so.1").is_file()) {
        println!("skip: LD_LIBRARY_PATH names no folder with a CUDA driver");
        return;
    }
    match ferry::cuda::device_count() {
        Ok(_) | Err(Error::Cuda(_)) => {}
        Err(error) => {
            let text = error.to_string();
            assert!(
                text.contains("a library to link with, not a driver"),
                "{text}"
            );
        }
    }
}
