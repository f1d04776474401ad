//! Tensors: device memory with a shape.

use ferry::{AnyTensor, Argument, DataType, DevicePtr, Tensor, TensorLayout};

use crate::status::ferry_status::FERRY_INVALID_TENSOR;
use crate::status::{Failure, with_fields_of_c};

/// Most dimensions of a tensor.
pub const FERRY_MAX_DIMS: usize = 5;

/// Element type of a tensor. Sizes and strides count elements.
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
    /// Powers of two, one byte each: scales of the MX formats.
    FERRY_E8M0 = 5,
    /// FP4 e2m1, two per byte, the even one in the low half.
    FERRY_E2M1 = 6,
    /// Signed 32-bit integer.
    FERRY_I32 = 7,
    /// Unsigned 32-bit integer.
    FERRY_U32 = 8,
    /// Raw 16 bits, accepted in place of FERRY_BF16. A combine writes BF16 to it.
    FERRY_U16 = 9,
    /// Raw 8 bits, accepted in place of FERRY_E4M3 and FERRY_E8M0.
    FERRY_U8 = 10,
    /// Signed 64-bit integer.
    FERRY_I64 = 11,
}

use ferry_type::{
    FERRY_BF16, FERRY_E2M1, FERRY_E4M3, FERRY_E8M0, FERRY_F16, FERRY_F32, FERRY_I32, FERRY_I64,
    FERRY_U8, FERRY_U16, FERRY_U32,
};

/// Device memory with a shape. All zeros: no tensor. ferry_tensor_1d, _2d and _3d make contiguous tensors.
/// This struct does not begin with its size, and never changes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ferry_tensor {
    /// Address of the first element: a CUdeviceptr, or in the simulator an address from ferry_device_alloc. 0
    /// only if the tensor has no elements.
    pub address: u64,
    /// Bytes that may be used from the address on.
    pub bytes: u64,
    /// Size of each dimension, slowest first, in elements; `ndim` of them.
    pub dims: [u64; FERRY_MAX_DIMS],
    /// Stride of each dimension, in elements. All 0: contiguous.
    pub strides: [u64; FERRY_MAX_DIMS],
    /// Number of dimensions. 0: no tensor.
    pub ndim: u32,
    /// A ferry_type.
    pub r#type: u32,
}

impl ferry_type {
    const ALL: [Self; 11] = [
        FERRY_BF16, FERRY_F16, FERRY_F32, FERRY_E4M3, FERRY_E8M0, FERRY_E2M1, FERRY_I32, FERRY_U32,
        FERRY_U16, FERRY_U8, FERRY_I64,
    ];

    /// Finds a type by its number.
    pub(crate) fn of(name: &str, number: u32) -> Result<Self, Failure> {
        let known = Self::ALL.into_iter().find(|&known| known as u32 == number);
        known.ok_or_else(|| Failure::value(name, number, "no ferry_type"))
    }

    /// Converts to the library's type.
    pub(crate) const fn data_type(self) -> DataType {
        match self {
            FERRY_BF16 => DataType::Bf16,
            FERRY_F16 => DataType::F16,
            FERRY_F32 => DataType::F32,
            FERRY_E4M3 => DataType::E4m3,
            FERRY_E8M0 => DataType::E8m0,
            FERRY_E2M1 => DataType::E2m1,
            FERRY_I32 => DataType::I32,
            FERRY_I64 => DataType::I64,
            FERRY_U32 => DataType::U32,
            FERRY_U16 => DataType::U16,
            FERRY_U8 => DataType::U8,
        }
    }

    /// Number of a library type; 0 if C has no such type.
    fn number(data_type: DataType) -> u32 {
        let known = Self::ALL
            .into_iter()
            .find(|known| known.data_type() == data_type);
        known.map_or(0, |known| known as u32)
    }
}

