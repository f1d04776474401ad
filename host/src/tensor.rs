//! Tensors as they come in from outside: an address, sizes and strides.

use crate::{DevicePtr, TensorError};

/// A view of device memory of the rank it is given to. Ferry does not own it; the caller keeps
/// it alive until the kernels that use it are done ([`DevicePtr::new`]).
///
/// The element type is not part of it: each argument says which it takes, and is refused where its
/// elements need more bytes than there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tensor<const N: usize> {
    /// The first element.
    pub at: DevicePtr,
    /// Sizes, slowest first, in elements.
    pub dims: [usize; N],
    /// From one to the next in each dimension, in elements.
    pub strides: [usize; N],
}

impl<const N: usize> Tensor<N> {
    /// A tensor without gaps.
    pub const fn contiguous(at: DevicePtr, dims: [usize; N]) -> Self {
        Self {
            at,
            dims,
            strides: dense_strides(dims),
        }
    }

    /// Elements; [`usize::MAX`] where that is not enough.
    pub fn elements(&self) -> usize {
        if self.dims.contains(&0) {
            return 0;
        }
        self.dims
            .iter()
            .fold(1, |all, &dim| all.saturating_mul(dim))
    }

    /// Whether the elements stand without gaps. The stride of a dimension of size 1 does not
    /// matter, and none of an empty tensor.
    pub fn is_contiguous(&self) -> bool {
        let dense = dense_strides(self.dims);
        self.elements() == 0 || (0..N).all(|i| self.dims[i] == 1 || self.strides[i] == dense[i])
    }

    /// Checks an argument named `tensor`: its sizes, no gaps, an address unless it is empty,
    /// the address's alignment, and that there is memory for all elements.
    pub(crate) fn require(
        &self,
        tensor: &'static str,
        dims: [usize; N],
        Element { bits, align_bytes }: Element,
    ) -> Result<(), TensorError> {
        let wrong = |wanted: String, given: String| {
            Err(TensorError {
                tensor,
                wanted,
                given,
            })
        };
        if self.dims != dims {
            return wrong(format!("shape {dims:?}"), format!("{:?}", self.dims));
        }
        if !self.is_contiguous() {
            let dense = dense_strides(self.dims);
            let given = format!("{:?} (shape {dims:?})", self.strides);
            return wrong(format!("strides {dense:?}, in elements"), given);
        }
        if self.elements() != 0 && self.at.address() == 0 {
            return wrong(format!("an address (shape {dims:?})"), "null".to_owned());
        }
        if !self.at.address().is_multiple_of(align_bytes) {
            let given = format!("{:#x}", self.at.address());
            return wrong(
                format!("an address that is a multiple of {align_bytes}"),
                given,
            );
        }
        let bytes = bytes_of(dims, bits);
        if bytes.is_none_or(|bytes| bytes > self.at.bytes()) {
            let wanted = bytes.map_or("too many".to_owned(), |bytes| bytes.to_string());
            let given = self.at.bytes().to_string();
            return wrong(
                format!("{wanted} bytes at its address (shape {dims:?})"),
                given,
            );
        }
        Ok(())
    }
}

/// How an argument's elements lie in memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Element {
    /// Bits of each.
    pub(crate) bits: u32,
    /// What the address is a multiple of.
    pub(crate) align_bytes: u64,
}

impl Element {
    /// BF16 in rows: kernels move 16 bytes at a time.
    pub(crate) const BF16_ROW: Self = Self::row(16);
    /// Words of 32 bits.
    pub(crate) const WORD: Self = Self {
        bits: 32,
        align_bytes: 4,
    };
    /// BF16 that is written one by one.
    pub(crate) const HALF: Self = Self {
        bits: 16,
        align_bytes: 2,
    };
    /// Bytes that are written as words.
    pub(crate) const BYTE_OF_WORD: Self = Self {
        bits: 8,
        align_bytes: 4,
    };

    /// Elements of rows.
    pub(crate) const fn row(bits: u32) -> Self {
        Self {
            bits,
            align_bytes: 16,
        }
    }
}

