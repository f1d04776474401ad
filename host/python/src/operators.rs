//! Calls with tensors of torch, read without Python, in its current stream.

use ferry::{Call, CombineInput, CombineOutput, DataType, DispatchInput, Tensor};
use pyo3::prelude::*;

use crate::communicator::Communicator;
use crate::placed::Places;
use crate::reader::{Argument, Reader};

/// A tensor, or none.
type Maybe<'py> = Option<Bound<'py, PyAny>>;
/// Inputs of a dispatch: `x`, `topk_ids`, `topk_weights`, `x_scales`.
type Inputs<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>, Maybe<'py>, Maybe<'py>);
/// Inputs of a combine: `expert_rows`, `topk_weights`, `received_weights`, both `initial`.
type Answers<'py> = (
    Bound<'py, PyAny>,
    Maybe<'py>,
    Maybe<'py>,
    Maybe<'py>,
    Maybe<'py>,
);

#[pymethods]
impl Communicator {
    /// Enqueues a dispatch, or its first half. `outputs` has a tensor for each layout of
    /// `layout_of`, in order, or the outputs at `places`, of which a first half takes the kept ids
    /// alone; scales belong to FP8 rows. Returns whether the stream is being captured.
    #[pyo3(signature = (reader, inputs, outputs, places, is_half, /))]
    fn dispatch_tensors(
        &self,
        py: Python<'_>,
        reader: &Reader,
        inputs: Inputs<'_>,
        outputs: Vec<Bound<'_, PyAny>>,
        places: Option<&Places>,
        is_half: bool,
    ) -> PyResult<bool> {
        let mut input = self.sent(reader, &inputs)?;
        if let Some(places) = places {
            input.kept_ids = self.kept_in(reader, places, &outputs)?;
        }
        let call = if is_half {
            Call::DispatchAsync(input)
        } else {
            Call::Dispatch(input, self.output_in(reader, places, &outputs)?)
        };
        let stream = reader.stream(py, self.ordinal)?;
        self.enqueue(py, stream, &call)?;
        Ok(self.device_of()?.capture(stream).is_some())
    }

    /// Enqueues the second half of a dispatch. `outputs` and `places` as in `_dispatch_tensors`.
    #[pyo3(signature = (reader, outputs, places, /))]
    fn dispatch_wait_tensors(
        &self,
        py: Python<'_>,
        reader: &Reader,
        outputs: Vec<Bound<'_, PyAny>>,
        places: Option<&Places>,
    ) -> PyResult<()> {
        let output = self.output_in(reader, places, &outputs)?;
        let stream = reader.stream(py, self.ordinal)?;
        self.enqueue(py, stream, &Call::DispatchWait(output))
    }

    /// Enqueues a combine, or its first half. `sums` are `combined`, of which three dimensions are rows
    /// apart, and `weights`. Returns whether the stream is being captured.
    #[pyo3(signature = (reader, answers, sums, is_half, /))]
    fn combine_tensors(
        &self,
        py: Python<'_>,
        reader: &Reader,
        answers: Answers<'_>,
        sums: (Bound<'_, PyAny>, Maybe<'_>),
        is_half: bool,
    ) -> PyResult<bool> {
        const F32: DataType = DataType::F32;
        const BF16: DataType = DataType::Bf16;
        let (expert_rows, topk_weights, received_weights, first, second) = &answers;
        let expert_rows = reader.read(("expert_rows", BF16), expert_rows, self.ordinal)?;
        let input = CombineInput {
            topk_weights: self.maybe(reader, ("topk_weights", F32), topk_weights)?,
            received_weights: self.maybe(reader, ("received_weights", F32), received_weights)?,
            initial: [
                self.maybe(reader, ("initial[0]", BF16), first)?,
                self.maybe(reader, ("initial[1]", BF16), second)?,
            ],
            ..CombineInput::new(expert_rows.rows()?)
        };
        let combined = reader.read(("combined", BF16), &sums.0, self.ordinal)?;
        let weights = self.maybe(reader, ("weights", F32), &sums.1)?;
        let output = match (weights, combined.rank()) {
            (Some(weights), _) => CombineOutput::Weighted {
                combined: combined.of()?,
                weights,
            },
            (None, 3) => CombineOutput::Apart(combined.of()?),
            (None, _) => CombineOutput::Summed(combined.of()?),
        };
        let stream = reader.stream(py, self.ordinal)?;
        let call = if is_half {
            Call::CombineAsync(input, output)
        } else {
            Call::Combine(input, output)
        };
        self.enqueue(py, stream, &call)?;
        Ok(self.device_of()?.capture(stream).is_some())
    }
}

impl Communicator {
    /// Reads the inputs of a dispatch.
    fn sent(&self, reader: &Reader, inputs: &Inputs<'_>) -> PyResult<DispatchInput> {
        let (x, topk_ids, topk_weights, x_scales) = inputs;
        let rows = if x_scales.is_some() {
            DataType::E4m3
        } else {
            DataType::Bf16
        };
        let x = self.read(reader, ("x", rows), x)?;
        let topk_ids = self.read(reader, ("topk_ids", DataType::I32), topk_ids)?;
        Ok(DispatchInput {
            topk_weights: self.maybe(reader, ("topk_weights", DataType::F32), topk_weights)?,
            x_scales: self.maybe(reader, ("x_scales", DataType::F32), x_scales)?,
            ..DispatchInput::new(x, topk_ids)
        })
    }

    /// Reads an argument.
    fn read<const N: usize>(
        &self,
        reader: &Reader,
        argument: Argument,
        value: &Bound<'_, PyAny>,
    ) -> PyResult<Tensor<N>> {
        reader.read(argument, value, self.ordinal)?.of()
    }

    /// Reads an argument, if it was given.
    fn maybe<const N: usize>(
        &self,
        reader: &Reader,
        argument: Argument,
        value: &Maybe<'_>,
    ) -> PyResult<Option<Tensor<N>>> {
        let value = value.as_ref();
        value
            .map(|value| self.read(reader, argument, value))
            .transpose()
    }
}
