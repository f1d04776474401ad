//! Checked arguments of dispatch and combine.

use ferry::{Capacity, CombineEpilogue, CombineSteps, DataType};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors;
use crate::plan::Plan;
use crate::tensor::{Tensor, optional};

/// Objects that keep the memory of arguments alive.
type Kept = Vec<Py<Tensor>>;

/// A rank's inputs of a dispatch.
#[pyclass(frozen, module = "ferry_ep.core._ferry")]
pub(crate) struct DispatchInput {
    pub(crate) input: ferry::DispatchInput,
    _kept: Kept,
}

#[pymethods]
impl DispatchInput {
    #[new]
    #[pyo3(signature = (
        x, topk_ids, topk_weights=None, input_scale=None, tokens_on_device=None, x_scales=None
    ))]
    fn new(
        x: &Bound<'_, Tensor>,
        topk_ids: &Bound<'_, Tensor>,
        topk_weights: Option<&Bound<'_, Tensor>>,
        input_scale: Option<&Bound<'_, Tensor>>,
        tokens_on_device: Option<&Bound<'_, Tensor>>,
        x_scales: Option<&Bound<'_, Tensor>>,
    ) -> PyResult<Self> {
        let input = ferry::DispatchInput {
            topk_weights: optional(topk_weights, "topk_weights")?,
            input_scale: optional(input_scale, "input_scale")?,
            tokens_on_device: optional(tokens_on_device, "tokens_on_device")?,
            x_scales: optional(x_scales, "x_scales")?,
            ..ferry::DispatchInput::new(x.get().of("x")?, topk_ids.get().of("topk_ids")?)
        };
        let rest = [topk_weights, input_scale, tokens_on_device, x_scales];
        Ok(Self {
            input,
            _kept: keep([Some(x), Some(topk_ids)].into_iter().chain(rest)),
        })
    }

    #[getter]
    fn wide_ids(&self) -> bool {
        self.input.topk_ids.data_type == DataType::I64
    }
}

/// A rank's outputs of a dispatch.
#[pyclass(frozen, module = "ferry_ep.core._ferry")]
pub(crate) struct DispatchOutput {
    pub(crate) output: ferry::DispatchOutput,
    _kept: Kept,
}

#[pymethods]
impl DispatchOutput {
    /// `tensors` has a tensor for each layout of `layout_of`, by name.
    #[new]
    fn new(
        plan: &Plan,
        rows: usize,
        scale_blocks: usize,
        wide_ids: bool,
        tensors: &Bound<'_, PyDict>,
    ) -> PyResult<Self> {
        let capacity = Capacity {
            rows,
            scale_blocks,
            wide_ids,
        };
        let layout = plan.plan.output_layout(capacity).map_err(errors::from)?;
        let mut kept = Vec::new();
        let at = layout.try_map(|of| {
            let tensor = tensors.as_any().get_item(of.name)?.cast_into::<Tensor>()?;
            let memory = tensor.get().written(&of)?;
            kept.push(tensor.unbind());
            PyResult::Ok(memory)
        })?;
        let output = ferry::DispatchOutput::from_addresses(&plan.plan, capacity, &at);
        Ok(Self {
            output: output.map_err(errors::from)?,
            _kept: kept,
        })
    }
}

/// A rank's inputs of a combine.
#[pyclass(frozen, module = "ferry_ep.core._ferry")]
pub(crate) struct CombineInput {
    pub(crate) input: ferry::CombineInput,
    _kept: Kept,
}

/// A tensor that may be missing.
type Maybe<'a, 'py> = Option<&'a Bound<'py, Tensor>>;