/// Bytes of a tensor without gaps; `None` if they cannot be counted.
pub(crate) fn bytes_of<const N: usize>(dims: [usize; N], bits: u32) -> Option<u64> {
    if dims.contains(&0) {
        return Some(0);
    }
    let bits = dims
        .iter()
        .try_fold(u128::from(bits), |bits, &dim| bits.checked_mul(dim as u128))?;
    u64::try_from(bits.div_ceil(8)).ok()
}

const fn dense_strides<const N: usize>(dims: [usize; N]) -> [usize; N] {
    let mut strides = [1_usize; N];
    let mut i = N;
    while i > 1 {
        i -= 1;
        strides[i - 1] = strides[i].wrapping_mul(dims[i]);
    }
    strides
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn memory(address: u64) -> DevicePtr {
        // SAFETY: nothing is done with it but looking at its numbers.
        unsafe { DevicePtr::new(address, 48) }
    }

    fn refused<const N: usize>(tensor: Tensor<N>, dims: [usize; N]) -> String {
        tensor
            .require("x", dims, Element::BF16_ROW)
            .unwrap_err()
            .to_string()
    }

    #[test]
    fn a_dense_tensor_passes() {
        let tensor = Tensor::contiguous(memory(32), [3, 8]);
        assert_eq!(tensor.strides, [8, 1]);
        assert_eq!(tensor.require("x", [3, 8], Element::BF16_ROW), Ok(()));
        assert_eq!(
            Tensor::contiguous(memory(32), [2, 3, 8]).strides,
            [24, 8, 1]
        );
    }

    #[test]
    fn each_misfit_is_named() {
        let tensor = Tensor::contiguous(memory(32), [3, 8]);
        assert_eq!(
            refused(tensor, [3, 16]),
            "tensor x: wanted shape [3, 16], given [3, 8]"
        );
        assert_eq!(
            refused(
                Tensor {
                    strides: [16, 1],
                    ..tensor
                },
                [3, 8]
            ),
            "tensor x: wanted strides [8, 1], in elements, given [16, 1] (shape [3, 8])"
        );
        assert_eq!(
            refused(
                Tensor {
                    at: DevicePtr::NULL,
                    ..tensor
                },
                [3, 8]
            ),
            "tensor x: wanted an address (shape [3, 8]), given null"
        );
        assert_eq!(
            refused(
                Tensor {
                    at: memory(0x28),
                    ..tensor
                },
                [3, 8]
            ),
            "tensor x: wanted an address that is a multiple of 16, given 0x28"
        );
    }

    #[test]
    fn a_tensor_longer_than_its_memory_is_refused() {
        let at = memory(32);
        assert_eq!(
            refused(Tensor::contiguous(at, [4, 8]), [4, 8]),
            "tensor x: wanted 64 bytes at its address (shape [4, 8]), given 48"
        );
        assert!(
            Tensor::contiguous(at.plus(16), [2, 8])
                .require("x", [2, 8], Element::BF16_ROW)
                .is_ok()
        );
        refused(Tensor::contiguous(at.plus(32), [2, 8]), [2, 8]);
        let half = [3, 32];
        assert_eq!(
            Tensor::contiguous(at, half).require("x", half, Element::row(4)),
            Ok(())
        );
        let huge = [usize::MAX, usize::MAX];
        assert!(refused(Tensor::contiguous(at, huge), huge).contains("too many bytes"));
    }

    #[test]
    fn strides_matter_only_where_there_is_a_next_element() {
        let one_row = Tensor {
            at: memory(32),
            dims: [1, 8],
            strides: [100, 1],
        };
        assert_eq!(one_row.require("x", [1, 8], Element::BF16_ROW), Ok(()));
        let empty = Tensor {
            at: DevicePtr::NULL,
            dims: [0, 8],
            strides: [3, 3],
        };
        assert_eq!(empty.require("x", [0, 8], Element::BF16_ROW), Ok(()));
        let columns = Tensor {
            at: memory(32),
            dims: [1, 8],
            strides: [1, 2],
        };
        assert!(columns.require("x", [1, 8], Element::BF16_ROW).is_err());
    }
}
