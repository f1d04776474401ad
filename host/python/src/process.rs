//! The process that made a handle, the only one that can use it.

use std::mem::ManuallyDrop;
use std::process;

use pyo3::prelude::*;

use crate::errors;

/// A value that is used and dropped only by the process that made it: a child of a fork has neither the
/// driver nor the simulator's thread.
pub(crate) struct Own<T> {
    process: u32,
    value: ManuallyDrop<T>,
}

impl<T> Own<T> {
    pub(crate) fn new(value: T) -> Self {
        Self {
            process: process::id(),
            value: ManuallyDrop::new(value),
        }
    }

    /// Returns the value, or `ForkError` after a fork. `what` is the handle's kind: "group".
    pub(crate) fn get(&self, what: &str) -> PyResult<&T> {
        let here = process::id();
        if here == self.process {
            return Ok(&self.value);
        }
        Err(errors::raise(
            "ForkError",
            format!(
                "the {what} was made by process {}, and process {here} is a fork of it: start processes \
                 before groups are made, or with the method \"spawn\"",
                self.process
            ),
        ))
    }
}

impl<T> Drop for Own<T> {
    fn drop(&mut self) {
        if process::id() == self.process {
            // SAFETY: nothing uses the value after this drop, which runs once.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}
