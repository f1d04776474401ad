//! Tensors of the user: an address, a data type, sizes and strides.

pub(crate) mod any;
pub(crate) mod data_type;
pub(crate) mod handles;
pub(crate) mod view;

use crate::error::TensorError;
use crate::tensor::data_type::DataType;
use crate::tensor::handles::DevicePtr;
use crate::tensor::view::{Element, View, bytes_of, dense_strides, refused};

/// A view of device memory of the rank that it is passed to. Ferry does not own it; the caller keeps
/// it alive until the kernels that use it are done ([`DevicePtr::new`]).
///
/// All tensors are without gaps ([`is_contiguous`](Self::is_contiguous)), except a dispatch's `x`
/// ([`with_row_stride`](Tensor::with_row_stride)) and [`x_scales`](crate::DispatchInput::x_scales). Anything
/// else is refused, and so are elements of another type than the argument's ([`DataType`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tensor<const N: usize> {
    /// The first element.
    pub at: DevicePtr,
    /// Type of the elements.
    pub data_type: DataType,
    /// Sizes, slowest first, in elements.
    pub dims: [usize; N],
    /// Distances between neighbours in each dimension, in elements.
    pub strides: [usize; N],
}

impl<const N: usize> Tensor<N> {
    /// A tensor without gaps.
    pub const fn contiguous(at: DevicePtr, data_type: DataType, dims: [usize; N]) -> Self {
        Self {
            at,
            data_type,
            dims,
            strides: dense_strides(&dims),
        }
    }

    /// Number of elements; [`usize::MAX`] if it does not fit.
    pub fn elements(&self) -> usize {
        self.view().elements()
    }

    /// Whether the elements have no gaps. The stride of a dimension of size 1 does not
    /// matter, nor does any stride of an empty tensor.
    pub fn is_contiguous(&self) -> bool {
        self.view().is_contiguous()
    }

    /// Bytes of all elements, without gaps; [`u64::MAX`] if they do not fit.
    pub fn bytes(&self) -> u64 {
        bytes_of(&self.dims, self.data_type).unwrap_or(u64::MAX)
    }

    /// The tensor as its checks see it.
    #[inline]
    pub(crate) const fn view(&self) -> View<'_> {
        View {
            at: self.at,
            data_type: self.data_type,
            dims: &self.dims,
            strides: &self.strides,
        }
    }

    /// [`View::require`].
    pub(crate) fn require(
        &self,
        tensor: &'static str,
        dims: [usize; N],
        element: Element,
    ) -> Result<(), TensorError> {
        self.view().require(tensor, &dims, element)
    }
}

impl Tensor<2> {
    /// Sets the distance between rows to `stride` elements, as in a view of columns; the elements of a row
    /// have no gaps. [`DispatchInput::x`](crate::DispatchInput::x) may be such a tensor, with a stride that
    /// is a multiple of 16 bytes (8 elements of BF16) below 2^31 elements, and so may its
    /// [`x_scales`](crate::DispatchInput::x_scales); all others are refused unless there is only one
    /// row. A stride of 0 repeats one row.
    pub const fn with_row_stride(self, stride: usize) -> Self {
        Self {
            strides: [stride, self.strides[1]],
            ..self
        }
    }

