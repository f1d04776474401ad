//! What is wrong with a tensor.

use std::fmt;

/// A tensor that does not fit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorError {
    /// The argument's name.
    pub tensor: &'static str,
    /// What was wanted.
    pub wanted: String,
    /// What came instead.
    pub given: String,
}

impl fmt::Display for TensorError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            tensor,
            wanted,
            given,
        } = self;
        write!(f, "tensor {tensor}: wanted {wanted}, given {given}")
    }
}

impl std::error::Error for TensorError {}
