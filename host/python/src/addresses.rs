//! Calls with addresses alone, of tensors that have the plan's types and shapes: the operators of torch.

use ferry::{Capacity, CombineInput, CombineMode, CombineOutput, DataType, DevicePtr};
use ferry::{DispatchInput, DispatchOutput, Tensor};
use pyo3::prelude::*;

use crate::communicator::{Communicator, handle};
use crate::errors;

#[pymethods]
impl Communicator {
    /// Enqueues a dispatch of `x`, BF16 `[tokens, hidden]` with rows `x_stride` elements apart. Ids are i64
    /// if `wide_ids`, else i32. `topk_weights` is 0 if there are none. `outputs` has one address for each
    /// layout of `Plan._output_layout`, in the same order; another number of them is an `ArgumentError`.
    #[expect(clippy::too_many_arguments, reason = "numbers of a hot call")]
    fn _dispatch_at(
        &self,
        py: Python<'_>,
        stream: u64,
        tokens: usize,
        x: u64,
        x_stride: usize,
        topk_ids: u64,
        wide_ids: bool,
        topk_weights: u64,
        rows: usize,
        scale_blocks: usize,
        outputs: Vec<u64>,
    ) -> PyResult<()> {
        let plan = self.plan.get().plan;
        let (hidden, top_k) = (plan.config().hidden, plan.config().top_k);
        let of_ids = [tokens, top_k];
        let weights = tensor(topk_weights, DataType::F32, of_ids);
        let id_type = if wide_ids {
            DataType::I64
        } else {
            DataType::I32
        };
        let ids = tensor(topk_ids, id_type, of_ids);
        let x = tensor(x, DataType::Bf16, [tokens, hidden]);
        let memory = strided(x, x_stride);
        let input = DispatchInput {
            topk_weights: (topk_weights != 0).then_some(weights),
            ..DispatchInput::new(Tensor { at: memory, ..x }.with_row_stride(x_stride), ids)
        };
        let capacity = Capacity {
            rows,
            scale_blocks,
            wide_ids,
        };
        let layout = plan.output_layout(capacity).map_err(errors::from)?;
        let count = layout.iter().count();
        if outputs.len() != count {
            let text = format!(
                "{} outputs were given, and there are {count}",
                outputs.len()
            );
            return Err(errors::raise("ArgumentError", text));
        }
        let mut given = outputs.into_iter();
        let at = layout.try_map(|of| Ok(memory_at(given.next().unwrap_or(0), of.bytes)));
        let output = at.and_then(|at| DispatchOutput::from_addresses(&plan, capacity, &at));
        let (stream, output) = (handle(stream), output.map_err(errors::from)?);
        self.call(py, |communicator| {
            communicator.dispatch(stream, &input, &output)
        })?;
        self.has_sent()
    }

    /// Enqueues a combine of `rows` expert rows, of a round with `tokens` tokens.
    #[expect(clippy::too_many_arguments, reason = "numbers of a hot call")]
    fn _combine_at(
        &self,
        py: Python<'_>,
        stream: u64,
        tokens: usize,
        rows: usize,
        expert_rows: u64,
        topk_weights: u64,
        combined: u64,
    ) -> PyResult<()> {
        let plan = self.plan.get().plan;
        let config = plan.config();
        let (hidden, top_k) = (config.hidden, config.top_k);
        let weights = tensor(topk_weights, DataType::F32, [tokens, top_k]);
        let input = CombineInput {
            topk_weights: (topk_weights != 0).then_some(weights),
            ..CombineInput::new(tensor(expert_rows, DataType::Bf16, [rows, hidden]))
        };
        let is_apart = config.combine == CombineMode::Exact && topk_weights == 0;
        let output = if is_apart && !config.skip_a2a {
            CombineOutput::Apart(tensor(combined, DataType::Bf16, [tokens, top_k, hidden]))
        } else {
            CombineOutput::Summed(tensor(combined, DataType::Bf16, [tokens, hidden]))
        };
        let stream = handle(stream);
        self.call(py, |communicator| {
            communicator.combine(stream, &input, &output)
        })?;
        self.has_returned()
    }
}

/// A tensor without gaps at an address that the caller promised.
fn tensor<const N: usize>(address: u64, data_type: DataType, dims: [usize; N]) -> Tensor<N> {
    let shape = Tensor::contiguous(DevicePtr::NULL, data_type, dims);
    let at = memory_at(address, shape.bytes());
    Tensor { at, ..shape }
}

/// The memory of rows that are `stride` elements apart.
fn strided(x: Tensor<2>, stride: usize) -> DevicePtr {
    let [rows, columns] = x.dims;
    let between = rows.saturating_sub(1).saturating_mul(stride);
    memory_at(x.at.address(), 2 * between.saturating_add(columns) as u64)
}

const fn memory_at(address: u64, bytes: u64) -> DevicePtr {
    // SAFETY: the operators pass addresses of tensors of these types and shapes on the rank's device, which
    // torch keeps until the stream has passed the kernel.
    unsafe { DevicePtr::new(address, bytes) }
}
