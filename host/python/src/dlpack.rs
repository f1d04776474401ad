//! DLPack: memory of the library for other libraries, and theirs.

use std::ffi::{CStr, c_void};
use std::ptr;

use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

use crate::tensor::dense;

/// Version of dlpack.h whose structures are these.
pub(crate) const MAJOR: u32 = 1;
/// Name of a capsule that nobody has taken, and of one with a version.
const NAME: &CStr = c"dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";
/// `DLPACK_FLAG_BITMASK_READ_ONLY`.
const READ_ONLY: u64 = 1;

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

/// `DLManagedTensorVersioned` of dlpack.h.
#[repr(C)]
struct Versioned {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: *const c_void,
    flags: u64,
    tensor: DlTensor,
}

/// An array in a capsule of another library.
pub(crate) struct Given {
    pub(crate) address: u64,
    /// Name of its elements' type.
    pub(crate) element: String,
    pub(crate) shape: Vec<i64>,
    /// Steps in elements; `None` without gaps.
    pub(crate) strides: Option<Vec<i64>>,
    /// Kind and number, as in dlpack.h.
    pub(crate) device: (i32, i32),
    pub(crate) is_read_only: bool,
}

/// Reads a capsule, and does not consume it. Fails with `ValueError` for one that is not DLPack's.
pub(crate) fn read(capsule: &Bound<'_, PyCapsule>) -> PyResult<Given> {
    let (tensor, is_read_only) = if capsule.is_valid_checked(Some(VERSIONED)) {
        let at = capsule
            .pointer_checked(Some(VERSIONED))?
            .cast::<Versioned>();
        // SAFETY: a capsule of this name has the structure, whose first words are the same in every version.
        let major = unsafe { (*at.as_ptr()).major };
        if major != MAJOR {
            return Err(PyValueError::new_err(format!("DLPack version {major}")));
        }
        // SAFETY: as above, and the version has these fields. Nobody writes them while the capsule is held.
        let given = unsafe { at.as_ref() };
        (&given.tensor, given.flags & READ_ONLY != 0)
    } else {
        let at = capsule.pointer_checked(Some(NAME))?.cast::<Managed>();
        // SAFETY: a capsule of this name has the structure, which nobody writes while it is held.
        (unsafe { &at.as_ref().tensor }, false)
    };
    let numbers = |at: *const i64| {
        // SAFETY: there is a number for each dimension (dlpack.h).
        let at = |index: i32| unsafe { at.add(index as usize).read() };
        (0..tensor.ndim).map(at).collect()
    };
    let element = match (tensor.code, tensor.bits, tensor.lanes) {
        (0, 32, 1) => "int32",
        (0, 64, 1) => "int64",
        (1, 8, 1) => "uint8",
        (1, 16, 1) => "uint16",
        (1, 32, 1) => "uint32",
        (2, 16, 1) => "float16",
        (2, 32, 1) => "float32",
        (4, 16, 1) => "bfloat16",
        (10, 8, 1) => "float8_e4m3fn",
        (14, 8, 1) => "float8_e8m0fnu",
        (code, bits, _) => &format!("DLPack type ({code}, {bits})"),
    };
    Ok(Given {
        address: tensor.data.addr() as u64 + tensor.byte_offset,
        element: element.into(),
        shape: numbers(tensor.shape),
        strides: (!tensor.strides.is_null()).then(|| numbers(tensor.strides)),
        device: (tensor.device_type, tensor.device),
        is_read_only,
    })
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
/// and bits of dlpack.h; strides count elements, and without any there are no gaps.
#[pyfunction]
pub(crate) fn dlpack<'py>(
    py: Python<'py>,
    address: u64,
    device: (i32, i32),
    element: (u8, u8),
    shape: Vec<i64>,
    strides: Option<Vec<i64>>,
    owner: Py<PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    let ndim = shape.len();
    let strides = strides.unwrap_or_else(|| {
        let sizes: Vec<_> = shape.iter().map(|&size| size as usize).collect();
        dense(&sizes)
            .into_iter()
            .map(|stride| stride as i64)
            .collect()
    });
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
