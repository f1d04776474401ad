//! Memory of arrays, which may be shorter than their shape says: FSDP frees it, for one.

use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyDict;

use crate::errors;

/// Whether a value is an instance of a module's class, if that module was imported already.
pub(crate) fn is_of(value: &Bound<'_, PyAny>, module: &str, class: &str) -> PyResult<bool> {
    static MODULES: PyOnceLock<Py<PyDict>> = PyOnceLock::new();
    let py = value.py();
    let modules = || -> PyResult<_> { Ok(py.import("sys")?.getattr("modules")?.extract()?) };
    let modules = MODULES.get_or_try_init(py, modules)?;
    let module = modules.bind(py).get_item(module)?;
    match module.map(|module| module.getattr_opt(class)).transpose()? {
        Some(Some(class)) => value.is_instance(&class),
        _ => Ok(false),
    }
}

/// Raises `TensorError` unless the storage of a tensor of torch has all its elements.
#[pyfunction]
pub(crate) fn require_storage(name: &str, value: &Bound<'_, PyAny>) -> PyResult<()> {
    // Fake tensors have a storage on no device; tensors of transforms have none, and say so.
    let read = || -> PyResult<_> {
        let storage = value.call_method0("untyped_storage")?;
        let kind = |of: &Bound<'_, PyAny>| -> PyResult<String> {
            of.getattr("device")?.getattr("type")?.extract()
        };
        let there: u64 = match kind(&storage)? == kind(value)? {
            true => storage.call_method0("nbytes")?.extract()?,
            false => 0,
        };
        let offset: u64 = value.call_method0("storage_offset")?.extract()?;
        let dims: Vec<usize> = value.getattr("shape")?.extract()?;
        let strides: Vec<usize> = value.call_method0("stride")?.extract()?;
        let element: u64 = value.call_method0("element_size")?.extract()?;
        Ok((there, offset, dims, strides, element))
    };
    let (there, offset, dims, strides, element) = read().map_err(|error| {
        let py = value.py();
        match value.get_type().name() {
            Ok(class) if error.is_instance_of::<PyException>(py) => {
                let given = format!("a {class}: {}", error.value(py));
                errors::tensor(name, "a tensor with memory", &given)
            }
            _ => error,
        }
    })?;
    match last(&dims, &strides) {
        Some(last) => require_bytes(name, &dims, last.saturating_add(offset), element, there),
        None => Ok(()),
    }
}

/// Distance of the last element from the first, in elements; nothing if there is none.
pub(crate) fn last(dims: &[usize], strides: &[usize]) -> Option<u64> {
    if dims.contains(&0) {
        return None;
    }
    let ends = dims.iter().zip(strides);
    Some(ends.fold(0, |sum, (&dim, &stride)| {
        let far = (dim as u64 - 1).saturating_mul(stride as u64);
        far.saturating_add(sum)
    }))
}

/// Raises `TensorError` unless a storage of `there` bytes has the element number `last`.
pub(crate) fn require_bytes(
    name: &str,
    dims: &[usize],
    last: u64,
    element: u64,
    there: u64,
) -> PyResult<()> {
    let end = last.saturating_add(1).saturating_mul(element);
    if end <= there {
        return Ok(());
    }
    let wanted = format!("a storage of {end} bytes, for shape {dims:?}");
    let given = format!("one of {there} bytes: it was freed or shrunk, or is not there");
    Err(errors::tensor(name, &wanted, &given))
}

/// Raises unless the memory of a tensor of torch has its values: `ArgumentError` for one that requires a
/// gradient, and else `TensorError`.
#[pyfunction]
pub(crate) fn require_plain(name: &str, value: &Bound<'_, PyAny>) -> PyResult<()> {
    require_memory(name, value)?;
    require_no_gradient(name, value)
}

