//! Errors of the CUDA driver.

use std::fmt;

/// A CUDA driver call that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaError {
    /// The function: "cuLaunchKernelEx".
    pub call: &'static str,
    /// Its result.
    pub code: u32,
    /// The code's name: "CUDA_ERROR_INVALID_VALUE".
    pub name: String,
    /// Subject of the call, or the compiler's log; may be empty.
    pub detail: String,
}

impl fmt::Display for CudaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            call,
            code,
            name,
            detail,
        } = self;
        write!(f, "{call} failed: {name} ({code})")?;
        if detail.is_empty() {
            Ok(())
        } else {
            write!(f, ": {detail}")
        }
    }
}

impl std::error::Error for CudaError {}
