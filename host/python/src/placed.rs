//! Dispatches into tensors that have several outputs, or dimensions that callers see.

use ferry::{DataType, DispatchOutput};
use pyo3::prelude::*;

use crate::communicator::Communicator;
use crate::errors;
use crate::operators::Inputs;
use crate::outputs::placed;
use crate::reader::Reader;

/// Number of a tensor, offset in bytes, data type and shape of an output.
type Place = (usize, u64, DataType, Vec<usize>);

/// Places of a dispatch's outputs in a list of tensors: for each of `Plan._output_layout`, in order, the
/// tensor's index, an offset in bytes, a data type and a shape.
#[pyclass(frozen, module = "ferry_ep._ferry")]
pub(crate) struct Places(Vec<Place>);

#[pymethods]
impl Places {
    #[new]
    fn new(places: Vec<(usize, u64, String, Vec<usize>)>) -> PyResult<Self> {
        let places = places.into_iter();
        let places = places.map(|(tensor, offset, data_type, shape)| {
            Ok((tensor, offset, crate::tensor::data_type(&data_type)?, shape))
        });
        Ok(Self(places.collect::<PyResult<_>>()?))
    }
}

#[pymethods]
impl Communicator {
    /// Enqueues a dispatch into `tensors`, or its first half. Scales belong to FP8 rows.
    #[pyo3(signature = (reader, inputs, places, tensors, is_half, /))]
    fn _dispatch_placed(
        &self,
        py: Python<'_>,
        reader: &Reader,
        inputs: Inputs<'_>,
        places: &Places,
        tensors: Vec<Bound<'_, PyAny>>,
        is_half: bool,
    ) -> PyResult<()> {
        let input = self.sent(reader, &inputs)?;
        let output = self.output_in(reader, places, &tensors)?;
        let stream = reader.stream(py, self.ordinal)?;
        self.call(py, |communicator| match is_half {
            true => communicator.dispatch_async(stream, &input),
            false => communicator.dispatch(stream, &input, &output),
        })?;
        self.has_sent(&input)
    }

    /// Enqueues the second half of a dispatch into `tensors`.
    #[pyo3(signature = (reader, places, tensors, /))]
    fn _dispatch_wait_placed(
        &self,
        py: Python<'_>,
        reader: &Reader,
        places: &Places,
        tensors: Vec<Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let output = self.output_in(reader, places, &tensors)?;
        let stream = reader.stream(py, self.ordinal)?;
        self.call(py, |communicator| {
            communicator.dispatch_wait(stream, &output)
        })
    }
}

impl Communicator {
    /// The outputs in these tensors.
    fn output_in(
        &self,
        reader: &Reader,
        places: &Places,
        tensors: &[Bound<'_, PyAny>],
    ) -> PyResult<DispatchOutput> {
        let mut places = places.0.iter();
        let given = self.outputs.try_map(|(name, _)| {
            let (index, offset, data_type, shape) = places.next().ok_or_else(|| misplaced(name))?;
            let tensor = tensors.get(*index).ok_or_else(|| misplaced(name))?;
            let whole = reader.read((name, *data_type), tensor, self.ordinal)?;
            let part = whole.part((name, *data_type), *offset, shape);
            part.ok_or_else(|| misplaced(name))
        })?;
        placed(&self.plan.get().plan, &given)
    }
}

/// The error of a place that is not there.
fn misplaced(name: &str) -> PyErr {
    errors::raise("ArgumentError", format!("output {name} has no place"))
}
