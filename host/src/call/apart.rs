//! Checks that a dispatch's outputs overlap neither its inputs nor each other.

use super::combine::{Extent, extent};
use super::{DispatchInput, DispatchOutput};
use crate::call::dispatch::Sent;
use crate::error::Error;
use crate::plan::Plan;
use crate::tensor::Tensor;

/// A tensor's name and extent, if it is present.
pub(super) type Named = (&'static str, Option<Extent>);

impl DispatchOutput {
    /// Checks that no output overlaps an input: kernels still read these while they write. Each output was
    /// checked by itself.
    pub(crate) fn require_apart(&self, input: &DispatchInput) -> Result<(), Error> {
        let ids = ("topk_ids", extent(Some(&input.topk_ids)));
        let weights = ("topk_weights", extent(input.topk_weights.as_ref()));
        let scale = ("input_scale", extent(input.input_scale.as_ref()));
        let count = ("tokens_on_device", extent(input.tokens_on_device.as_ref()));
        let scales = ("x_scales", input.extent_of_scales());
        self.require_outside(&input.x, &[ids, weights, scale, count, scales])
    }

    /// [`require_apart`](Self::require_apart) for the wait of a split dispatch, which reads inputs only for a
    /// shared expert.
    pub(crate) fn require_apart_from_sent(&self, sent: &Sent, plan: &Plan) -> Result<(), Error> {
        if !plan.config().shared_expert {
            return Ok(());
        }
        let scale = ("input_scale", extent(sent.input.input_scale.as_ref()));
        let scales = ("x_scales", sent.input.extent_of_scales());
        self.require_outside(&sent.input.x, &[scale, scales])
    }

    fn require_outside(&self, x: &Tensor<2>, read: &[Named]) -> Result<(), Error> {
        for (first, written) in self.written() {
            let Some(written) = written else { continue };
            if rows_overlap(x, &written) {
                return Err(Error::TensorsOverlap { first, second: "x" });
            }
            written.require_outside(first, read)?;
        }
        Ok(())
    }

    /// Checks that no two outputs overlap. Each was checked by itself.
    pub(super) fn require_disjoint(&self) -> Result<(), Error> {
        let all = self.written();
        for (index, (first, written)) in all.iter().enumerate() {
            let Some(written) = written else { continue };
            written.require_outside(first, &all[index + 1..])?;
        }
        Ok(())
    }

    fn written(&self) -> [Named; 11] {
        let tensors = self.tensors();
        tensors.named().map(|(name, tensor)| {
            let extent = tensor.map(|tensor| Extent {
                address: tensor.address(),
                bytes: tensor.bytes,
            });
            (name, extent)
        })
    }
}

impl Extent {
    /// Checks that `self`, of the tensor `first`, has no byte in common with any of `others`.
    pub(super) fn require_outside(
        &self,
        first: &'static str,
        others: &[Named],
    ) -> Result<(), Error> {
        let is_in = |(_, other): &&Named| other.as_ref().is_some_and(|other| self.overlaps(other));
        match others.iter().find(is_in) {
            Some(&(second, _)) => Err(Error::TensorsOverlap { first, second }),
            None => Ok(()),
        }
    }
}

/// Whether rows that may have a stride have a byte in common with `written`.
fn rows_overlap(x: &Tensor<2>, written: &Extent) -> bool {
    let bytes = |elements: usize| elements as u64 * u64::from(x.data_type.bits()) / 8;
    let (rows, row_bytes) = (x.dims[0] as u64, bytes(x.dims[1]));
    if rows == 0 || written.bytes == 0 {
        return false;
    }
    let Some(distance) = written.address.checked_sub(x.at.address()) else {
        return x.at.address() - written.address < written.bytes;
    };
    let stride = match rows {
        1 => row_bytes,
        _ => bytes(x.strides[0]),
    };
    if stride < row_bytes {
        // Rows that overlap leave no gaps.
        return u128::from(distance)
            < u128::from(stride) * u128::from(rows - 1) + u128::from(row_bytes);
    }
    let (row, within) = (distance / stride, distance % stride);
    row < rows && within < row_bytes || row + 1 < rows && stride - within < written.bytes
}
