//! Types of a tensor's elements.

use std::fmt;

use bytemuck::Pod;
use ferry_layout::{OutputElement, TokenFormat};

/// Type of the elements of a [`Tensor`](crate::Tensor). Each argument takes one type and refuses all others,
/// so that `x` and `topk_ids` cannot be swapped; only ids of experts are `I32` or `I64`.
///
/// Unsigned integers are also accepted as plain bits, for engines that have no better name for them: `U8`
/// as `E4m3` and `E8m0`, `U16` as `Bf16` and `F16`, `U32` as `I32`. No other type is accepted as `F32`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DataType {
    /// BF16: tokens, rows of experts.
    Bf16,
    /// IEEE half precision.
    F16,
    /// IEEE single precision: weights, scales.
    F32,
    /// FP8 e4m3, with a NaN and no infinity: codes of tokens, scales of NVFP4.
    E4m3,
    /// A power of two in a byte: scales of the MX formats.
    E8m0,
    /// FP4 e2m1, two per byte, the even one in the low half. Sizes and strides count elements, not bytes.
    E2m1,
    /// 32-bit signed integers: ids of experts, and sources of rows.
    I32,
    /// 64-bit signed integers: ids of experts, as PyTorch's `topk` returns them.
    I64,
    /// 32-bit unsigned integers: offsets of rows, and numbers of tokens.
    U32,
    /// Plain 16 bits.
    U16,
    /// Plain 8 bits.
    U8,
}

impl DataType {
    /// Bits of an element.
    pub const fn bits(self) -> u32 {
        match self {
            Self::I64 => 64,
            Self::F32 | Self::I32 | Self::U32 => 32,
            Self::Bf16 | Self::F16 | Self::U16 => 16,
            Self::E4m3 | Self::E8m0 | Self::U8 => 8,
            Self::E2m1 => 4,
        }
    }

    /// Name in lower case, as in the documentation of the arguments: "bf16".
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::F32 => "f32",
            Self::E4m3 => "e4m3",
            Self::E8m0 => "e8m0",
            Self::E2m1 => "e2m1",
            Self::I32 => "i32",
            Self::I64 => "i64",
            Self::U32 => "u32",
            Self::U16 => "u16",
            Self::U8 => "u8",
        }
    }

    /// Type of the tokens of a format.
    pub const fn of_tokens(format: TokenFormat) -> Self {
        match format {
            TokenFormat::Bf16 => Self::Bf16,
            TokenFormat::BlockwiseFp8 | TokenFormat::Mxfp8(_) => Self::E4m3,
            TokenFormat::Mxfp4(_) | TokenFormat::Nvfp4(_) | TokenFormat::Nvfp4RowScaled(_) => {
                Self::E2m1
            }
        }
    }

    /// Type of the scales of a format; `None` for BF16.
    pub const fn of_scales(format: TokenFormat) -> Option<Self> {
        match format {
            TokenFormat::Bf16 => None,
            TokenFormat::BlockwiseFp8 => Some(Self::F32),
            TokenFormat::Mxfp8(_) | TokenFormat::Mxfp4(_) => Some(Self::E8m0),
            TokenFormat::Nvfp4(_) | TokenFormat::Nvfp4RowScaled(_) => Some(Self::E4m3),
        }
    }

    /// Whether an argument of this type takes elements of type `given`.
    pub const fn takes(self, given: Self) -> bool {
        match given {
            Self::U8 => matches!(self, Self::U8 | Self::E4m3 | Self::E8m0),
            Self::U16 => matches!(self, Self::U16 | Self::Bf16 | Self::F16),
            Self::U32 => matches!(self, Self::U32 | Self::I32),
            _ => self as u8 == given as u8,
        }
    }
}

impl From<OutputElement> for DataType {
    fn from(element: OutputElement) -> Self {
        match element {
            OutputElement::Bf16 => Self::Bf16,
            OutputElement::F16 => Self::F16,
            OutputElement::F32 => Self::F32,
        }
    }
}

impl fmt::Display for DataType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A host type of one of the [`DataType`]s, for
/// [`upload_tensor`](device/trait.Device.html#method.upload_tensor) and `download_tensor`. `bf16` and `f16`
/// are those of the crate `half`, version 2. Implement it for types of yours that have the same bits. A copy
/// with a type of another size does not compile:
///
/// ```compile_fail
/// use ferry::{DataType, Device, Error, Tensor, TensorElement};
///
/// #[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
/// #[repr(transparent)]
/// struct Wide(u64);
///
/// impl TensorElement for Wide {
///     const DATA_TYPE: DataType = DataType::F32;
/// }
///
/// fn upload(device: &dyn Device) -> Result<Tensor<1>, Error> {
///     device.upload_tensor([1], &[Wide(1)])
/// }
/// # fn main() {
/// #     std::hint::black_box(upload as fn(&dyn Device) -> Result<Tensor<1>, Error>);
/// # }
/// ```
pub trait TensorElement: Pod {
    /// The type of its bits.
    const DATA_TYPE: DataType;
}

/// Refuses, at compile time, a type of another size than that of its `DATA_TYPE`.
pub(crate) const fn has_its_bits<T: TensorElement>() {
    assert!(
        8 * size_of::<T>() == T::DATA_TYPE.bits() as usize,
        "a TensorElement has as many bits as its DATA_TYPE"
    );
}

macro_rules! elements {
    ($($host:ty: $data_type:ident),+) => {
        $(impl TensorElement for $host {
            const DATA_TYPE: DataType = DataType::$data_type;
        })+
    };
}

elements!(half::bf16: Bf16, half::f16: F16, f32: F32, i32: I32, i64: I64, u32: U32, u16: U16, u8: U8);
