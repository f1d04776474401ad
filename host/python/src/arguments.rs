//! Checked arguments of dispatch and combine.

use ferry::{Capacity, CombineEpilogue, CombineSteps, DispatchTensors};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors;
use crate::outputs;
use crate::plan::Plan;
use crate::tensor::{Tensor, optional};

/// Objects that keep the memory of arguments alive.
type Kept = Vec<Py<Tensor>>;

/// A rank's inputs of a dispatch.
#[pyclass(frozen, module = "ferry_ep._ferry")]
pub(crate) struct DispatchInput {
    pub(crate) input: ferry::DispatchInput,
    _kept: Kept,
}

#[pymethods]
impl DispatchInput {
    #[new]
    #[pyo3(signature = (x, topk_ids, topk_weights=None, input_scale=None, tokens_on_device=None))]
    fn new(
        x: &Bound<'_, Tensor>,
        topk_ids: &Bound<'_, Tensor>,
        topk_weights: Option<&Bound<'_, Tensor>>,
        input_scale: Option<&Bound<'_, Tensor>>,
        tokens_on_device: Option<&Bound<'_, Tensor>>,
    ) -> PyResult<Self> {
        let input = ferry::DispatchInput {
            topk_weights: optional(topk_weights, "topk_weights")?,
            input_scale: optional(input_scale, "input_scale")?,
            tokens_on_device: optional(tokens_on_device, "tokens_on_device")?,
            ..ferry::DispatchInput::new(x.get().of("x")?, topk_ids.get().of("topk_ids")?)
        };
        let rest = [topk_weights, input_scale, tokens_on_device];
        Ok(Self {
            input,
            _kept: keep([Some(x), Some(topk_ids)].into_iter().chain(rest)),
        })
    }

    #[getter]
    fn tokens(&self) -> usize {
        self.input.x.dims[0]
    }
}

/// A rank's outputs of a dispatch.
#[pyclass(frozen, module = "ferry_ep._ferry")]
pub(crate) struct DispatchOutput {
    pub(crate) output: ferry::DispatchOutput,
    _kept: Kept,
}

#[pymethods]
impl DispatchOutput {
    /// `tensors` has a tensor for each layout of `Plan._output_layout`, by name.
    #[new]
    fn new(
        plan: &Plan,
        rows: usize,
        scale_blocks: usize,
        tensors: &Bound<'_, PyDict>,
    ) -> PyResult<Self> {
        let (mut at, mut kept) = (DispatchTensors::default(), Vec::new());
        for (name, tensor) in tensors {
            let name: String = name.extract()?;
            let tensor = tensor.cast_into::<Tensor>()?;
            if !outputs::set(&mut at, &name, tensor.get().memory()) {
                let text = format!("a dispatch has no output {name:?}");
                return Err(errors::raise("ArgumentError", text));
            }
            kept.push(tensor.unbind());
        }
        let capacity = Capacity { rows, scale_blocks };
        let at = outputs::addresses(at);
        let output = ferry::DispatchOutput::from_addresses(&plan.plan, capacity, &at);
        Ok(Self {
            output: output.map_err(errors::from)?,
            _kept: kept,
        })
    }
}

/// A rank's inputs of a combine.
#[pyclass(frozen, module = "ferry_ep._ferry")]
pub(crate) struct CombineInput {
    pub(crate) input: ferry::CombineInput,
    _kept: Kept,
}

#[pymethods]
impl CombineInput {
    #[new]
    #[pyo3(signature = (
        expert_rows, topk_weights=None, row_weights=None, row_scales=None, bias=None, bias2=None,
        residual=None
    ))]
    fn new(
        expert_rows: &Bound<'_, Tensor>,
        topk_weights: Option<&Bound<'_, Tensor>>,
        row_weights: Option<&Bound<'_, Tensor>>,
        row_scales: Option<&Bound<'_, Tensor>>,
        bias: Option<&Bound<'_, Tensor>>,
        bias2: Option<&Bound<'_, Tensor>>,
        residual: Option<&Bound<'_, Tensor>>,
    ) -> PyResult<Self> {
        let steps = CombineSteps {
            row_scales: optional(row_scales, "row_scales")?,
            biases: [optional(bias, "bias")?, optional(bias2, "bias2")?],
            residual: optional(residual, "residual")?,
        };
        let epilogue = if steps == CombineSteps::default() {
            CombineEpilogue::None
        } else {
            CombineEpilogue::Steps(steps)
        };
        let input = ferry::CombineInput {
            topk_weights: optional(topk_weights, "topk_weights")?,
            row_weights: optional(row_weights, "row_weights")?,
            epilogue,
            ..ferry::CombineInput::new(expert_rows.get().of("expert_rows")?)
        };
        let rest = [topk_weights, row_weights, row_scales, bias, bias2, residual];
        Ok(Self {
            input,
            _kept: keep([Some(expert_rows)].into_iter().chain(rest)),
        })
    }
}

/// A rank's output of a combine: sums of two dimensions, or rows apart of three.
#[pyclass(frozen, module = "ferry_ep._ferry")]
pub(crate) struct CombineOutput {
    pub(crate) output: ferry::CombineOutput,
    _kept: Kept,
}

#[pymethods]
impl CombineOutput {
    #[new]
    fn new(combined: &Bound<'_, Tensor>) -> PyResult<Self> {
        let tensor = combined.get();
        let output = match tensor.rank() {
            3 => ferry::CombineOutput::Apart(tensor.of("combined")?),
            _ => ferry::CombineOutput::Summed(tensor.of("combined")?),
        };
        Ok(Self {
            output,
            _kept: keep([Some(combined)]),
        })
    }
}

fn keep<'a, 'py: 'a>(given: impl IntoIterator<Item = Option<&'a Bound<'py, Tensor>>>) -> Kept {
    let given = given.into_iter().flatten();
    given.map(|tensor| tensor.clone().unbind()).collect()
}
