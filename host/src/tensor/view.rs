//! Checks of tensors, the same for any number of dimensions.

use crate::error::TensorError;
use crate::tensor::data_type::DataType;
use crate::tensor::handles::DevicePtr;

/// Most dimensions of a tensor.
pub(super) const MOST_DIMS: usize = 5;

/// A tensor whose checks are the same for any number of dimensions.
#[derive(Clone, Copy)]
pub(crate) struct View<'a> {
    pub(crate) at: DevicePtr,
    pub(crate) data_type: DataType,
    pub(crate) dims: &'a [usize],
    pub(crate) strides: &'a [usize],
}

impl View<'_> {
    #[inline]
    pub(super) fn elements(&self) -> usize {
        if self.dims.contains(&0) {
            return 0;
        }
        self.dims
            .iter()
            .fold(1, |all, &dim| all.saturating_mul(dim))
    }

    #[inline]
    pub(crate) fn is_contiguous(&self) -> bool {
        let mut dense = 1_usize;
        let all = self.dims.iter().zip(self.strides).rev();
        for (&dim, &stride) in all {
            if dim != 1 && stride != dense {
                return self.dims.contains(&0);
            }
            dense = dense.wrapping_mul(dim);
        }
        true
    }

    /// Bytes from the first element to the end of the last, gaps included; [`u64::MAX`] if they cannot be
    /// counted.
    #[inline]
    pub(crate) fn span(&self) -> u64 {
        if self.is_contiguous() {
            return bytes_of(self.dims, self.data_type).unwrap_or(u64::MAX);
        }
        let mut steps = self.dims.iter().zip(self.strides);
        let last = steps.try_fold(0_u64, |last, (&dim, &stride)| {
            last.checked_add((dim as u64 - 1).checked_mul(stride as u64)?)
        });
        let bits = last.and_then(|last| {
            last.checked_add(1)?
                .checked_mul(self.data_type.bits().into())
        });
        bits.map_or(u64::MAX, |bits| bits.div_ceil(8))
    }

    /// Checks an argument named `tensor`: its elements and sizes, no gaps, an address unless it is empty,
    /// the address's alignment, and that there is memory for all elements.
    #[inline]
    pub(crate) fn require(
        &self,
        tensor: &'static str,
        dims: &[usize],
        element: Element,
    ) -> Result<(), TensorError> {
        self.require_elements(tensor, dims, element)?;
        if !self.is_contiguous() {
            let dense = dense_strides::<MOST_DIMS>(self.dims);
            let given = format!("{:?} (shape {dims:?})", self.strides);
            let wanted = format!(
                "strides {:?}, in elements: make it contiguous",
                &dense[..dims.len()]
            );
            return refused(tensor, wanted, given);
        }
        self.require_memory(tensor, bytes_of(dims, element.data_type))
    }

    /// Checks the type and sizes of the elements, and the address.
    #[inline]
    pub(crate) fn require_elements(
        &self,
        tensor: &'static str,
        dims: &[usize],
        Element {
            data_type,
            align_bytes,
        }: Element,
    ) -> Result<(), TensorError> {
        if !data_type.takes(self.data_type) {
            let wanted = format!("elements of {data_type}");
            return refused(tensor, wanted, self.data_type.to_string());
        }
        if self.dims != dims {
            let given = format!("{:?}", self.dims);
            return refused(tensor, format!("shape {dims:?}"), given);
        }
        if self.elements() != 0 && self.at.address() == 0 {
            let wanted = format!("an address (shape {dims:?})");
            return refused(tensor, wanted, "null".to_owned());
        }
        if !self.at.address().is_multiple_of(align_bytes) {
            let given = format!("{:#x}", self.at.address());
            let wanted = format!("an address that is a multiple of {align_bytes}");
            return refused(tensor, wanted, given);
        }
        Ok(())
    }

    /// Checks that there are at least `bytes` bytes at the address; `None` are too many for any.
    #[inline]
    pub(crate) fn require_memory(
        &self,
        tensor: &'static str,
        bytes: Option<u64>,
    ) -> Result<(), TensorError> {
        if bytes.is_some_and(|bytes| bytes <= self.at.bytes()) {
            return Ok(());
        }
        let wanted = bytes.map_or("too many".to_owned(), |bytes| bytes.to_string());
        let wanted = format!("{wanted} bytes at its address (shape {:?})", self.dims);
        refused(tensor, wanted, self.at.bytes().to_string())
    }
}

