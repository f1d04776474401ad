//! That a dispatch writes nothing that it reads.

use super::combine::{Extent, extent};
use super::{DispatchInput, DispatchOutput};
use crate::{Error, ScaleTensor, Tensor};

impl DispatchOutput {
    /// Checks that no output, each of which was found to fit, is in the memory of an input: kernels
    /// still read these while they write.
    pub(crate) fn require_apart(&self, input: &DispatchInput) -> Result<(), Error> {
        let read = [
            ("topk_ids", extent(Some(&input.topk_ids))),
            ("topk_weights", extent(input.topk_weights.as_ref())),
            ("input_scale", extent(input.input_scale.as_ref())),
            ("tokens_on_device", extent(input.tokens_on_device.as_ref())),
        ];
        let (scales, offsets) = match &self.scales {
            None => (None, None),
            Some(ScaleTensor::Transposed(scales)) => (extent(Some(scales)), None),
            Some(ScaleTensor::RowMajor(scales)) => (extent(Some(scales)), None),
            Some(ScaleTensor::Tiled { scales, offsets }) => {
                (extent(Some(scales)), extent(Some(offsets)))
            }
        };
        let written = [
            ("tokens", extent(Some(&self.tokens))),
            ("scales", scales),
            ("offsets", offsets),
            ("row_scales", extent(self.row_scales.as_ref())),
            ("row_offsets", extent(Some(&self.row_offsets))),
            ("expert_ids", extent(Some(&self.expert_ids))),
            ("src_info", extent(Some(&self.src_info))),
        ];
        for (first, written) in &written {
            let Some(written) = written else { continue };
            if rows_overlap(&input.x, written) {
                return Err(Error::TensorsOverlap { first, second: "x" });
            }
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

/// Whether rows of BF16, which need not follow each other, have a byte in common with `written`.
fn rows_overlap(x: &Tensor<2>, written: &Extent) -> bool {
    let [rows, row_bytes] = [x.dims[0], 2 * x.dims[1]].map(|count| count as u64);
    if rows == 0 || written.bytes == 0 {
        return false;
    }
    let Some(distance) = written.address.checked_sub(x.at.address()) else {
        return x.at.address() - written.address < written.bytes;
    };
    let stride = match rows {
        1 => row_bytes,
        _ => 2 * x.strides[0] as u64,
    };
    if stride < row_bytes {
        return false;
    }
    let (row, within) = (distance / stride, distance % stride);
    row < rows && within < row_bytes || row + 1 < rows && stride - within < written.bytes
}