/// Returns a contiguous tensor of one dimension. `bytes` is the size of its elements; 0 if the type is
/// unknown. The calls that take the tensor check it. Any thread; never fails.
#[unsafe(no_mangle)]
pub extern "C" fn ferry_tensor_1d(address: u64, r#type: u32, dim_0: u64) -> ferry_tensor {
    ferry_tensor::given(address, r#type, &[dim_0])
}

/// Returns a contiguous tensor of two dimensions, the slower one first; see ferry_tensor_1d.
#[unsafe(no_mangle)]
pub extern "C" fn ferry_tensor_2d(
    address: u64,
    r#type: u32,
    dim_0: u64,
    dim_1: u64,
) -> ferry_tensor {
    ferry_tensor::given(address, r#type, &[dim_0, dim_1])
}

/// Returns a contiguous tensor of three dimensions, the slowest one first; see ferry_tensor_1d.
#[unsafe(no_mangle)]
pub extern "C" fn ferry_tensor_3d(
    address: u64,
    r#type: u32,
    dim_0: u64,
    dim_1: u64,
    dim_2: u64,
) -> ferry_tensor {
    ferry_tensor::given(address, r#type, &[dim_0, dim_1, dim_2])
}

impl ferry_tensor {
    /// No tensor.
    pub(crate) const NONE: Self = Self {
        address: 0,
        bytes: 0,
        dims: [0; FERRY_MAX_DIMS],
        strides: [0; FERRY_MAX_DIMS],
        ndim: 0,
        r#type: 0,
    };

    /// Makes a contiguous tensor; its bytes are 0 if the type is unknown.
    fn given(address: u64, r#type: u32, dims: &[u64]) -> Self {
        let bits =
            ferry_type::of("", r#type).map_or(0, |known| u64::from(known.data_type().bits()));
        let elements = if dims.contains(&0) {
            0
        } else {
            dims.iter()
                .fold(1, |all: u64, &dim| all.saturating_mul(dim))
        };
        let mut tensor = Self {
            address,
            bytes: elements.saturating_mul(bits).div_ceil(8),
            ndim: dims.len() as u32,
            r#type,
            ..Self::NONE
        };
        tensor.dims[..dims.len()].copy_from_slice(dims);
        tensor
    }

    /// Makes a tensor without an address. No layout has more than 5 dimensions.
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

    /// Converts to the library's tensor; `None` if there is no tensor.
    ///
    /// # Safety
    /// The rule of memory.
    pub(crate) unsafe fn any(&self, name: &str) -> Result<Option<AnyTensor>, Failure> {
        let name_in_c = || with_fields_of_c(name.to_owned());
        let refused = |text: String| {
            let text = format!("tensor {}: {text}", name_in_c());
            Failure::new(FERRY_INVALID_TENSOR, text)
        };
        if self.ndim == 0 {
            if self.address != 0 || self.dims != [0; FERRY_MAX_DIMS] {
                let text = "ndim is 0 (no tensor), but it has an address or sizes";
                return Err(refused(text.to_owned()));
            }
            return Ok(None);
        }
        let ndim = self.ndim as usize;
        if ndim > FERRY_MAX_DIMS {
            let text = format!("wanted at most {FERRY_MAX_DIMS} dimensions, given {ndim}");
            return Err(refused(text));
        }
        let element = match ferry_type::of("", self.r#type) {
            Ok(element) => element,
            Err(_) => {
                let field = format!("the type of tensor {}", name_in_c());
                ferry_type::of(&field, self.r#type)?
            }
        };
        // SAFETY: the rule of memory.
        let at = unsafe { DevicePtr::new(self.address, self.bytes) };
        // The library refuses sizes above `usize`: no tensor is so large.
        let sizes = |all: &[u64; FERRY_MAX_DIMS]| {
            all.map(|size| usize::try_from(size).unwrap_or(usize::MAX))
        };
        let (dims, strides) = (sizes(&self.dims), sizes(&self.strides));
        let strides = (self.strides != [0; FERRY_MAX_DIMS]).then_some(&strides[..ndim]);
        Ok(AnyTensor::new(
            at,
            element.data_type(),
            &dims[..ndim],
            strides,
        ))
    }

    /// Converts to the library's tensor of `N` dimensions; `None` if there is no tensor.
    ///
    /// # Safety
    /// The rule of memory.
    pub(crate) unsafe fn get<const N: usize>(
        &self,
        name: &'static str,
    ) -> Result<Option<Tensor<N>>, Failure> {
        // SAFETY: the rule of memory.
        let tensor = unsafe { self.any(name)? };
        Ok(AnyTensor::optional(name, tensor)?)
    }

    /// Converts to the library's tensor of `N` dimensions, which must be there.
    ///
    /// # Safety
    /// The rule of memory.
    pub(crate) unsafe fn require<const N: usize>(
        &self,
        name: &'static str,
    ) -> Result<Tensor<N>, Failure> {
        // SAFETY: the rule of memory.
        let tensor = unsafe { self.any(name)? };
        Ok(AnyTensor::required(name, tensor)?)
    }
}

/// Converts the arguments of a table.
///
/// # Safety
/// The rule of memory.
pub(crate) unsafe fn all<const N: usize>(
    table: &[Argument; N],
    tensors: [&ferry_tensor; N],
) -> Result<[Option<AnyTensor>; N], Failure> {
    let mut given = [None; N];
    for ((given, argument), tensor) in given.iter_mut().zip(table).zip(tensors) {
        // SAFETY: the rule of memory.
        *given = unsafe { tensor.any(argument.name)? };
    }
    Ok(given)
}

/// Converts a contiguous tensor to C's; its address is 0 if it is not allocated yet.
pub(crate) fn shown(tensor: &AnyTensor) -> ferry_tensor {
    let number = ferry_type::number(tensor.data_type());
    let mut dims = [0; FERRY_MAX_DIMS];
    for (place, &dim) in dims.iter_mut().zip(tensor.dims()) {
        *place = dim as u64;
    }
    ferry_tensor::given(tensor.at().address(), number, &dims[..tensor.dims().len()])
}

/// Converts a tensor with gaps to C's.
pub(crate) fn strided<const N: usize>(tensor: Tensor<N>) -> ferry_tensor {
    let mut strided = ferry_tensor {
        bytes: tensor.at.bytes(),
        ..shown(&tensor.into())
    };
    for (place, &stride) in strided.strides.iter_mut().zip(&tensor.strides) {
        *place = stride as u64;
    }
    strided
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
            "tensor x: wanted 2 dimensions, given shape [3, 8, 0]"
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
        for (wrong, text) in [
            (
                ferry_tensor { r#type: 0, ..good },
                "the type of tensor bias_1 is 0: no ferry_type",
            ),
            (
                ferry_tensor { ndim: 6, ..good },
                "tensor bias_1: wanted at most 5 dimensions, given 6",
            ),
        ] {
            // SAFETY: nothing is done with the memory.
            let refused = unsafe { wrong.any("biases[1]") };
            assert_eq!(refused.unwrap_err().text, text);
        }
    }
}
