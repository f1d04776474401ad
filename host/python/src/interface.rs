//! Interfaces of arrays: NumPy's, and that of arrays on a GPU.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// `__array_interface__` or `__cuda_array_interface__` of an array.
pub(crate) struct Interface {
    pub(crate) address: u64,
    pub(crate) is_read_only: bool,
    pub(crate) typestr: String,
    /// Bytes of an element, if `typestr` says them.
    pub(crate) itemsize: Option<i64>,
    pub(crate) shape: Vec<usize>,
    /// Steps in bytes; `None` without gaps.
    pub(crate) strides: Option<Vec<i64>>,
}

impl Interface {
    pub(crate) fn read(interface: &Bound<'_, PyAny>) -> PyResult<Self> {
        let data = interface.get_item("data")?.try_iter()?;
        let data = data.collect::<PyResult<Vec<_>>>()?;
        let [address, is_read_only] = &data[..] else {
            return Err(PyValueError::new_err("data has an address and a flag"));
        };
        let typestr = interface.get_item("typestr")?.str()?.to_string();
        let bytes: String = typestr.chars().skip(2).collect();
        let shape = interface.get_item("shape")?.try_iter()?;
        let shape = shape.map(|size| size?.extract());
        let strides = interface.call_method1("get", ("strides",))?;
        let strides = match strides.is_none() {
            true => None,
            false => Some(
                strides
                    .try_iter()?
                    .map(|stride| stride?.extract())
                    .collect::<PyResult<_>>()?,
            ),
        };
        Ok(Self {
            address: address.extract()?,
            is_read_only: is_read_only.is_truthy()?,
            itemsize: bytes.parse().ok(),
            typestr,
            shape: shape.collect::<PyResult<_>>()?,
            strides,
        })
    }

    /// Name of the elements' type.
    pub(crate) fn kind(&self) -> String {
        let kind = match self.typestr.chars().nth(1) {
            Some('f') => "float",
            Some('i') => "int",
            Some('u') => "uint",
            _ => return self.typestr.clone(),
        };
        format!("{kind}{}", 8 * self.itemsize.unwrap_or(0))
    }
}

/// Numbers as Python writes a tuple of them.
pub(crate) fn listed(numbers: &[i64]) -> String {
    match numbers {
        [one] => format!("({one},)"),
        all => {
            let all: Vec<_> = all.iter().map(ToString::to_string).collect();
            format!("({})", all.join(", "))
        }
    }
}
