//! Outputs of dispatches in tensors, which have several of them, or dimensions that callers see.

use ferry::{DataType, DispatchOutput, DispatchTensors};
use pyo3::prelude::*;

use crate::communicator::Communicator;
use crate::errors;
use crate::outputs::placed;
use crate::reader::{Given, Reader};

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

impl Communicator {
    /// The outputs in these tensors: at `places`, or each output in one, in order.
    pub(crate) fn output_in(
        &self,
        reader: &Reader,
        places: Option<&Places>,
        tensors: &[Bound<'_, PyAny>],
    ) -> PyResult<DispatchOutput> {
        let given = match places {
            Some(places) => self.parts(reader, places, tensors)?,
            None => self.each(reader, tensors)?,
        };
        placed(&self.plan.get().plan, &given)
    }

    /// Each output in a tensor.
    fn each(
        &self,
        reader: &Reader,
        tensors: &[Bound<'_, PyAny>],
    ) -> PyResult<DispatchTensors<Given>> {
        let (given, count) = (tensors.len(), self.outputs.iter().count());
        if given != count {
            let text = format!("{given} outputs were given, and there are {count}");
            return Err(errors::raise("ArgumentError", text));
        }
        let mut tensors = tensors.iter();
        self.outputs.try_map(|of| {
            let tensor = tensors.next().ok_or_else(|| misplaced(of.0))?;
            reader.read(of, tensor, self.ordinal)
        })
    }

    /// Outputs that are parts of tensors.
    fn parts(
        &self,
        reader: &Reader,
        places: &Places,
        tensors: &[Bound<'_, PyAny>],
    ) -> PyResult<DispatchTensors<Given>> {
        let mut places = places.0.iter();
        self.outputs.try_map(|(name, _)| {
            let (index, offset, data_type, shape) = places.next().ok_or_else(|| misplaced(name))?;
            let tensor = tensors.get(*index).ok_or_else(|| misplaced(name))?;
            let whole = reader.read((name, *data_type), tensor, self.ordinal)?;
            let part = whole.part((name, *data_type), *offset, shape);
            part.ok_or_else(|| misplaced(name))
        })
    }
}

/// The error of an output whose place is not there.
fn misplaced(name: &str) -> PyErr {
    errors::raise("ArgumentError", format!("output {name} has no place"))
}
