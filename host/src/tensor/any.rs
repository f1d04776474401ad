//! Tensors of any number of dimensions, in which every language hands over its tensors.

use crate::error::TensorError;
use crate::tensor::Tensor;
use crate::tensor::data_type::DataType;
use crate::tensor::handles::DevicePtr;
use crate::tensor::view::{MOST_DIMS, View, dense_strides};

/// A [`Tensor`] of any number of dimensions, at most 5, of which arguments of calls are made:
/// [`DispatchInput::of`](crate::DispatchInput::of) and its like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnyTensor {
    at: DevicePtr,
    data_type: DataType,
    dims: [usize; MOST_DIMS],
    strides: [usize; MOST_DIMS],
    ndim: usize,
}

impl AnyTensor {
    /// A tensor of these sizes and strides, slowest first, in elements; without `strides` it has no gaps.
    /// `None` if their numbers differ, or are above 5.
    pub fn new(
        at: DevicePtr,
        data_type: DataType,
        dims: &[usize],
        strides: Option<&[usize]>,
    ) -> Option<Self> {
        if dims.len() > MOST_DIMS {
            return None;
        }
        let dense = dense_strides::<MOST_DIMS>(dims);
        let strides = strides.unwrap_or(&dense[..dims.len()]);
        if dims.len() != strides.len() {
            return None;
        }
        Some(
            View {
                at,
                data_type,
                dims,
                strides,
            }
            .into(),
        )
    }

    /// The first element.
    pub const fn at(&self) -> DevicePtr {
        self.at
    }

    /// Type of the elements.
    pub const fn data_type(&self) -> DataType {
        self.data_type
    }

    /// Sizes, slowest first, in elements.
    pub fn dims(&self) -> &[usize] {
        &self.dims[..self.ndim]
    }

    /// Distances between neighbours in each dimension, in elements.
    pub fn strides(&self) -> &[usize] {
        &self.strides[..self.ndim]
    }

    /// The tensor of `N` dimensions, for the argument `name`.
    ///
    /// # Errors
    /// [`TensorError`] if it has another number of dimensions.
    pub fn of<const N: usize>(&self, name: &'static str) -> Result<Tensor<N>, TensorError> {
        let (Ok(dims), Ok(strides)) = (self.dims().try_into(), self.strides().try_into()) else {
            return Err(TensorError {
                tensor: name,
                wanted: format!("{N} dimensions"),
                given: format!("shape {:?}", self.dims()),
            });
        };
        Ok(Tensor {
            at: self.at,
            data_type: self.data_type,
            dims,
            strides,
        })
    }

    /// The argument `name`, which must be there.
    ///
    /// # Errors
    /// Those of [`of`](Self::of), and [`TensorError`] if it is missing.
    pub fn required<const N: usize>(
        name: &'static str,
        given: Option<Self>,
    ) -> Result<Tensor<N>, TensorError> {
        Self::optional(name, given)?.ok_or_else(|| TensorError {
            tensor: name,
            wanted: format!("{N} dimensions"),
            given: "none".to_owned(),
        })
    }

    /// The argument `name`, which may be missing.
    ///
    /// # Errors
    /// Those of [`of`](Self::of).
    pub fn optional<const N: usize>(
        name: &'static str,
        given: Option<Self>,
    ) -> Result<Option<Tensor<N>>, TensorError> {
        given.map(|tensor| tensor.of(name)).transpose()
    }
}

impl From<View<'_>> for AnyTensor {
    fn from(view: View<'_>) -> Self {
        let mut any = Self {
            at: view.at,
            data_type: view.data_type,
            dims: [0; MOST_DIMS],
            strides: [0; MOST_DIMS],
            ndim: view.dims.len(),
        };
        any.dims[..view.dims.len()].copy_from_slice(view.dims);
        any.strides[..view.dims.len()].copy_from_slice(view.strides);
        any
    }
}

impl<const N: usize> From<Tensor<N>> for AnyTensor {
    fn from(tensor: Tensor<N>) -> Self {
        const { assert!(N <= MOST_DIMS) }
        tensor.view().into()
    }
}

/// A tensor that may be missing, as its checks see it.
#[inline]
pub(crate) fn view<const N: usize>(tensor: Option<&Tensor<N>>) -> Option<View<'_>> {
    tensor.map(Tensor::view)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_strides_that_do_not_fit_together_are_no_tensor() {
        let of = |dims, strides| AnyTensor::new(DevicePtr::NULL, DataType::F32, dims, strides);
        assert_eq!(of(&[2, 3, 4], None).unwrap().strides(), [12, 4, 1]);
        assert_eq!(of(&[2, 3], Some(&[1, 2])).unwrap().strides(), [1, 2]);
        assert_eq!(of(&[2, 3], Some(&[1])), None);
        assert_eq!(of(&[1; 6], None), None);
    }

    #[test]
    fn a_tensor_of_other_dimensions_is_named() {
        let of = AnyTensor::new(DevicePtr::NULL, DataType::F32, &[2, 3], None).unwrap();
        assert_eq!(of.of::<2>("x").unwrap().dims, [2, 3]);
        assert_eq!(
            of.of::<1>("x").unwrap_err().to_string(),
            "tensor x: wanted 1 dimensions, given shape [2, 3]"
        );
        assert_eq!(
            AnyTensor::required::<2>("x", None).unwrap_err().to_string(),
            "tensor x: wanted 2 dimensions, given none"
        );
    }

    #[test]
    fn gaps_count_in_the_span() {
        let span = |dims: [usize; 2], strides: [usize; 2]| {
            let tensor = AnyTensor::new(DevicePtr::NULL, DataType::F32, &dims, Some(&strides));
            let tensor = tensor.unwrap();
            let view = View {
                at: tensor.at(),
                data_type: tensor.data_type(),
                dims: tensor.dims(),
                strides: tensor.strides(),
            };
            view.span()
        };
        assert_eq!(span([2, 3], [3, 1]), 24);
        assert_eq!(span([2, 3], [8, 1]), 44);
        assert_eq!(span([2, 0], [8, 1]), 0);
        assert_eq!(span([2, 3], [usize::MAX, 1]), u64::MAX);
    }
}
