//! Calls with tensors of torch, read without Python, in its current stream.

use pyo3::prelude::*;

use crate::arguments::{Tensors, flat};
use crate::communicator::Communicator;
use crate::placed::Places;
use crate::reader::Reader;
use crate::tensor::Wanted;

/// Tensors, or none.
type List<'py> = Vec<Option<Bound<'py, PyAny>>>;

#[pymethods]
impl Communicator {
    /// Enqueues the call `name`. `inputs` are in the order of `arguments_of`, also a part of them from the
    /// first on; blocks of `expert_rows` are rows, too. `outputs` has a tensor for each layout of
    /// `layout_of`, or the outputs at `places`, of which a first half takes the kept ids alone; of a combine
    /// `combined`, of which three dimensions are rows apart, and `weights`. Returns whether the stream is
    /// being captured.
    #[pyo3(signature = (reader, name, inputs, outputs, places=None, /))]
    fn enqueue_tensors(
        &self,
        py: Python<'_>,
        reader: &Reader,
        name: &str,
        inputs: List<'_>,
        outputs: List<'_>,
        places: Option<&Places>,
    ) -> PyResult<bool> {
        let read = |wanted: Wanted, value: &Bound<'_, PyAny>| {
            let read = reader.read(wanted, value, self.ordinal)?;
            Ok(if wanted.0 == "expert_rows" {
                flat(read)
            } else {
                read
            })
        };
        let given = Tensors::of(&inputs, &outputs, places, &read);
        let call = given.call(self, name)?;
        let stream = reader.stream(py, self.ordinal)?;
        self.enqueue(py, stream, &call)?;
        Ok(self.device_of()?.capture(stream).is_some())
    }
}