pub(super) fn refused(
    tensor: &'static str,
    wanted: String,
    given: String,
) -> Result<(), TensorError> {
    Err(TensorError {
        tensor,
        wanted,
        given,
    })
}

/// Type of an argument's elements, and alignment of the first one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Element {
    pub(crate) data_type: DataType,
    /// Alignment of the address, in bytes.
    pub(crate) align_bytes: u64,
}

impl Element {
    /// Elements of rows of BF16, 16-byte aligned.
    pub(crate) const BF16_ROW: Self = Self::row(DataType::Bf16);
    /// f32, aligned to its size.
    pub(crate) const F32: Self = Self::word(DataType::F32);
    /// u32, aligned to its size.
    pub(crate) const U32: Self = Self::word(DataType::U32);
    /// Elements of rows: kernels move 16 bytes at a time.
    pub(crate) const fn row(data_type: DataType) -> Self {
        Self {
            data_type,
            align_bytes: 16,
        }
    }

    /// Elements that are read or written one by one, aligned to their own size.
    pub(crate) const fn natural(data_type: DataType) -> Self {
        Self {
            data_type,
            align_bytes: data_type.bits().div_ceil(8) as u64,
        }
    }

    /// Elements that are written as words of 32 bits.
    pub(crate) const fn word(data_type: DataType) -> Self {
        Self {
            data_type,
            align_bytes: 4,
        }
    }
}

/// A tensor without gaps and without memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    dims: [usize; MOST_DIMS],
    ndim: usize,
    pub(crate) element: Element,
}

impl Layout {
    /// A layout of as many dimensions as `dims`, which `size` gives their sizes.
    #[inline]
    pub(crate) fn new<T>(element: Element, dims: &[T], size: impl Fn(&T) -> usize) -> Self {
        let mut made = Self {
            dims: [0; MOST_DIMS],
            ndim: dims.len(),
            element,
        };
        for (place, dim) in made.dims.iter_mut().zip(dims) {
            *place = size(dim);
        }
        made
    }

    /// Sizes, slowest first, in elements.
    pub(crate) fn dims(&self) -> &[usize] {
        &self.dims[..self.ndim]
    }
}

/// Bytes of a tensor without gaps; `None` if they cannot be counted.
#[inline]
pub(crate) fn bytes_of(dims: &[usize], data_type: DataType) -> Option<u64> {
    if dims.contains(&0) {
        return Some(0);
    }
    // Elements first, as bits may not fit where bytes do; in 64 bits, as calls count the bytes of each tensor
    // several times.
    let mut sizes = dims.iter();
    let elements = sizes.try_fold(1_u64, |all, &dim| all.checked_mul(dim as u64))?;
    let (whole, rest) = (elements / 8, elements % 8);
    let bits = u64::from(data_type.bits());
    whole
        .checked_mul(bits)?
        .checked_add((rest * bits).div_ceil(8))
}

/// Strides of a tensor of at most `N` dimensions without gaps; 1 in dimensions that it does not have.
pub(super) const fn dense_strides<const N: usize>(dims: &[usize]) -> [usize; N] {
    let mut strides = [1_usize; N];
    let mut i = dims.len();
    while i > 1 {
        i -= 1;
        strides[i - 1] = strides[i].wrapping_mul(dims[i]);
    }
    strides
}
