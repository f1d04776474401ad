//! Tensors of another library, read without a Python call: the exchange API of DLPack.

use std::ffi::{CStr, c_int, c_void};

use ferry::{AnyTensor, DataType, DevicePtr, Stream};
use pyo3::ffi::PyObject;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyCapsule, PyTuple, PyType};

use crate::dlpack::{DlTensor, MAJOR};
use crate::errors;
use crate::storages;
use crate::tensor::{Wanted, dense, extent};

/// Name of the attribute of a class, and of the capsule in it (dlpack.h, `DLPackExchangeAPI`).
const ATTRIBUTE: &str = "__dlpack_c_exchange_api__";
const NAME: &CStr = c"dlpack_exchange_api";
/// Most dimensions that an argument has.
const MOST_DIMENSIONS: usize = 5;
/// kDLCUDA of dlpack.h.
const CUDA: c_int = 2;

/// `DLPackExchangeAPI` of dlpack.h.
#[repr(C)]
struct Functions {
    major: u32,
    minor: u32,
    older: *const c_void,
    allocate: *const c_void,
    to_managed: *const c_void,
    from_managed: *const c_void,
    read: Option<Read>,
    current_stream: Option<CurrentStream>,
}

/// `DLPackDLTensorFromPyObjectNoSync`.
type Read = unsafe extern "C" fn(*mut PyObject, *mut DlTensor) -> c_int;
/// `DLPackCurrentWorkStream`.
type CurrentStream = unsafe extern "C" fn(c_int, i32, *mut *mut c_void) -> c_int;

/// Reads the tensors of a class, and the current stream of its library.
#[pyclass(frozen, module = "ferry_ep.core._ferry")]
pub(crate) struct Reader {
    class: Py<PyType>,
    read: Read,
    current_stream: CurrentStream,
}

#[pymethods]
impl Reader {
    /// Returns the reader of a class of tensors, if it has DLPack's exchange API.
    #[staticmethod]
    fn of(class_: Bound<'_, PyType>) -> Option<Self> {
        let capsule = class_
            .getattr(ATTRIBUTE)
            .ok()?
            .cast_into::<PyCapsule>()
            .ok()?;
        let at = capsule
            .pointer_checked(Some(NAME))
            .ok()?
            .cast::<Functions>();
        // SAFETY: a capsule of this name has the structure, which lives as long as the process: documented
        // in dlpack.h. Its first words are the same in every version.
        let major = unsafe { (*at.as_ptr()).major };
        if major != MAJOR {
            return None;
        }
        // SAFETY: as above, and the version has these fields.
        let functions = unsafe { at.as_ref() };
        Some(Self {
            class: class_.unbind(),
            read: functions.read?,
            current_stream: functions.current_stream?,
        })
    }

    /// Whether calls can read all of `values`, or `None` for these, as they are: objects of exactly this
    /// class in a GPU's memory, whose elements have the values that memory has. With `records` those that
    /// require a gradient are none. `present`: which of the values, and no others, are to be there.
    #[pyo3(signature = (values, records, present=None, /))]
    fn takes(
        &self,
        values: &Bound<'_, PyTuple>,
        records: bool,
        present: Option<&Bound<'_, PyTuple>>,
    ) -> PyResult<bool> {
        if let Some(present) = present {
            let mut pairs = values.iter_borrowed().zip(present.iter_borrowed());
            if !pairs.all(|(value, present)| {
                present
                    .is_truthy()
                    .is_ok_and(|present| present != value.is_none())
            }) {
                return Ok(false);
            }
        }
        for value in values.iter_borrowed().filter(|value| !value.is_none()) {
            let read = self.plain(&value, records)?;
            if read.is_none_or(|read| read.device_type != CUDA) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Type, device, shape and strides of each value, or that it is `None`: equal bytes for values that
    /// checks of these cannot tell apart. Nothing if calls could not read one even in a GPU's memory.
    /// `records` as in `takes`.
    #[pyo3(signature = (values, records, /))]
    fn signature<'py>(
        &self,
        values: &Bound<'py, PyTuple>,
        records: bool,
    ) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let mut words = Vec::with_capacity(8 * values.len());
        for value in values.iter_borrowed() {
            if value.is_none() {
                words.push(u64::MAX);
                continue;
            }
            let Some(read) = self.plain(&value, records)? else {
                return Ok(None);
            };
            let Some(sizes) = Sizes::of(&read) else {
                return Ok(None);
            };
            // The number of dimensions, too, so that no two lists have the same words.
            let kind = [
                read.device_type.to_ne_bytes(),
                read.device.to_ne_bytes(),
                [read.code, read.bits, sizes.rank as u8, 0],
                u32::from(read.lanes).to_ne_bytes(),
            ];
            words.extend(bytemuck::cast::<_, [u64; 2]>(kind));
            let sizes = sizes.dims[..sizes.rank]
                .iter()
                .chain(&sizes.strides[..sizes.rank]);
            words.extend(sizes.map(|&size| size as u64));
        }
        let bytes = bytemuck::cast_slice(&words);
        Ok(Some(PyBytes::new(values.py(), bytes)))
    }
}

