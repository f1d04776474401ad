//! Reports of kernels.

use std::hash::{DefaultHasher, Hash, Hasher};

use ferry::device::FaultPage;
use pyo3::prelude::*;

/// Words of a record.
pub(crate) const WORDS: usize = size_of::<FaultPage>() / size_of::<u64>();

/// Report of a kernel: about an input, or the reason why a rank gave up. ``str`` says all of it.
#[pyclass(frozen, eq, module = "ferry_ep")]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fault(pub(crate) ferry::Fault);

#[pymethods]
impl Fault {
    fn __hash__(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.words().hash(&mut hasher);
        hasher.finish()
    }

    /// ``"PeerTimeout"``, ``"LocalTimeout"``, ``"InvalidExpert"``, ``"DuplicateExpert"``,
    /// ``"TooManyOnDevice"``, ``"LostScales"``, ``"OutputTooSmall"``, ``"RowOutOfBounds"``,
    /// ``"TooManyTokens"``, ``"OutOfTurn"`` or ``"NetworkStalled"``.
    #[getter]
    fn kind(&self) -> String {
        format!("{:?}", self.0.kind)
    }

    /// Whether the input is at fault, and the round went on.
    #[getter]
    fn is_input(&self) -> bool {
        self.0.kind.is_input()
    }

    /// Kernel that reported it.
    #[getter]
    fn kernel(&self) -> &'static str {
        self.0.kernel.name()
    }

    /// ``"dispatch"`` or ``"combine"``.
    #[getter]
    fn phase(&self) -> &'static str {
        match (self.0.kernel.dispatches(), self.0.kernel.combines()) {
            (true, _) => "dispatch",
            (_, true) => "combine",
            _ => "silu",
        }
    }

    /// Rank that reported it.
    #[getter]
    fn rank(&self) -> u32 {
        self.0.rank.0
    }

    /// Other party to the fault: the rank that was waited for.
    #[getter]
    fn peer(&self) -> u32 {
        self.0.peer.0
    }

    /// Rank at which the chain of waits begins.
    #[getter]
    fn culprit(&self) -> u32 {
        self.0.culprit.0
    }

    /// Data that was awaited or read.
    #[getter]
    fn region(&self) -> String {
        format!("{:?}", self.0.region)
    }

    /// Index of the token, word or row.
    #[getter]
    fn index(&self) -> u64 {
        self.0.index
    }

    /// Top-k slot of token ``index``, if an expert id is at fault.
    #[getter]
    fn slot(&self) -> Option<u32> {
        self.0.slot()
    }

    /// Expected value.
    #[getter]
    fn wanted(&self) -> u64 {
        self.0.wanted
    }

    /// Value found instead; an expert id with its sign.
    #[getter]
    fn saw(&self) -> i128 {
        match self.0.kind {
            ferry::FaultKind::InvalidExpert => self.0.saw.cast_signed().into(),
            _ => self.0.saw.into(),
        }
    }

    /// Round, from 1 on for each communicator.
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

impl Fault {
    /// The record, without the number of ranks that share the GPU.
    pub(crate) fn words(&self) -> [u64; WORDS] {
        bytemuck::cast(FaultPage::of(&self.0, 1))
    }
}
