//! Calls with arguments that were checked once, in which a hot path passes integers alone.

use ferry::{CombineOutput, DevicePtr, Tensor};
use pyo3::prelude::*;

use crate::arguments::Call;
use crate::communicator::{Communicator, handle};
use crate::scalars;

/// A dispatch with arguments that were checked once: a function of handles and addresses.
#[pyclass(frozen, module = "ferry_ep")]
pub(crate) struct PreparedDispatch {
    communicator: Py<Communicator>,
    call: Py<Call>,
}

#[pymethods]
impl PreparedDispatch {
    #[new]
    fn new(communicator: Py<Communicator>, call: Py<Call>) -> Self {
        Self { communicator, call }
    }

    /// Enqueues it. An address of 0 is the prepared one. Errors are those of a dispatch.
    #[pyo3(signature = (stream=0, x=0, topk_ids=0, topk_weights=0, /))]
    fn __call__(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = scalars::stream)] stream: u64,
        #[pyo3(from_py_with = scalars::x)] x: u64,
        #[pyo3(from_py_with = scalars::topk_ids)] topk_ids: u64,
        #[pyo3(from_py_with = scalars::topk_weights)] topk_weights: u64,
    ) -> PyResult<()> {
        let mut call = self.call.get().call;
        if let ferry::Call::Dispatch(input, _) = &mut call {
            input.x.at = moved(input.x.at, x);
            input.topk_ids.at = moved(input.topk_ids.at, topk_ids);
            if let Some(weights) = &mut input.topk_weights {
                weights.at = moved(weights.at, topk_weights);
            }
        }
        (self.communicator.get()).enqueue(py, handle(stream), &call)
    }
}

/// A combine with arguments that were checked once: a function of handles and addresses.
#[pyclass(frozen, module = "ferry_ep")]
pub(crate) struct PreparedCombine {
    communicator: Py<Communicator>,
    call: Py<Call>,
}

#[pymethods]
impl PreparedCombine {
    #[new]
    fn new(communicator: Py<Communicator>, call: Py<Call>) -> Self {
        Self { communicator, call }
    }

    /// Enqueues it. An address of 0 is the prepared one. Errors are those of a combine.
    #[pyo3(signature = (stream=0, expert_rows=0, combined=0, received_weights=0, weights=0, /))]
    fn __call__(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = scalars::stream)] stream: u64,
        #[pyo3(from_py_with = scalars::expert_rows)] expert_rows: u64,
        #[pyo3(from_py_with = scalars::combined)] combined: u64,
        #[pyo3(from_py_with = scalars::received_weights)] received_weights: u64,
        #[pyo3(from_py_with = scalars::weights)] weights: u64,
    ) -> PyResult<()> {
        let mut call = self.call.get().call;
        if let ferry::Call::Combine(input, output) = &mut call {
            input.expert_rows.at = moved(input.expert_rows.at, expert_rows);
            if let Some(given) = &mut input.received_weights {
                given.at = moved(given.at, received_weights);
            }
            match output {
                CombineOutput::Summed(Tensor { at, .. }) => *at = moved(*at, combined),
                CombineOutput::Apart(Tensor { at, .. }) => *at = moved(*at, combined),
                CombineOutput::Weighted {
                    combined: tensor,
                    weights: returned,
                } => {
                    tensor.at = moved(tensor.at, combined);
                    returned.at = moved(returned.at, weights);
                }
            }
        }
        (self.communicator.get()).enqueue(py, handle(stream), &call)
    }
}

/// Memory of as many bytes at another address, unless that is 0.
const fn moved(at: DevicePtr, address: u64) -> DevicePtr {
    if address == 0 {
        return at;
    }
    // SAFETY: the caller's tensor there has the prepared tensor's type and shape, and outlives its use:
    // documented on `ferry_ep.PreparedDispatch` and `ferry_ep.PreparedCombine`.
    unsafe { DevicePtr::new(address, at.bytes()) }
}
