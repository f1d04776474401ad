//! Tensors: device memory with a shape.

use ferry::{DataType, DevicePtr, Tensor, TensorLayout};

use crate::status::Failure;
use crate::status::ferry_status::FERRY_INVALID_TENSOR;

/// Most dimensions of a tensor.
pub const FERRY_MAX_DIMS: usize = 5;

/// What a tensor is made of. Sizes and strides count elements.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ferry_type {
    /// BF16.
    FERRY_BF16 = 1,
    /// IEEE half precision.
    FERRY_F16 = 2,
    /// IEEE single precision.
    FERRY_F32 = 3,
    /// FP8 e4m3, with a NaN and no infinity.
    FERRY_E4M3 = 4,
    /// A power of two, a byte each: scales of the MX formats.
    FERRY_E8M0 = 5,
    /// FP4 e2m1, two a byte, the even one in the low half.
    FERRY_E2M1 = 6,
    /// Signed, 32 bits.
    FERRY_I32 = 7,
    /// Unsigned, 32 bits.
    FERRY_U32 = 8,
    /// 16 bits as they are: stands for FERRY_BF16, too. A combine into it gives BF16.
    FERRY_U16 = 9,
    /// 8 bits as they are: stands for FERRY_E4M3 and FERRY_E8M0, too.
    FERRY_U8 = 10,
}

use ferry_type::{
    FERRY_BF16, FERRY_E2M1, FERRY_E4M3, FERRY_E8M0, FERRY_F16, FERRY_F32, FERRY_I32, FERRY_U8,
    FERRY_U16, FERRY_U32,
};

/// Device memory with a shape. All zeros: no tensor. ferry_tensor_2d and its like make one that has no gaps.
/// This struct has no size and never changes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ferry_tensor {
    /// Of the first element (a CUdeviceptr, or in the simulator what ferry_device_alloc gave). NULL
    /// only where the tensor has no elements.
    pub address: u64,
    /// Bytes that may be used from the address on.
    pub bytes: u64,
    /// Sizes, slowest first, in elements; `ndim` of them.
    pub dims: [u64; FERRY_MAX_DIMS],
    /// From one element to the next in each dimension, in elements. All 0: no gaps.
    pub strides: [u64; FERRY_MAX_DIMS],
    /// Dimensions. 0: no tensor.
    pub ndim: u32,
    /// A ferry_type.
    pub r#type: u32,
}

impl ferry_type {
    const ALL: [Self; 10] = [
        FERRY_BF16, FERRY_F16, FERRY_F32, FERRY_E4M3, FERRY_E8M0, FERRY_E2M1, FERRY_I32, FERRY_U32,
        FERRY_U16, FERRY_U8,
    ];

    /// The one of a number.
    pub(crate) fn of(name: &str, number: u32) -> Result<Self, Failure> {
        let known = Self::ALL.into_iter().find(|&known| known as u32 == number);
        known.ok_or_else(|| Failure::value(name, number, "no ferry_type"))
    }

    /// As Rust knows it.
    pub(crate) const fn data_type(self) -> DataType {
        match self {
            FERRY_BF16 => DataType::Bf16,
            FERRY_F16 => DataType::F16,
            FERRY_F32 => DataType::F32,
            FERRY_E4M3 => DataType::E4m3,
            FERRY_E8M0 => DataType::E8m0,
            FERRY_E2M1 => DataType::E2m1,
            FERRY_I32 => DataType::I32,
            FERRY_U32 => DataType::U32,
            FERRY_U16 => DataType::U16,
            FERRY_U8 => DataType::U8,
        }
    }

    /// The number of a type of Rust's; 0 for one that C does not know.
    fn number(data_type: DataType) -> u32 {
        let known = Self::ALL
            .into_iter()
            .find(|known| known.data_type() == data_type);
        known.map_or(0, |known| known as u32)
    }
}