#[pymethods]
impl CombineInput {
    /// `steps` are `row_scales`, `bias`, `bias2` and `residual`.
    #[new]
    fn new(
        expert_rows: &Bound<'_, Tensor>,
        topk_weights: Option<&Bound<'_, Tensor>>,
        row_weights: Option<&Bound<'_, Tensor>>,
        steps: [Option<Bound<'_, Tensor>>; 4],
        initial: [Option<Bound<'_, Tensor>>; 2],
        received_weights: Option<&Bound<'_, Tensor>>,
    ) -> PyResult<Self> {
        let [row_scales, bias, bias2, residual] = steps.each_ref().map(Option::as_ref);
        let initial: [Maybe<'_, '_>; 2] = initial.each_ref().map(Option::as_ref);
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
            initial: [
                optional(initial[0], "initial[0]")?,
                optional(initial[1], "initial[1]")?,
            ],
            received_weights: optional(received_weights, "received_weights")?,
            epilogue,
            ..ferry::CombineInput::new(expert_rows.get().of("expert_rows")?)
        };
        let of_rows = [
            Some(expert_rows),
            topk_weights,
            row_weights,
            received_weights,
        ];
        let of_tokens = [row_scales, bias, bias2, residual, initial[0], initial[1]];
        Ok(Self {
            input,
            _kept: keep(of_rows.into_iter().chain(of_tokens)),
        })
    }
}

/// A rank's output of a combine: sums `[tokens, hidden]`, with or without the returned weights, or rows that
/// are not summed, `[tokens, top_k, hidden]`.
#[pyclass(frozen, module = "ferry_ep.core._ferry")]
pub(crate) struct CombineOutput {
    pub(crate) output: ferry::CombineOutput,
    _kept: Kept,
}

#[pymethods]
impl CombineOutput {
    #[new]
    #[pyo3(signature = (combined, weights=None))]
    fn new(combined: &Bound<'_, Tensor>, weights: Option<&Bound<'_, Tensor>>) -> PyResult<Self> {
        let tensor = combined.get();
        let output = match (weights, tensor.rank()) {
            (Some(weights), _) => ferry::CombineOutput::Weighted {
                combined: tensor.of("combined")?,
                weights: weights.get().of("weights")?,
            },
            (None, 3) => ferry::CombineOutput::Apart(tensor.of("combined")?),
            (None, _) => ferry::CombineOutput::Summed(tensor.of("combined")?),
        };
        Ok(Self {
            output,
            _kept: keep([Some(combined), weights]),
        })
    }
}

/// A call of a round with checked arguments, which it keeps.
#[pyclass(frozen, module = "ferry_ep.core._ferry")]
pub(crate) struct Call {
    pub(crate) call: ferry::Call,
    _kept: (Option<Input>, Option<Output>),
}

#[derive(FromPyObject)]
enum Input {
    Dispatch(Py<DispatchInput>),
    Combine(Py<CombineInput>),
}

#[derive(FromPyObject)]
enum Output {
    Dispatch(Py<DispatchOutput>),
    Combine(Py<CombineOutput>),
}

#[pymethods]
impl Call {
    /// `name`: of the function that makes it.
    #[new]
    #[pyo3(signature = (name, input=None, output=None))]
    fn new(name: &str, input: Option<Input>, output: Option<Output>) -> PyResult<Self> {
        use ferry::Call as Of;
        let call = match (name, &input, &output) {
            ("dispatch", Some(Input::Dispatch(input)), Some(Output::Dispatch(output))) => {
                Of::Dispatch(input.get().input, output.get().output)
            }
            ("dispatch_async", Some(Input::Dispatch(input)), None) => {
                Of::DispatchAsync(input.get().input)
            }
            ("dispatch_counts", None, None) => Of::DispatchCounts,
            ("dispatch_wait", None, Some(Output::Dispatch(output))) => {
                Of::DispatchWait(output.get().output)
            }
            ("combine", Some(Input::Combine(input)), Some(Output::Combine(output))) => {
                Of::Combine(input.get().input, output.get().output)
            }
            ("combine_async", Some(Input::Combine(input)), Some(Output::Combine(output))) => {
                Of::CombineAsync(input.get().input, output.get().output)
            }
            ("combine_wait", None, None) => Of::CombineWait,
            ("give_up", None, None) => Of::GiveUp,
            _ => {
                let text = format!("no call {name} takes these arguments");
                return Err(errors::raise("ArgumentError", text));
            }
        };
        Ok(Self {
            call,
            _kept: (input, output),
        })
    }
}

fn keep<'a, 'py: 'a>(given: impl IntoIterator<Item = Option<&'a Bound<'py, Tensor>>>) -> Kept {
    let given = given.into_iter().flatten();
    given.map(|tensor| tensor.clone().unbind()).collect()
}
