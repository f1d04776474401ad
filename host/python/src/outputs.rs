//! The output tensors of a dispatch.

use ferry::{DispatchOutput, DispatchTensors, Plan, ReceiveLayout, ScaleTensor};
use pyo3::prelude::*;

use crate::reader::{Argument, Given};

/// Name and type of each output that a plan has.
pub(crate) type Outputs = DispatchTensors<Argument>;

/// The outputs in these tensors. The call checks them.
pub(crate) fn placed(plan: &Plan, given: &DispatchTensors<Given>) -> PyResult<DispatchOutput> {
    fn of<const N: usize>(given: Option<&Given>) -> PyResult<Option<ferry::Tensor<N>>> {
        given.map(Given::of).transpose()
    }
    let config = plan.config();
    let receive = config.receive.fields();
    let by_expert = receive.layout == ReceiveLayout::ByExpert;
    let is_transposed =
        receive.transposed_scales || (by_expert && config.format.scale_layout().is_none());
    let scales = match (&given.scales, &given.scale_offsets) {
        (Some(scales), Some(offsets)) => Some(ScaleTensor::Tiled {
            scales: scales.of()?,
            offsets: offsets.of()?,
        }),
        (Some(scales), None) if is_transposed => Some(ScaleTensor::Transposed(scales.of()?)),
        (Some(scales), None) => Some(ScaleTensor::RowMajor(scales.of()?)),
        (None, _) => None,
    };
    Ok(DispatchOutput {
        tokens: of(given.tokens.as_ref())?,
        scales,
        row_scales: of(given.row_scales.as_ref())?,
        row_offsets: of(given.row_offsets.as_ref())?,
        expert_ids: of(given.expert_ids.as_ref())?,
        src_info: given.src_info.of()?,
        ids: of(given.ids.as_ref())?,
        weights: of(given.weights.as_ref())?,
        source_counts: of(given.source_counts.as_ref())?,
        expert_counts: of(given.expert_counts.as_ref())?,
        row_ends: of(given.row_ends.as_ref())?,
        m_indices: of(given.m_indices.as_ref())?,
        source_ranges: of(given.source_ranges.as_ref())?,
    })
}
