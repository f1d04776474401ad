//! The operators of torch: calls with its tensors, in its current stream.

use ferry::{CombineInput, CombineOutput, DataType, DispatchInput};
use pyo3::prelude::*;

use crate::communicator::Communicator;
use crate::errors;
use crate::outputs::placed;
use crate::reader::Reader;

#[pymethods]
impl Communicator {
    /// Enqueues a dispatch. `outputs` has a tensor for each layout of `Plan._output_layout`, in order.
    /// Returns whether the stream is being captured.
    #[pyo3(signature = (reader, x, topk_ids, topk_weights, outputs, /))]
    fn _dispatch_tensors(
        &self,
        py: Python<'_>,
        reader: &Reader,
        x: &Bound<'_, PyAny>,
        topk_ids: &Bound<'_, PyAny>,
        topk_weights: Option<&Bound<'_, PyAny>>,
        outputs: Vec<Bound<'_, PyAny>>,
    ) -> PyResult<bool> {
        let read = |of, value| reader.read(of, value, self.ordinal);
        let weights = topk_weights.map(|of| read(("topk_weights", DataType::F32), of)?.of());
        let input = DispatchInput {
            topk_weights: weights.transpose()?,
            ..DispatchInput::new(
                read(("x", DataType::Bf16), x)?.of()?,
                read(("topk_ids", DataType::I32), topk_ids)?.of()?,
            )
        };
        let count = self.outputs.iter().count();
        if outputs.len() != count {
            let given = outputs.len();
            let text = format!("{given} outputs were given, and there are {count}");
            return Err(errors::raise("ArgumentError", text));
        }
        let mut given = outputs.iter();
        let given = self.outputs.try_map(|of| match given.next() {
            Some(value) => read(of, value),
            None => Err(errors::raise(
                "ArgumentError",
                format!("no output {}", of.0),
            )),
        })?;
        let output = placed(&self.plan.get().plan, &given)?;
        let stream = reader.stream(py, self.ordinal)?;
        self.call(py, |communicator| {
            communicator.dispatch(stream, &input, &output)
        })?;
        self.has_sent(&input)?;
        Ok(self.device_of()?.capture(stream).is_some())
    }

    /// Enqueues a combine; three dimensions of `combined` are rows apart. Returns whether the stream is
    /// being captured.
    #[pyo3(signature = (reader, expert_rows, topk_weights, combined, /))]
    fn _combine_tensors(
        &self,
        py: Python<'_>,
        reader: &Reader,
        expert_rows: &Bound<'_, PyAny>,
        topk_weights: Option<&Bound<'_, PyAny>>,
        combined: &Bound<'_, PyAny>,
    ) -> PyResult<bool> {
        let read = |of, value| reader.read(of, value, self.ordinal);
        let weights = topk_weights.map(|of| read(("topk_weights", DataType::F32), of)?.of());
        let input = CombineInput {
            topk_weights: weights.transpose()?,
            ..CombineInput::new(read(("expert_rows", DataType::Bf16), expert_rows)?.of()?)
        };
        let combined = read(("combined", DataType::Bf16), combined)?;
        let output = match combined.rank {
            3 => CombineOutput::Apart(combined.of()?),
            _ => CombineOutput::Summed(combined.of()?),
        };
        let stream = reader.stream(py, self.ordinal)?;
        self.call(py, |communicator| {
            communicator.combine(stream, &input, &output)
        })?;
        self.has_returned()?;
        Ok(self.device_of()?.capture(stream).is_some())
    }
}