impl Reader {
    /// Reads a value that calls can read as it is, on any device. `records` as in `takes`.
    fn plain(&self, value: &Bound<'_, PyAny>, records: bool) -> PyResult<Option<DlTensor>> {
        if value.get_type_ptr() != self.class.as_ptr().cast() {
            return Ok(None);
        }
        // Before it is read, as modes of torch run Python here.
        let py = value.py();
        let is_recorded = records && value.getattr(intern!(py, "requires_grad"))?.is_truthy()?;
        if is_recorded || value.call_method0(intern!(py, "is_neg"))?.is_truthy()? {
            return Ok(None);
        }
        // Whoever describes u32 has an error for it.
        let read = self.described(value);
        Ok(read.filter(|read| data_type(read) != Some(DataType::U32)))
    }

    /// Reads a tensor of the class; nothing if it has no plain memory.
    fn described(&self, value: &Bound<'_, PyAny>) -> Option<DlTensor> {
        let mut read = DlTensor::EMPTY;
        // SAFETY: the function is that of the value's class, with this signature, and `read` is live.
        if unsafe { (self.read)(value.as_ptr(), &raw mut read) } == 0 {
            return Some(read);
        }
        drop(PyErr::take(value.py()));
        None
    }

    /// The library's current stream on a CUDA device.
    pub(crate) fn stream(&self, py: Python<'_>, device: i32) -> PyResult<Stream> {
        let mut stream = std::ptr::null_mut();
        // SAFETY: the function is the library's, with this signature, and `stream` is a live pointer.
        if unsafe { (self.current_stream)(CUDA, device, &raw mut stream) } != 0 {
            return Err(PyErr::fetch(py));
        }
        // SAFETY: the library's current stream is live, and stays so while work is enqueued.
        Ok(unsafe { Stream::new(stream.addr() as u64) })
    }

    /// Reads an argument on a CUDA device.
    pub(crate) fn read(
        &self,
        argument: Wanted,
        value: &Bound<'_, PyAny>,
        device: i32,
    ) -> PyResult<AnyTensor> {
        let (name, wanted) = argument;
        if !is_really(value, self.class.bind(value.py())) {
            let given = value.get_type().name()?.to_string();
            return Err(errors::tensor(
                name,
                &format!("a tensor of {wanted}"),
                &given,
            ));
        }
        let mut read = DlTensor::EMPTY;
        // SAFETY: the function is that of the value's class, with this signature, and `read` is live.
        if unsafe { (self.read)(value.as_ptr(), &raw mut read) } != 0 {
            // Tensors of transforms, and such, have no memory.
            let given = PyErr::fetch(value.py()).to_string();
            return Err(errors::tensor(name, "a tensor with memory", &given));
        }
        // Before more Python runs, as the sizes are read now.
        let sizes = Sizes::of(&read);
        if let Some(sizes) = &sizes {
            require_storage(name, value, &read, sizes)?;
        }
        if (read.device_type, read.device) != (CUDA, device) {
            let given = format!("memory of {}", value.getattr("device")?);
            return Err(errors::tensor(
                name,
                &format!("memory of cuda:{device}"),
                &given,
            ));
        }
        let Some(data_type) = data_type(&read) else {
            let given = value.getattr("dtype")?.to_string();
            let given = given.rsplit('.').next().unwrap_or_default();
            return Err(errors::tensor(
                name,
                &format!("elements of {wanted}"),
                given,
            ));
        };
        let Some(sizes) = sizes else {
            let wanted = format!("at most {MOST_DIMENSIONS} dimensions");
            return Err(errors::tensor(name, &wanted, &read.ndim.to_string()));
        };
        let address = read.data.addr() as u64 + read.byte_offset;
        Ok(sizes.tensor(address, data_type, wanted))
    }
}

