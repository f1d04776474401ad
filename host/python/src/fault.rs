//! Reports of kernels.

use pyo3::prelude::*;

/// Report of a kernel about an input, or the reason why a rank gave up.
#[pyclass(frozen, eq, module = "ferry_ep")]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fault(pub(crate) ferry::Fault);

#[pymethods]
impl Fault {
    #[getter]
    fn kind(&self) -> String {
        format!("{:?}", self.0.kind)
    }

    #[getter]
    fn is_input(&self) -> bool {
        self.0.kind.is_input()
    }

    #[getter]
    fn kernel(&self) -> &'static str {
        self.0.kernel.name()
    }

    #[getter]
    fn phase(&self) -> &'static str {
        match (self.0.kernel.dispatches(), self.0.kernel.combines()) {
            (true, _) => "dispatch",
            (_, true) => "combine",
            _ => "silu",
        }
    }

    #[getter]
    fn rank(&self) -> u32 {
        self.0.rank.0
    }

    #[getter]
    fn peer(&self) -> u32 {
        self.0.peer.0
    }

    #[getter]
    fn culprit(&self) -> u32 {
        self.0.culprit.0
    }

    #[getter]
    fn region(&self) -> String {
        format!("{:?}", self.0.region)
    }

    #[getter]
    fn index(&self) -> u64 {
        self.0.index
    }

    #[getter]
    fn slot(&self) -> Option<u32> {
        self.0.slot()
    }

    #[getter]
    fn wanted(&self) -> u64 {
        self.0.wanted
    }

    /// An id of an expert has a sign.
    #[getter]
    fn saw(&self) -> i128 {
        match self.0.kind {
            ferry::FaultKind::InvalidExpert => self.0.saw.cast_signed().into(),
            _ => self.0.saw.into(),
        }
    }

    #[getter]
    fn round(&self) -> u64 {
        self.0.epoch
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    fn __repr__(&self) -> String {
        format!("<ferry_ep.Fault {}: {}>", self.kind(), self.0)
    }
}
