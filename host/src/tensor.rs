//! Tensors as they come in from outside: an address, sizes and strides.

use std::fmt;

use crate::DevicePtr;

/// A view of device memory of the rank it is given to. Ferry does not own it; the caller keeps
/// it alive until the kernels that use it are done.
///
/// The element type is not part of it: each argument says which it takes.
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

    /// Elements.
    pub fn elements(&self) -> usize {
        self.dims.iter().product()
    }

    /// Whether the elements stand without gaps. The stride of a dimension of size 1 does not
    /// matter, and none of an empty tensor.
    pub fn is_contiguous(&self) -> bool {
        let dense = dense_strides(self.dims);
        self.elements() == 0 || (0..N).all(|i| self.dims[i] == 1 || self.strides[i] == dense[i])
    }

    /// Checks an argument named `tensor`: its sizes, no gaps, an address unless it is empty,
    /// and the address's alignment.
    pub(crate) fn require(
        &self,
        tensor: &'static str,
        dims: [usize; N],
        align_bytes: u64,
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
        if self.elements() != 0 && self.at == DevicePtr::NULL {
            return wrong(format!("an address (shape {dims:?})"), "null".to_owned());
        }
        if !self.at.0.is_multiple_of(align_bytes) {
            let given = format!("{:#x}", self.at.0);
            return wrong(
                format!("an address that is a multiple of {align_bytes}"),
                given,
            );
        }
        Ok(())
    }
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

/// A tensor that does not fit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorError {
    /// The argument's name.
    pub tensor: &'static str,
    /// What was wanted.
    pub wanted: String,
    /// What came instead.
    pub given: String,
}

impl fmt::Display for TensorError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            tensor,
            wanted,
            given,
        } = self;
        write!(f, "tensor {tensor}: wanted {wanted}, given {given}")
    }
}

impl std::error::Error for TensorError {}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused<const N: usize>(tensor: Tensor<N>, dims: [usize; N]) -> String {
        tensor.require("x", dims, 16).unwrap_err().to_string()
    }

    #[test]
    fn a_dense_tensor_passes() {
        let tensor = Tensor::contiguous(DevicePtr(32), [3, 8]);
        assert_eq!(tensor.strides, [8, 1]);
        assert_eq!(tensor.require("x", [3, 8], 16), Ok(()));
        assert_eq!(
            Tensor::contiguous(DevicePtr(32), [2, 3, 8]).strides,
            [24, 8, 1]
        );
    }

    #[test]
    fn each_misfit_is_named() {
        let tensor = Tensor::contiguous(DevicePtr(32), [3, 8]);
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
                    at: DevicePtr(0x28),
                    ..tensor
                },
                [3, 8]
            ),
            "tensor x: wanted an address that is a multiple of 16, given 0x28"
        );
    }

    #[test]
    fn strides_matter_only_where_there_is_a_next_element() {
        let one_row = Tensor {
            at: DevicePtr(32),
            dims: [1, 8],
            strides: [100, 1],
        };
        assert_eq!(one_row.require("x", [1, 8], 16), Ok(()));
        let empty = Tensor {
            at: DevicePtr::NULL,
            dims: [0, 8],
            strides: [3, 3],
        };
        assert_eq!(empty.require("x", [0, 8], 16), Ok(()));
        let columns = Tensor {
            at: DevicePtr(32),
            dims: [1, 8],
            strides: [1, 2],
        };
        assert!(columns.require("x", [1, 8], 16).is_err());
    }
}