    /// [`require`](Self::require) for rows that may have a stride, of 16 bytes or a multiple.
    pub(crate) fn require_rows(
        &self,
        tensor: &'static str,
        dims: [usize; 2],
        element: Element,
    ) -> Result<(), TensorError> {
        self.view().require_elements(tensor, &dims, element)?;
        let [rows, columns] = dims;
        let [stride, between] = self.strides;
        if rows == 0 || self.is_contiguous() {
            let bytes = bytes_of(&dims, self.data_type);
            return self.view().require_memory(tensor, bytes);
        }
        let given = format!("strides {:?} (shape {dims:?})", self.strides);
        if columns > 1 && between != 1 {
            let wanted = "columns without gaps: make it contiguous".to_owned();
            return refused(tensor, wanted, given);
        }
        let (bits, multiple) = (element.data_type.bits(), 128 / element.data_type.bits());
        if !stride.is_multiple_of(multiple as usize) || stride >= 1 << 31 {
            let wanted = format!(
                "rows a multiple of {multiple} elements apart, fewer than 2^31: make it contiguous"
            );
            return refused(tensor, wanted, given);
        }
        let elements = (stride as u64)
            .checked_mul(rows as u64 - 1)
            .and_then(|before| before.checked_add(columns as u64));
        let bits = elements.and_then(|all| all.checked_mul(bits.into()));
        self.view()
            .require_memory(tensor, bits.map(|bits| bits / 8))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn memory(address: u64) -> DevicePtr {
        // SAFETY: `DevicePtr::new` is about accesses of a device, and none is made here.
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
        let tensor = Tensor::contiguous(memory(32), DataType::Bf16, [3, 8]);
        assert_eq!(tensor.strides, [8, 1]);
        assert_eq!(tensor.require("x", [3, 8], Element::BF16_ROW), Ok(()));
        assert_eq!(
            Tensor::contiguous(memory(32), DataType::Bf16, [2, 3, 8]).strides,
            [24, 8, 1]
        );
    }

    #[test]
    fn each_misfit_is_named() {
        let tensor = Tensor::contiguous(memory(32), DataType::Bf16, [3, 8]);
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
            "tensor x: wanted strides [8, 1], in elements: make it contiguous, given [16, 1] (shape [3, 8])"
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
    fn elements_of_another_type_are_refused() {
        let of = |data_type| Tensor::contiguous(memory(32), data_type, [3, 8]);
        assert_eq!(
            refused(of(DataType::I32), [3, 8]),
            "tensor x: wanted elements of bf16, given i32"
        );
        refused(of(DataType::F16), [3, 8]);
        // Plain bits.
        assert_eq!(
            of(DataType::U16).require("x", [3, 8], Element::BF16_ROW),
            Ok(())
        );
        let words = Tensor::contiguous(memory(32), DataType::U32, [2]);
        assert_eq!(
            words.require("topk_ids", [2], Element::word(DataType::I32)),
            Ok(())
        );
        assert!(words.require("topk_weights", [2], Element::F32).is_err());
    }

    #[test]
    fn a_tensor_longer_than_its_memory_is_refused() {
        let at = memory(32);
        assert_eq!(
            refused(Tensor::contiguous(at, DataType::Bf16, [4, 8]), [4, 8]),
            "tensor x: wanted 64 bytes at its address (shape [4, 8]), given 48"
        );
        assert!(
            Tensor::contiguous(at.plus(16), DataType::Bf16, [2, 8])
                .require("x", [2, 8], Element::BF16_ROW)
                .is_ok()
        );
        refused(
            Tensor::contiguous(at.plus(32), DataType::Bf16, [2, 8]),
            [2, 8],
        );
        let half = [3, 32];
        assert_eq!(
            Tensor::contiguous(at, DataType::E2m1, half).require(
                "x",
                half,
                Element::row(DataType::E2m1)
            ),
            Ok(())
        );
        let huge = [usize::MAX, usize::MAX];
        assert!(
            refused(Tensor::contiguous(at, DataType::Bf16, huge), huge).contains("too many bytes")
        );
    }

    #[test]
    fn rows_may_have_a_stride_where_an_argument_says_so() {
        let tensor = |dims| Tensor::contiguous(memory(32), DataType::Bf16, dims);
        let told = |tensor: Tensor<2>| {
            let refused = tensor.require_rows("x", tensor.dims, Element::BF16_ROW);
            refused.map_err(|error| error.to_string())
        };
        let view = tensor([2, 8]).with_row_stride(16);
        assert_eq!(told(view), Ok(()));
        let refused = view.require("residual", [2, 8], Element::BF16_ROW);
        assert_eq!(
            refused.unwrap_err().to_string(),
            "tensor residual: wanted strides [8, 1], in elements: make it contiguous, given [16, 1] (shape \
             [2, 8])"
        );
        // The same row again.
        assert_eq!(told(tensor([99, 8]).with_row_stride(0)), Ok(()));
        let of_strides = |strides| {
            told(Tensor {
                strides,
                ..tensor([2, 8])
            })
        };
        for (strides, wanted) in [
            (
                [12, 1],
                "rows a multiple of 8 elements apart, fewer than 2^31: make it contiguous",
            ),
            (
                [1 << 31, 1],
                "rows a multiple of 8 elements apart, fewer than 2^31",
            ),
            (
                [1, 2],
                "columns without gaps: make it contiguous, given strides [1, 2]",
            ),
            ([24, 1], "64 bytes at its address (shape [2, 8]), given 48"),
        ] {
            let text = of_strides(strides).unwrap_err();
            assert!(text.contains(wanted), "{text}");
        }
        assert!(told(tensor([1, 8]).with_row_stride(usize::MAX)).is_ok());
        let nothing = Tensor::contiguous(DevicePtr::NULL, DataType::Bf16, [0, 8]);
        assert_eq!(told(nothing.with_row_stride(3)), Ok(()));
    }

    #[test]
    fn strides_matter_only_where_there_is_a_next_element() {
        let one_row = Tensor {
            at: memory(32),
            data_type: DataType::Bf16,
            dims: [1, 8],
            strides: [100, 1],
        };
        assert_eq!(one_row.require("x", [1, 8], Element::BF16_ROW), Ok(()));
        let empty = Tensor {
            at: DevicePtr::NULL,
            data_type: DataType::Bf16,
            dims: [0, 8],
            strides: [3, 3],
        };
        assert_eq!(empty.require("x", [0, 8], Element::BF16_ROW), Ok(()));
        let columns = Tensor {
            at: memory(32),
            data_type: DataType::Bf16,
            dims: [1, 8],
            strides: [1, 2],
        };
        assert!(columns.require("x", [1, 8], Element::BF16_ROW).is_err());
    }
}
