//! The process that made a handle, the only one that can use it.

use std::mem::ManuallyDrop;
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors;

/// Number of forks between the first process with this module and this one. Handles compare it rather than
/// the process's number, which costs a system call.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// Lets the interpreter count its forks.
pub(crate) fn count_forks(py: Python<'_>) -> PyResult<()> {
    let options = PyDict::new(py);
    options.set_item("after_in_child", pyo3::wrap_pyfunction!(has_forked, py)?)?;
    let os = py.import("os")?;
    os.call_method("register_at_fork", (), Some(&options))?;
    Ok(())
}

/// Number of forks between the first process with this module and this one.
pub(crate) fn forks() -> u32 {
    FORKS.load(Ordering::Relaxed)
}

#[pyfunction]
fn has_forked() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// A value that is used and dropped only by the process that made it: a child of a fork has neither the
/// driver nor the simulator's thread.
pub(crate) struct Own<T> {
    process: u32,
    forks: u32,
    value: ManuallyDrop<T>,
}

impl<T> Own<T> {
    pub(crate) fn new(value: T) -> Self {
        Self {
            process: process::id(),
            forks: FORKS.load(Ordering::Relaxed),
            value: ManuallyDrop::new(value),
        }
    }

    fn is_here(&self) -> bool {
        self.forks == FORKS.load(Ordering::Relaxed)
    }

    /// Returns the value, or `ForkError` after a fork. `what` is the handle's kind: "group".
    pub(crate) fn get(&self, what: &str) -> PyResult<&T> {
        if self.is_here() {
            return Ok(&self.value);
        }
        Err(errors::raise(
            "ForkError",
            format!(
                "the {what} was made by process {}, and process {} is a fork of it: start processes \
                 before groups are made, or with the method \"spawn\"",
                self.process,
                process::id()
            ),
        ))
    }
}

impl<T> Drop for Own<T> {
    fn drop(&mut self) {
        if self.is_here() {
            // SAFETY: nothing uses the value after this drop, which runs once.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}
