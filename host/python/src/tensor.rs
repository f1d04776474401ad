//! Tensors: an address, a type, sizes and strides.

use ferry::{AnyTensor, DataType, DevicePtr};
use pyo3::prelude::*;

use crate::errors;
use crate::scalars;

/// Name of an argument, and the type that its elements are to have.
pub(crate) type Wanted = (&'static str, DataType);

const TYPES: [DataType; 11] = [
    DataType::Bf16,
    DataType::F16,
    DataType::F32,
    DataType::E4m3,
    DataType::E8m0,
    DataType::E2m1,
    DataType::I32,
    DataType::I64,
    DataType::U32,
    DataType::U16,
    DataType::U8,
];

/// Type of elements with this name.
pub(crate) fn data_type(name: &str) -> PyResult<DataType> {
    let mut all = TYPES.into_iter();
    all.find(|data_type| data_type.name() == name)
        .ok_or_else(|| {
            let names: Vec<_> = TYPES.iter().map(|data_type| data_type.name()).collect();
            let text = format!("data_type is {name:?}, but there are {}", names.join(", "));
            errors::raise("ArgumentError", text)
        })
}

/// A tensor by its address on the rank's device, for memory of any library.
///
/// ``shape`` and ``strides`` count elements, ``strides=None`` has no gaps. ``data_type`` is ``"bf16"``,
/// ``"f16"``, ``"f32"``, ``"e4m3"``, ``"e8m0"``, ``"e2m1"``, ``"i32"``, ``"i64"``, ``"u32"``, ``"u16"`` or
/// ``"u8"``. ``owner`` is kept alive with the tensor. Nothing checks that the memory is there: it must be the
/// device's, and live until the work that uses it has ended.
#[pyclass(frozen, module = "ferry_ep")]
pub(crate) struct Tensor {
    /// Address of the first element.
    #[pyo3(get)]
    pub(crate) address: u64,
    pub(crate) data_type: DataType,
    pub(crate) dims: Vec<usize>,
    pub(crate) strides: Vec<usize>,
    /// Keeps the memory alive.
    #[pyo3(get)]
    pub(crate) owner: Option<Py<PyAny>>,
}

#[pymethods]
impl Tensor {
    #[new]
    #[pyo3(signature = (address, data_type, shape, strides=None, *, owner=None))]
    fn new(
        #[pyo3(from_py_with = scalars::address)] address: u64,
        #[pyo3(from_py_with = scalars::data_type)] data_type: String,
        #[pyo3(from_py_with = scalars::shape)] shape: Vec<usize>,
        #[pyo3(from_py_with = scalars::strides)] strides: Option<Vec<usize>>,
        owner: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let strides = strides.unwrap_or_else(|| dense(&shape));
        if strides.len() != shape.len() {
            let wanted = format!("a stride for each of {} dimensions", shape.len());
            return Err(errors::tensor("strides", &wanted, &format!("{strides:?}")));
        }
        Ok(Self {
            address,
            data_type: crate::tensor::data_type(&data_type)?,
            dims: shape,
            strides,
            owner,
        })
    }

    #[getter]
    fn data_type(&self) -> &'static str {
        self.data_type.name()
    }

    #[getter]
    fn shape(&self) -> Vec<usize> {
        self.dims.clone()
    }

    #[getter]
    fn strides(&self) -> Vec<usize> {
        self.strides.clone()
    }

    /// Bytes from the first element to the end of the last.
    #[getter]
    pub(crate) fn nbytes(&self) -> u64 {
        extent(&self.dims, &self.strides, self.data_type)
    }

    fn __repr__(&self) -> String {
        format!(
            "<ferry_ep.Tensor {} {:?} at {:#x}>",
            self.data_type.name(),
            self.dims,
            self.address
        )
    }
}

impl Tensor {
    /// The tensor of memory that `owner` keeps alive.
    pub(crate) const fn found(
        address: u64,
        data_type: DataType,
        dims: Vec<usize>,
        strides: Vec<usize>,
        owner: Py<PyAny>,
    ) -> Self {
        Self {
            address,
            data_type,
            dims,
            strides,
            owner: Some(owner),
        }
    }

    /// The memory, as the caller of Python promised it.
    pub(crate) fn memory(&self) -> DevicePtr {
        // SAFETY: whoever made the tensor promised that these bytes are its device's, and outlive their use:
        // documented on `ferry_ep.Tensor`.
        unsafe { DevicePtr::new(self.address, self.nbytes()) }
    }

    /// The tensor for a call, whose argument is `name`.
    pub(crate) fn any(&self, name: &'static str) -> PyResult<AnyTensor> {
        let tensor = AnyTensor::new(
            self.memory(),
            self.data_type,
            &self.dims,
            Some(&self.strides),
        );
        tensor.ok_or_else(|| {
            let given = format!("shape {:?}", self.dims);
            errors::tensor(name, "at most 5 dimensions", &given)
        })
    }

    /// The tensor of `N` dimensions for a call, whose argument is `name`.
    pub(crate) fn of<const N: usize>(&self, name: &'static str) -> PyResult<ferry::Tensor<N>> {
        self.any(name)?.of(name).map_err(errors::from_any)
    }
}

/// Bytes from the first element to the end of the last.
pub(crate) fn extent(dims: &[usize], strides: &[usize], data_type: DataType) -> u64 {
    if dims.contains(&0) {
        return 0;
    }
    let ends = dims.iter().zip(strides);
    let last = ends.fold(0_u128, |sum, (&dim, &stride)| {
        sum.saturating_add((dim as u128 - 1).saturating_mul(stride as u128))
    });
    let bits = last
        .saturating_add(1)
        .saturating_mul(data_type.bits().into());
    u64::try_from(bits.div_ceil(8)).unwrap_or(u64::MAX)
}

/// Strides, in elements, of a tensor without gaps.
pub(crate) fn dense(dims: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; dims.len()];
    for at in (1..dims.len()).rev() {
        strides[at - 1] = dims[at].saturating_mul(strides[at]);
    }
    strides
}

/// [`Tensor::any`] for an argument that may be missing.
pub(crate) fn any(
    given: Option<&Bound<'_, Tensor>>,
    name: &'static str,
) -> PyResult<Option<AnyTensor>> {
    given.map(|tensor| tensor.get().any(name)).transpose()
}
