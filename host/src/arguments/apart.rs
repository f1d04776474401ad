//! That a dispatch writes nothing that it reads.

use super::combine::extent;
use super::{DispatchInput, DispatchOutput};
use crate::{Error, Plan, ScaleTensor};

impl DispatchOutput {
    /// Checks that no output, each of which was found to fit, is in the memory of an input: kernels still read
    /// these while they write.
    pub(crate) fn require_apart(&self, input: &DispatchInput, plan: &Plan) -> Result<(), Error> {
        let read = [
            ("x", extent(Some(&input.x), 16)),
            ("topk_ids", extent(Some(&input.topk_ids), 32)),
            ("topk_weights", extent(input.topk_weights.as_ref(), 32)),
            ("input_scale", extent(input.input_scale.as_ref(), 32)),
            (
                "tokens_on_device",
                extent(input.tokens_on_device.as_ref(), 32),
            ),
        ];
        let (scales, offsets) = match &self.scales {
            None => (None, None),
            Some(ScaleTensor::Transposed(scales)) => (extent(Some(scales), 32), None),
            Some(ScaleTensor::RowMajor(scales)) => (extent(Some(scales), 8), None),
            Some(ScaleTensor::Tiled { scales, offsets }) => {
                (extent(Some(scales), 8), extent(Some(offsets), 32))
            }
        };
        let bits = plan.shape().sizes().element_bits;
        let written = [
            ("tokens", extent(Some(&self.tokens), bits)),
            ("scales", scales),
            ("offsets", offsets),
            ("row_scales", extent(self.row_scales.as_ref(), 16)),
            ("row_offsets", extent(Some(&self.row_offsets), 32)),
            ("expert_ids", extent(Some(&self.expert_ids), 32)),
            ("src_info", extent(Some(&self.src_info), 32)),
        ];
        for (first, written) in &written {
            let Some(written) = written else { continue };
            let is_in = |(_, read): &&(_, Option<_>)| {
                read.as_ref().is_some_and(|read| written.overlaps(read))
            };
            if let Some(&(second, _)) = read.iter().find(is_in) {
                return Err(Error::TensorsOverlap { first, second });
            }
        }
        Ok(())
    }
}
