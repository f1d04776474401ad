//! Checks that no tensor that a dispatch writes overlaps another one of its round.

use ferry_layout::CombineMode;

use super::combine::{Extent, extent, require_field};
use super::{DispatchInput, DispatchOutput};
use crate::call::dispatch::Sent;
use crate::error::Error;
use crate::plan::Plan;
use crate::plan::config::Config;
use crate::tensor::data_type::DataType;
use crate::tensor::{Element, Tensor};

/// A tensor's name and extent, if it is present.
pub(super) type Named = (&'static str, Option<Extent>);

impl DispatchOutput {
    /// Checks that no output overlaps an input: kernels still read these while they write. Each output was
    /// checked by itself.
    pub(crate) fn require_apart(&self, input: &DispatchInput) -> Result<(), Error> {
        let kept = ("kept_ids", extent(input.kept_ids.as_ref()));
        let [ids, weights, scale, count, scales] = input.read();
        self.require_outside(&input.x, &[ids, weights, scale, count, scales, kept])
    }

    /// [`require_apart`](Self::require_apart) for the wait of a split dispatch, which reads inputs only for a
    /// shared expert.
    pub(crate) fn require_apart_from_sent(&self, sent: &Sent, plan: &Plan) -> Result<(), Error> {
        if let Some(kept) = &sent.input.kept_ids {
            Extent::of(kept).require_outside("kept_ids", &self.written())?;
        }
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

    fn written(&self) -> [Named; 14] {
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

impl DispatchInput {
    /// Checks the memory for ids, which the kernel writes while it reads the other inputs.
    pub(super) fn require_kept_ids(&self, plan: &Plan) -> Result<(), Error> {
        let Some(kept) = &self.kept_ids else {
            return Ok(());
        };
        let Config {
            skip_a2a, combine, ..
        } = *plan.config();
        require_field("kept_ids", true, !skip_a2a, "skip_a2a", skip_a2a)?;
        // Between nodes a round ends once combine has every row of its ids, and later puts rely on that: ids
        // that a caller changes would end it sooner.
        let (nodes, is_alone) = ("p2p_world_size", !plan.shape().spans_nodes());
        require_field(
            "kept_ids",
            true,
            is_alone,
            nodes,
            plan.shape().p2p_world_size,
        )?;
        // In exact mode combine names the ranks of ids that nobody has looked at, once a wait times out.
        let is_reduced = combine == CombineMode::Reduced;
        require_field("kept_ids", true, is_reduced, "combine", combine)?;
        kept.require(
            "kept_ids",
            self.topk_ids.dims,
            Element::natural(DataType::I32),
        )?;
        let (second, written) = ("kept_ids", Extent::of(kept));
        if rows_overlap(&self.x, &written) {
            return Err(Error::TensorsOverlap { first: "x", second });
        }
        written.require_outside(second, &self.read())
    }

    /// Tensors that dispatch reads, but `x`.
    fn read(&self) -> [Named; 5] {
        [
            ("topk_ids", extent(Some(&self.topk_ids))),
            ("topk_weights", extent(self.topk_weights.as_ref())),
            ("input_scale", extent(self.input_scale.as_ref())),
            ("tokens_on_device", extent(self.tokens_on_device.as_ref())),
            ("x_scales", self.extent_of_scales()),
        ]
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