/// A tensor of one dimension without gaps, whose bytes are those of its elements. Checked where it
/// is used. Any thread; never fails.
#[unsafe(no_mangle)]
pub extern "C" fn ferry_tensor_1d(address: u64, r#type: u32, dim_0: u64) -> ferry_tensor {
    ferry_tensor::given(address, r#type, [dim_0])
}

/// A tensor of two dimensions, the slower one first, as ferry_tensor_1d.
#[unsafe(no_mangle)]
pub extern "C" fn ferry_tensor_2d(
    address: u64,
    r#type: u32,
    dim_0: u64,
    dim_1: u64,
) -> ferry_tensor {
    ferry_tensor::given(address, r#type, [dim_0, dim_1])
}

/// A tensor of three dimensions, the slowest one first, as ferry_tensor_1d.
#[unsafe(no_mangle)]
pub extern "C" fn ferry_tensor_3d(
    address: u64,
    r#type: u32,
    dim_0: u64,
    dim_1: u64,
    dim_2: u64,
) -> ferry_tensor {
    ferry_tensor::given(address, r#type, [dim_0, dim_1, dim_2])
}

impl ferry_tensor {
    /// None.
    pub(crate) const NONE: Self = Self {
        address: 0,
        bytes: 0,
        dims: [0; FERRY_MAX_DIMS],
        strides: [0; FERRY_MAX_DIMS],
        ndim: 0,
        r#type: 0,
    };

    /// A tensor without gaps. One of an unknown type has no bytes.
    fn given<const N: usize>(address: u64, r#type: u32, dims: [u64; N]) -> Self {
        let bits =
            ferry_type::of("", r#type).map_or(0, |known| u64::from(known.data_type().bits()));
        let elements = match dims.contains(&0) {
            true => 0,
            false => dims
                .iter()
                .fold(1, |all: u64, &dim| all.saturating_mul(dim)),
        };
        let mut tensor = Self {
            address,
            bytes: elements.saturating_mul(bits).div_ceil(8),
            ndim: N as u32,
            r#type,
            ..Self::NONE
        };
        tensor.dims[..N].copy_from_slice(&dims);
        tensor
    }

    /// A tensor that is not allocated yet. None has more than 5 dimensions.
    pub(crate) fn planned(layout: &TensorLayout) -> Self {
        let mut tensor = Self {
            bytes: layout.bytes,
            ndim: layout.dims.len() as u32,
            r#type: ferry_type::number(layout.data_type),
            ..Self::NONE
        };
        for (place, &dim) in tensor.dims.iter_mut().zip(&layout.dims) {
            *place = dim as u64;
        }
        tensor
    }

    /// As Rust's callers give it, with its type. `None` if there is none.
    ///
    /// # Safety
    /// The rule of memory.
    pub(crate) unsafe fn get<const N: usize>(
        &self,
        name: &str,
    ) -> Result<Option<Tensor<N>>, Failure> {
        if self.ndim == 0 {
            if self.address != 0 || self.dims != [0; FERRY_MAX_DIMS] {
                let text =
                    format!("tensor {name}: ndim is 0 (no tensor), but it has an address or sizes");
                return Err(Failure::new(FERRY_INVALID_TENSOR, text));
            }
            return Ok(None);
        }
        if self.ndim != N as u32 {
            let text = format!("tensor {name}: wanted {N} dimensions, given {}", self.ndim);
            return Err(Failure::new(FERRY_INVALID_TENSOR, text));
        }
        let element = ferry_type::of(&format!("the type of tensor {name}"), self.r#type)?;
        // SAFETY: the caller's promise.
        let at = unsafe { DevicePtr::new(self.address, self.bytes) };
        // Sizes that do not fit are refused behind this, as no tensor is so large.
        let sizes = |all: &[u64; FERRY_MAX_DIMS]| -> [usize; N] {
            std::array::from_fn(|index| usize::try_from(all[index]).unwrap_or(usize::MAX))
        };
        let mut tensor = Tensor::contiguous(at, element.data_type(), sizes(&self.dims));
        if self.strides != [0; FERRY_MAX_DIMS] {
            tensor.strides = sizes(&self.strides);
        }
        Ok(Some(tensor))
    }

    /// The same, of a tensor that must be there.
    ///
    /// # Safety
    /// The rule of memory.
    pub(crate) unsafe fn require<const N: usize>(&self, name: &str) -> Result<Tensor<N>, Failure> {
        // SAFETY: the caller's promise.
        let tensor = unsafe { self.get(name)? };
        tensor.ok_or_else(|| {
            let text = format!("tensor {name}: wanted {N} dimensions, given none");
            Failure::new(FERRY_INVALID_TENSOR, text)
        })
    }
}

/// As C sees a tensor without gaps of Rust's; one without an address is to be allocated.
pub(crate) fn shown<const N: usize>(tensor: &Tensor<N>) -> ferry_tensor {
    let number = ferry_type::number(tensor.data_type);
    let dims = tensor.dims.map(|dim| dim as u64);
    ferry_tensor::given(tensor.at.address(), number, dims)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_those_of_the_elements() {
        assert_eq!(ferry_tensor_2d(16, FERRY_BF16 as u32, 3, 8).bytes, 48);
        assert_eq!(ferry_tensor_1d(16, FERRY_E2M1 as u32, 3).bytes, 2);
        assert_eq!(ferry_tensor_1d(16, 77, 3).bytes, 0);
        assert_eq!(
            ferry_tensor_3d(16, FERRY_F32 as u32, u64::MAX, 0, 9).bytes,
            0
        );
        let huge = ferry_tensor_3d(16, FERRY_F32 as u32, u64::MAX, 2, 9).bytes;
        assert_eq!(huge, u64::MAX.div_ceil(8));
    }

    #[test]
    fn a_tensor_that_does_not_fit_is_refused_by_name() {
        let refused = |tensor: ferry_tensor| {
            // SAFETY: nothing is done with the memory.
            unsafe { tensor.require::<2>("x") }.unwrap_err().text
        };
        let good = ferry_tensor_2d(16, FERRY_BF16 as u32, 3, 8);
        assert_eq!(
            refused(ferry_tensor { ndim: 3, ..good }),
            "tensor x: wanted 2 dimensions, given 3"
        );
        assert_eq!(
            refused(ferry_tensor { r#type: 0, ..good }),
            "the type of tensor x is 0: no ferry_type"
        );
        assert_eq!(
            refused(ferry_tensor::NONE),
            "tensor x: wanted 2 dimensions, given none"
        );
        let text = refused(ferry_tensor { ndim: 0, ..good });
        assert!(text.contains("ndim is 0 (no tensor)"), "{text}");
    }
}