/// Checks that a tensor's storage has all its elements: it may have been freed or shrunk since.
fn require_storage(
    name: &str,
    value: &Bound<'_, PyAny>,
    read: &DlTensor,
    sizes: &Sizes,
) -> PyResult<()> {
    let py = value.py();
    let element = u64::from(read.bits) * u64::from(read.lanes) / 8;
    let (dims, strides) = (&sizes.dims[..sizes.rank], &sizes.strides[..sizes.rank]);
    let Some(last) = storages::last(dims, strides) else {
        return Ok(());
    };
    let storage = value.call_method0(intern!(py, "untyped_storage"))?;
    let there: u64 = storage.call_method0(intern!(py, "nbytes"))?.extract()?;
    let offset: u64 = value
        .call_method0(intern!(py, "storage_offset"))?
        .extract()?;
    let there = if read.data.is_null() { 0 } else { there };
    storages::require_bytes(name, dims, last.saturating_add(offset), element, there)
}

/// Whether `value` has the structure of `class`. Unlike `isinstance` this asks no Python, such as the value's
/// `__class__`.
fn is_really(value: &Bound<'_, PyAny>, class: &Bound<'_, PyType>) -> bool {
    let (given, class) = (value.get_type_ptr(), class.as_type_ptr());
    // SAFETY: both are live types, and the interpreter's lock is held.
    unsafe { pyo3::ffi::PyType_IsSubtype(given, class) != 0 }
}

/// Shape and strides in elements, of which the first `rank` count.
struct Sizes {
    dims: [usize; MOST_DIMENSIONS],
    strides: [usize; MOST_DIMENSIONS],
    rank: usize,
}

impl Sizes {
    const EMPTY: Self = Self {
        dims: [0; MOST_DIMENSIONS],
        strides: [0; MOST_DIMENSIONS],
        rank: 0,
    };

    /// Shape and strides of a tensor that was just read; nothing if it has too many dimensions.
    fn of(read: &DlTensor) -> Option<Self> {
        let rank = read.ndim as usize;
        if rank > MOST_DIMENSIONS {
            return None;
        }
        let numbers = |at: *const i64| {
            // SAFETY: there is a number for each dimension (dlpack.h), which the tensor keeps as long as no
            // Python runs.
            let at = |index: usize| unsafe { at.add(index).read() as usize };
            std::array::from_fn(|index| if index < rank { at(index) } else { 0 })
        };
        let mut sizes = Self {
            dims: numbers(read.shape),
            rank,
            ..Self::EMPTY
        };
        // Without strides the tensor has no gaps (dlpack.h).
        if read.strides.is_null() {
            sizes.strides[..rank].copy_from_slice(&dense(&sizes.dims[..rank]));
        } else {
            sizes.strides = numbers(read.strides);
        }
        Some(sizes)
    }

    /// The tensor for a call. Bits of the same size are taken for elements that libraries have no name for.
    fn tensor(mut self, address: u64, given: DataType, wanted: DataType) -> AnyTensor {
        let rank = self.rank;
        let data_type = match (wanted, given) {
            (DataType::U32, DataType::I32) => DataType::U32,
            // Pairs of elements.
            (DataType::E2m1, DataType::U8) if rank > 0 && self.strides[rank - 1] == 1 => {
                self.dims[rank - 1] = self.dims[rank - 1].saturating_mul(2);
                for stride in &mut self.strides[..rank - 1] {
                    *stride = stride.saturating_mul(2);
                }
                DataType::E2m1
            }
            (_, given) => given,
        };
        let (dims, strides) = (&self.dims[..rank], &self.strides[..rank]);
        // SAFETY: the library's tensor has memory for these elements on its device, and keeps it until the
        // stream has passed the kernel; who gives memory for ids, until the round has ended.
        let at = unsafe { DevicePtr::new(address, extent(dims, strides, data_type)) };
        AnyTensor::new(at, data_type, dims, Some(strides)).expect("at most 5 dimensions")
    }
}

/// Type of a tensor's elements; plain bytes for pairs of 4-bit elements.
const fn data_type(read: &DlTensor) -> Option<DataType> {
    Some(match (read.code, read.bits, read.lanes) {
        (0, 32, 1) => DataType::I32,
        (0, 64, 1) => DataType::I64,
        (1, 8, 1) | (17, 4, 2) => DataType::U8,
        (1, 16, 1) => DataType::U16,
        (1, 32, 1) => DataType::U32,
        (2, 16, 1) => DataType::F16,
        (2, 32, 1) => DataType::F32,
        (4, 16, 1) => DataType::Bf16,
        (10, 8, 1) => DataType::E4m3,
        (14, 8, 1) => DataType::E8m0,
        _ => return None,
    })
}
