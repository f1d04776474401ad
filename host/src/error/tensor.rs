//! Errors of tensors.

use std::fmt;

/// A tensor that does not fit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorError {
    /// The argument's name.
    pub tensor: &'static str,
    /// Requirement, in words.
    pub wanted: String,
    /// Value found instead.
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
