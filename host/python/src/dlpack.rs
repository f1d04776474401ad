//! Memory of the library for other libraries: DLPack.

use std::ffi::{CStr, c_void};
use std::ptr;

use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;

/// Name of a capsule that nobody has taken.
const NAME: &CStr = c"dltensor";

/// `DLTensor` of dlpack.h, version 1.0.
#[repr(C)]
pub(crate) struct DlTensor {
    pub(crate) data: *mut c_void,
    pub(crate) device_type: i32,
    pub(crate) device: i32,
    pub(crate) ndim: i32,
    pub(crate) code: u8,
    pub(crate) bits: u8,
    pub(crate) lanes: u16,
    pub(crate) shape: *const i64,
    pub(crate) strides: *const i64,
    pub(crate) byte_offset: u64,
}

impl DlTensor {
    /// A tensor for others to fill.
    pub(crate) const EMPTY: Self = Self {
        data: ptr::null_mut(),
        device_type: 0,
        device: 0,
        ndim: 0,
        code: 0,
        bits: 0,
        lanes: 0,
        shape: ptr::null(),
        strides: ptr::null(),
        byte_offset: 0,
    };
}

/// `DLManagedTensor` of dlpack.h, the form without a version, which every library takes.
#[repr(C)]
struct Managed {
    tensor: DlTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

/// A tensor that was handed out, and everything that it refers to.
struct Exported {
    managed: Managed,
    /// Shape, then strides, which `managed` points to.
    _sizes: Vec<i64>,
    /// Keeps the memory alive.
    _owner: Py<PyAny>,
}

/// Returns a DLPack capsule of memory that `owner` keeps alive. `device` is type and number, `element` code
/// and bits of dlpack.h; strides count elements.
#[pyfunction]
pub(crate) fn dlpack<'py>(
    py: Python<'py>,
    address: u64,
    device: (i32, i32),
    element: (u8, u8),
    shape: Vec<i64>,
    strides: Vec<i64>,
    owner: Py<PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    let ndim = shape.len();
    if strides.len() != ndim {
        return Err(PyBufferError::new_err("a stride for each dimension"));
    }
    let sizes = [shape, strides].concat();
    let (shape, strides) = sizes.split_at(ndim);
    let tensor = DlTensor {
        data: address as *mut c_void,
        device_type: device.0,
        device: device.1,
        ndim: ndim as i32,
        code: element.0,
        bits: element.1,
        lanes: 1,
        shape: shape.as_ptr(),
        strides: strides.as_ptr(),
        byte_offset: 0,
    };
    let exported = Box::into_raw(Box::new(Exported {
        managed: Managed {
            tensor,
            context: ptr::null_mut(),
            deleter: Some(delete),
        },
        _sizes: sizes,
        _owner: owner,
    }));
    // SAFETY: `exported` was just made, and nobody else has it.
    let managed = unsafe {
        (*exported).managed.context = exported.cast();
        &raw mut (*exported).managed
    };
    // SAFETY: the pointer is not null, and the name lives as long as the process.
    let capsule = unsafe { pyo3::ffi::PyCapsule_New(managed.cast(), NAME.as_ptr(), Some(end)) };
    if capsule.is_null() {
        // SAFETY: no capsule has the tensor.
        unsafe { delete(managed) };
    }
    // SAFETY: a new reference, or null with an exception.
    unsafe { Bound::from_owned_ptr_or_err(py, capsule) }
}

/// Frees an exported tensor: called once, by whoever took the capsule, in any thread.
unsafe extern "C" fn delete(managed: *mut Managed) {
    // SAFETY: `dlpack` made it, with the box as its context, and it is freed once.
    let exported = unsafe { Box::from_raw((*managed).context.cast::<Exported>()) };
    let mut exported = Some(exported);
    // Without an interpreter there is no owner to let go of any more.
    if Python::try_attach(|_| drop(exported.take())).is_none() {
        std::mem::forget(exported);
    }
}

/// Ends a capsule; one that nobody has taken still has its name, and its tensor.
unsafe extern "C" fn end(capsule: *mut pyo3::ffi::PyObject) {
    // SAFETY: the interpreter passes the capsule that it ends.
    unsafe {
        if pyo3::ffi::PyCapsule_IsValid(capsule, NAME.as_ptr()) != 0 {
            delete(pyo3::ffi::PyCapsule_GetPointer(capsule, NAME.as_ptr()).cast());
        }
    }
}
