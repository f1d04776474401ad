//! Checks that no tensor that a call writes overlaps another one of its round.

use super::{DispatchInput, DispatchOutput};
use crate::call::arguments::Argument;
use crate::call::dispatch::Sent;
use crate::error::Error;
use crate::plan::Plan;
use crate::tensor::Tensor;
use crate::tensor::view::View;

/// A tensor's name and extent, if it is present.
pub(super) type Named = (&'static str, Option<Extent>);

/// Names and extents of a table's arguments.
pub(super) fn named<const N: usize>(
    table: &[Argument; N],
    tensors: &[Option<View<'_>>; N],
) -> [Named; N] {
    std::array::from_fn(|at| (table[at].name, tensors[at].map(Extent::of)))
}

/// Bytes of a tensor in memory, gaps included.
#[derive(Clone, Copy)]
pub(super) struct Extent {
    address: u64,
    bytes: u64,
}

impl DispatchOutput {
    /// Checks that no output overlaps another one or an input: kernels still read these while they write.
    /// Each output was checked by itself.
    pub(crate) fn require_apart(&self, input: &DispatchInput) -> Result<(), Error> {
        let [_, others @ ..] = named(DispatchInput::ARGUMENTS, &input.views());
        let written = self.written();
        require_disjoint(&written)?;
        require_outside(&written, &input.x, &others)
    }

    /// [`require_apart`](Self::require_apart) for the wait of a split dispatch, which reads inputs only for a
    /// shared expert.
    pub(crate) fn require_apart_from_sent(&self, sent: &Sent, plan: &Plan) -> Result<(), Error> {
        let [_, _, _, scale, _, scales, kept] =
            named(DispatchInput::ARGUMENTS, &sent.input.views());
        let names = [scale.0, scales.0, kept.0];
        debug_assert_eq!(names, ["input_scale", "x_scales", "kept_ids"]);
        let written = self.written();
        require_disjoint(&written)?;
        if let (_, Some(kept)) = kept {
            kept.require_outside("kept_ids", &written)?;
        }
        if !plan.config().shared_expert {
            return Ok(());
        }
        require_outside(&written, &sent.input.x, &[scale, scales])
    }

    /// Checks that no two outputs overlap. Each was checked by itself.
    pub(super) fn require_disjoint(&self) -> Result<(), Error> {
        require_disjoint(&self.written())
    }

    fn written(&self) -> [Named; 14] {
        named(Self::ARGUMENTS, &self.views())
    }
}

impl DispatchInput {
    /// Checks that memory for ids, which the kernel writes, overlaps no input.
    pub(super) fn require_kept_ids_apart(
        &self,
        tensors: &[Option<View<'_>>; 7],
    ) -> Result<(), Error> {
        if tensors[tensors.len() - 1].is_none() {
            return Ok(());
        }
        let [_, others @ .., (second, kept)] = named(Self::ARGUMENTS, tensors);
        let Some(written) = kept else { return Ok(()) };
        if rows_overlap(&self.x, &written) {
            return Err(Error::TensorsOverlap { first: "x", second });
        }
        written.require_outside(second, &others)
    }
}

impl Extent {
    pub(super) fn of(tensor: View<'_>) -> Self {
        Self {
            address: tensor.at.address(),
            bytes: tensor.span(),
        }
    }

    /// Whether the two have a byte in common.
    const fn overlaps(&self, other: &Self) -> bool {
        // Distances, as ends could wrap.
        self.bytes > 0
            && other.bytes > 0
            && if self.address <= other.address {
                other.address - self.address < self.bytes
            } else {
                self.address - other.address < other.bytes
            }
    }

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

/// Checks that no two tensors overlap.
fn require_disjoint(all: &[Named]) -> Result<(), Error> {
    for (index, (first, written)) in all.iter().enumerate() {
        let Some(written) = written else { continue };
        written.require_outside(first, &all[index + 1..])?;
    }
    Ok(())
}

/// Checks that nothing that is written overlaps `x` or what else is read.
fn require_outside(written: &[Named], x: &Tensor<2>, read: &[Named]) -> Result<(), Error> {
    for (first, written) in written {
        let Some(written) = written else { continue };
        if rows_overlap(x, written) {
            return Err(Error::TensorsOverlap { first, second: "x" });
        }
        written.require_outside(first, read)?;
    }
    Ok(())
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