/// Raises `TensorError` unless a tensor of torch has memory that calls can read, with its values.
pub(crate) fn require_memory(name: &str, value: &Bound<'_, PyAny>) -> PyResult<()> {
    let device = value.getattr("device")?;
    let kind: String = device.getattr("type")?.extract()?;
    if !["cpu", "cuda"].contains(&&kind[..]) {
        let given = format!("a tensor on {device}");
        return Err(errors::tensor(
            name,
            "memory of the CPU or of a GPU",
            &given,
        ));
    }
    let layout = value.getattr("layout")?.str()?.to_string();
    if layout != "torch.strided" {
        return Err(errors::tensor(
            name,
            "a strided tensor",
            &format!("layout {layout}"),
        ));
    }
    // Its memory has other values.
    for method in ["is_neg", "is_conj"] {
        if value.call_method0(method)?.is_truthy()? {
            let wanted = "plain values: call resolve_neg() and resolve_conj()";
            return Err(errors::tensor(name, wanted, "a negated or conjugate view"));
        }
    }
    require_storage(name, value)
}

/// Raises `ArgumentError` for a tensor of torch that requires a gradient, while gradients are recorded.
pub(crate) fn require_no_gradient(name: &str, value: &Bound<'_, PyAny>) -> PyResult<()> {
    let py = value.py();
    if !value.getattr("requires_grad")?.is_truthy()? {
        return Ok(());
    }
    let torch = py.import("torch")?;
    if !torch.call_method0("is_grad_enabled")?.is_truthy()? {
        return Ok(());
    }
    let text = format!(
        "tensor {name} requires a gradient, and this call has no backward pass: make it under \
         torch.no_grad(), or pass {name}.detach()"
    );
    Err(errors::raise("ArgumentError", text))
}

/// Raises `TensorError` for an array of NumPy that is longer than its memory: a view may be by now, or by
/// `as_strided`.
#[pyfunction]
pub(crate) fn require_numpy_memory(name: &str, value: &Bound<'_, PyAny>) -> PyResult<()> {
    let mut owner = value.getattr("base")?;
    let size: usize = value.getattr("size")?.extract()?;
    if owner.is_none() || size == 0 {
        return Ok(());
    }
    while owner.hasattr("__array_interface__")? {
        match owner.getattr_opt("base")? {
            Some(base) if !base.is_none() => owner = base,
            _ => break,
        }
    }
    let Some((begin, end)) = memory_of(&owner)? else {
        return Ok(());
    };
    let dims: Vec<i64> = value.getattr("shape")?.extract()?;
    let strides: Vec<i64> = value.getattr("strides")?.extract()?;
    let itemsize: i64 = value.getattr("itemsize")?.extract()?;
    let at = address_of(value)?;
    let (mut first, mut last) = (at, at + i128::from(itemsize));
    for (size, stride) in dims.into_iter().zip(strides) {
        let step = i128::from(size - 1) * i128::from(stride);
        first += step.min(0);
        last += step.max(0);
    }
    if begin <= first && last <= end {
        return Ok(());
    }
    let (wanted, given) = (
        "a view that ends within its array",
        "a longer one, of freed or other memory",
    );
    Err(errors::tensor(name, wanted, given))
}

/// Begin and end of the memory of an array that owns it, of NumPy or torch; nothing of others.
fn memory_of(owner: &Bound<'_, PyAny>) -> PyResult<Option<(i128, i128)>> {
    if is_of(owner, "torch", "Tensor")? {
        let storage = owner.call_method0("untyped_storage")?;
        let begin = storage.call_method0("data_ptr")?.extract::<u64>()?.into();
        let bytes: i64 = storage.call_method0("nbytes")?.extract()?;
        return Ok(Some((begin, begin + i128::from(bytes))));
    }
    let is_numpy = is_of(owner, "numpy", "ndarray")?;
    if !is_numpy || !owner.getattr("flags")?.getattr("owndata")?.is_truthy()? {
        return Ok(None);
    }
    let (begin, bytes) = (address_of(owner)?, owner.getattr("nbytes")?);
    Ok(Some((begin, begin + i128::from(bytes.extract::<i64>()?))))
}

/// Address of the first element of an array of NumPy.
fn address_of(array: &Bound<'_, PyAny>) -> PyResult<i128> {
    let interface = array.getattr("__array_interface__")?;
    let address: u64 = interface.get_item("data")?.get_item(0)?.extract()?;
    Ok(address.into())
}
