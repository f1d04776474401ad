//! Arrays of other libraries as tensors: torch, NumPy, DLPack, `__cuda_array_interface__`, addresses.
//!
//! No library is imported unless an array of it is given.

use ferry::DataType;
use pyo3::exceptions::{PyException, PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyCapsule, PyType};

use crate::dlpack;
use crate::errors;
use crate::interface::{Interface, listed};
use crate::storages;
use crate::tensor::{self, Tensor, dense};

/// Place of an address of the rank's own device.
const ON_RANK: &str = "rank";
/// Libraries whose arrays never change, which not every version of theirs says.
const READ_ONLY: [&str; 3] = ["jax", "jaxlib", "tensorflow"];

/// An argument, whose elements are to be `wanted`.
struct Argument<'a, 'py> {
    name: &'a str,
    value: &'a Bound<'py, PyAny>,
    wanted: DataType,
    /// Whether a call writes it.
    is_written: bool,
}

/// An array as its library describes it.
struct Found {
    address: u64,
    data_type: DataType,
    dims: Vec<usize>,
    /// Steps in elements.
    strides: Vec<usize>,
    /// `cpu`, `cuda:1`, or [`ON_RANK`].
    place: String,
    owner: Py<PyAny>,
}

/// The type of elements with this name in another library.
fn type_named(name: &str) -> Option<DataType> {
    Some(match name {
        "bfloat16" => DataType::Bf16,
        "float16" => DataType::F16,
        "float32" => DataType::F32,
        "int32" => DataType::I32,
        "int64" => DataType::I64,
        "uint32" => DataType::U32,
        "uint16" => DataType::U16,
        "uint8" => DataType::U8,
        "float8_e4m3fn" => DataType::E4m3,
        "float8_e8m0fnu" => DataType::E8m0,
        "float4_e2m1fn_x2" => DataType::E2m1,
        _ => return None,
    })
}

/// Returns the name here of a type of elements, given by that name, or by one of another library.
#[pyfunction]
pub(crate) fn element_named(name: &str) -> Option<&'static str> {
    let found = type_named(name).or_else(|| tensor::data_type(name).ok());
    found.map(|data_type| data_type.name())
}

/// Returns the argument `name`, whose elements are to be `wanted`, and where it is: `"cpu"`, `"cuda:1"`, or
/// `"rank"` for an address of the rank's own device.
///
/// Raises `TensorError` for an object that is no array, for elements without a name here, for an array that
/// has less memory than its shape says, and with `written` for one that is read-only; shapes and all else is
/// checked by the call.
#[pyfunction]
#[pyo3(signature = (name, value, wanted, *, written=false))]
pub(crate) fn describe(
    name: &str,
    value: &Bound<'_, PyAny>,
    wanted: &str,
    written: bool,
) -> PyResult<(Py<Tensor>, String)> {
    let argument = Argument {
        name,
        value,
        wanted: tensor::data_type(wanted)?,
        is_written: written,
    };
    // Memory of this package, as most arguments of a hot path are.
    if let Some(tensor) = argument.of_ferry()? {
        let found = Found::of_tensor(&tensor).taken_for(argument.wanted);
        argument.check(&found)?;
        let is_same = found.data_type == tensor.get().data_type;
        let tensor = if is_same {
            tensor.unbind()
        } else {
            found.tensor(value.py())?
        };
        return Ok((tensor, ON_RANK.into()));
    }
    let found = argument.found()?.taken_for(argument.wanted);
    argument.check(&found)?;
    let place = found.place.clone();
    Ok((found.tensor(value.py())?, place))
}

impl<'py> Argument<'_, 'py> {
    fn refuse(&self, wanted: &str, given: &str) -> PyErr {
        errors::tensor(self.name, wanted, given)
    }

    /// The error of a value whose library fails; an exception that is no error stays what it is.
    fn refused(&self, error: &PyErr, wanted: &str, given: impl FnOnce(String) -> String) -> PyErr {
        let py = self.value.py();
        match self.class() {
            Ok(class) if error.is_instance_of::<PyException>(py) => {
                self.refuse(wanted, &given(class))
            }
            _ => error.clone_ref(py),
        }
    }

    /// Name of the value's class.
    fn class(&self) -> PyResult<String> {
        Ok(self.value.get_type().name()?.to_string())
    }

    /// Checks the address and the elements.
    fn check(&self, found: &Found) -> PyResult<()> {
        if found.address == 0 && !found.dims.contains(&0) {
            return Err(self.refuse("memory", "none: its address is 0"));
        }
        let given = found.data_type;
        if self.wanted == DataType::I32 && given == DataType::U32 {
            let other = if self.name == "topk_ids" {
                " or i64"
            } else {
                ""
            };
            return Err(self.refuse(&format!("elements of i32{other}"), given.name()));
        }
        let is_bf16 = [DataType::Bf16, DataType::U16].contains(&given);
        if self.wanted == DataType::Bf16 && !is_bf16 && !self.is_written {
            return Err(self.refuse(&self.elements()?, given.name()));
        }
        Ok(())
    }

    /// The tensor that the value is, or stands for.
    fn of_ferry(&self) -> PyResult<Option<Bound<'py, Tensor>>> {
        if let Ok(tensor) = self.value.cast::<Tensor>() {
            return Ok(Some(tensor.clone()));
        }
        if self.value.is_instance_of::<PyType>() {
            return Ok(None);
        }
        let method = intern!(self.value.py(), "__ferry_tensor__");
        let Some(read) = self.value.getattr_opt(method)? else {
            return Ok(None);
        };
        let (tensor, is_writable): (_, bool) = read.call0()?.extract()?;
        if self.is_written && !is_writable {
            return Err(self.read_only()?);
        }
        Ok(Some(tensor))
    }

    fn read_only(&self) -> PyResult<PyErr> {
        let given = format!("a read-only {}", self.class()?);
        Ok(self.refuse("memory that can be written", &given))
    }

    fn is_of(&self, module: &str, class: &str) -> PyResult<bool> {
        storages::is_of(self.value, module, class)
    }

    /// Describes an array in the words of its library.
    fn found(&self) -> PyResult<Found> {
        let value = self.value;
        if self.is_of("torch", "Tensor")? {
            let found = self.of_torch()?;
            if !self.is_written {
                storages::require_no_gradient(self.name, value)?;
            }
            return Ok(found);
        }
        let is_numpy = self.is_of("numpy", "ndarray")?;
        if self.is_written && !self.is_writable(is_numpy)? {
            return Err(self.read_only()?);
        }
        if is_numpy {
            return self.of_numpy();
        }
        if value.hasattr("__cuda_array_interface__")? {
            return self.of_cuda_interface();
        }
        if value.hasattr("__dlpack__")? {
            return self.of_dlpack();
        }
        let wanted = format!("a tensor of {}", self.wanted.name());
        Err(self.refuse(&wanted, &self.class()?))
    }

    /// Whether calls may write an array of any library but torch; DLPack alone says so later.
    fn is_writable(&self, is_numpy: bool) -> PyResult<bool> {
        let value = self.value;
        if is_numpy {
            let flags = value.getattr("flags")?;
            return flags.getattr("writeable")?.is_truthy();
        }
        if value.hasattr("__cuda_array_interface__")? {
            return Ok(!self.interface()?.is_read_only);
        }
        let module = value.get_type().module()?.to_string();
        let library = module.split('.').next().unwrap_or_default();
        Ok(!READ_ONLY.contains(&library))
    }

    /// Names the elements that are wanted, for a library that may not have them.
    fn elements(&self) -> PyResult<String> {
        if self.wanted == DataType::Bf16 && !self.is_of("torch", "Tensor")? {
            let bits = "its bits as uint16, which ferry_ep.to_bf16 makes of numbers";
            return Ok(format!("elements of bf16: torch.bfloat16, or {bits}"));
        }
        Ok(format!("elements of {}", self.wanted.name()))
    }

    /// The type of elements with this name in another library.
    fn data_type(&self, given: &str) -> PyResult<DataType> {
        match type_named(given) {
            Some(data_type) => Ok(data_type),
            None => Err(self.refuse(&self.elements()?, given)),
        }
    }

    fn of_torch(&self) -> PyResult<Found> {
        let value = self.value;
        let given = value.getattr("dtype")?.str()?.to_string();
        let mut data_type = self.data_type(given.trim_start_matches("torch."))?;
        if data_type == DataType::E2m1 {
            // torch counts pairs.
            data_type = DataType::U8;
        }
        storages::require_memory(self.name, value)?;
        let device = value.getattr("device")?;
        let place = match device.getattr("type")?.extract::<&str>()? {
            "cpu" => "cpu".into(),
            _ => {
                let index: Option<u32> = device.getattr("index")?.extract()?;
                format!("cuda:{}", index.unwrap_or(0))
            }
        };
        let found = Found {
            address: value.call_method0("data_ptr")?.extract()?,
            data_type,
            dims: value.getattr("shape")?.extract()?,
            strides: value.call_method0("stride")?.extract()?,
            place,
            owner: value.clone().unbind(),
        };
        let is_pairs = given.ends_with("_x2");
        Ok(if is_pairs {
            found.taken_for(DataType::E2m1)
        } else {
            found
        })
    }

    fn of_numpy(&self) -> PyResult<Found> {
        let value = self.value;
        if self.is_of("numpy.ma", "MaskedArray")? {
            let module = value.py().import("numpy.ma")?;
            if module.call_method1("is_masked", (value,))?.is_truthy()? {
                return Err(self.refuse("plain values: call filled()", "a masked array"));
            }
        }
        let kind = value.getattr("dtype")?.getattr("name")?;
        let interface = value.getattr("__array_interface__")?;
        let found = self.of_interface(
            &Interface::read(&interface)?,
            &kind.to_string(),
            "cpu".into(),
        )?;
        storages::require_numpy_memory(self.name, value)?;
        Ok(found)
    }

    /// Reads the interface of an array on a GPU. Fails for one that is incomplete.
    fn interface(&self) -> PyResult<Interface> {
        let interface = self.value.getattr("__cuda_array_interface__")?;
        let read = Interface::read(&interface).and_then(|read| match read.itemsize {
            Some(_) => Ok(read),
            None => Err(PyValueError::new_err(format!("typestr {:?}", read.typestr))),
        });
        read.map_err(|error| {
            let text = |class| format!("a {class} with an incomplete one: {error}");
            self.refused(&error, "a whole __cuda_array_interface__", text)
        })
    }

    fn of_cuda_interface(&self) -> PyResult<Found> {
        let (value, interface) = (self.value, self.interface()?);
        let name = |of: &str, attribute: &str| -> PyResult<Option<Bound<'_, PyAny>>> {
            match value.getattr_opt(of)? {
                Some(of) => of.getattr_opt(attribute),
                None => Ok(None),
            }
        };
        let kind = match name("dtype", "name")? {
            Some(name) => name.str()?.to_string(),
            None => interface.kind(),
        };
        let device = match name("device", "id")? {
            Some(number) => number.str()?.to_string(),
            None => "0".into(),
        };
        self.of_interface(&interface, &kind, format!("cuda:{device}"))
    }

    fn of_interface(&self, interface: &Interface, kind: &str, place: String) -> PyResult<Found> {
        let typestr = &interface.typestr;
        let native = if cfg!(target_endian = "little") {
            '<'
        } else {
            '>'
        };
        if !typestr.starts_with([native, '|', '=']) {
            let given = format!("type {typestr}");
            return Err(self.refuse("native byte order: convert with astype", &given));
        }
        let data_type = self.data_type(kind)?;
        let itemsize = self.value.getattr_opt("itemsize")?;
        let itemsize = itemsize.map(|size| size.extract::<i64>()).transpose()?;
        let itemsize = itemsize.filter(|size| *size > 0).or(interface.itemsize);
        let itemsize = itemsize.unwrap_or(1).max(1);
        let strides = match &interface.strides {
            None => dense(&interface.shape),
            Some(strides) if strides.iter().any(|each| *each < 0 || each % itemsize != 0) => {
                let given = format!("strides of {} bytes", listed(strides));
                let wanted = "strides that are multiples of an element: make it contiguous";
                return Err(self.refuse(wanted, &given));
            }
            Some(strides) => strides
                .iter()
                .map(|each| (each / itemsize) as usize)
                .collect(),
        };
        Ok(Found {
            address: interface.address,
            data_type,
            dims: interface.shape.clone(),
            strides,
            place,
            owner: self.value.clone().unbind(),
        })
    }

    fn of_dlpack(&self) -> PyResult<Found> {
        let py = self.value.py();
        let wanted = format!("a tensor of {}", self.wanted.name());
        let failed = |error: PyErr| {
            let text = |class| format!("a {class} whose __dlpack__ fails: {}", error.value(py));
            self.refused(&error, &wanted, text)
        };
        let capsule = self.exported().map_err(failed)?;
        let given = dlpack::read(&capsule).map_err(failed)?;
        if self.is_written && given.is_read_only {
            return Err(self.read_only()?);
        }
        let data_type = self.data_type(&given.element)?;
        // kDLCPU, kDLCUDA, kDLCUDAHost, kDLCUDAManaged.
        let place = match given.device {
            (1 | 3, _) => "cpu".into(),
            (2 | 13, number) => format!("cuda:{number}"),
            (kind, _) => {
                let given = format!("DLPack device {kind}");
                return Err(self.refuse("memory of the CPU or of a GPU", &given));
            }
        };
        let dims = given
            .shape
            .iter()
            .map(|size| *size as usize)
            .collect::<Vec<_>>();
        let strides = given.strides.unwrap_or_else(|| {
            let strides = dense(&dims);
            strides.into_iter().map(|stride| stride as i64).collect()
        });
        if strides.iter().any(|stride| *stride < 0) || given.shape.iter().any(|size| *size < 0) {
            let given = format!("strides {strides:?}");
            return Err(self.refuse("strides of at least 0: make it contiguous", &given));
        }
        Ok(Found {
            address: given.address,
            data_type,
            dims,
            strides: strides.into_iter().map(|stride| stride as usize).collect(),
            place,
            // Keeps the memory alive: it is not consumed.
            owner: capsule.into_any().unbind(),
        })
    }

    /// Exports the value by `__dlpack__`.
    fn exported(&self) -> PyResult<Bound<'_, PyCapsule>> {
        let (value, py) = (self.value, self.value.py());
        // Read-only arrays are exported with a version alone.
        let version = [("max_version", (dlpack::MAJOR, 0))].into_py_dict(py)?;
        let method = "__dlpack__";
        let capsule = match value.call_method(method, (), Some(&version)) {
            Err(error) if error.is_instance_of::<PyTypeError>(py) => value.call_method0(method)?,
            capsule => capsule?,
        };
        Ok(capsule.cast_into()?)
    }
}

impl Found {
    fn of_tensor(tensor: &Bound<'_, Tensor>) -> Self {
        let of = tensor.get();
        let owner = of.owner.as_ref().map(|owner| owner.clone_ref(tensor.py()));
        Self {
            address: of.address,
            data_type: of.data_type,
            dims: of.dims.clone(),
            strides: of.strides.clone(),
            place: ON_RANK.into(),
            owner: owner.unwrap_or_else(|| tensor.clone().into_any().unbind()),
        }
    }

    fn tensor(self, py: Python<'_>) -> PyResult<Py<Tensor>> {
        let (address, data_type) = (self.address, self.data_type);
        let tensor = Tensor::found(address, data_type, self.dims, self.strides, self.owner);
        Py::new(py, tensor)
    }

    /// Takes bits of the same size for `wanted`, as libraries have no better name for them.
    fn taken_for(mut self, wanted: DataType) -> Self {
        match (wanted, self.data_type) {
            (DataType::U32, DataType::I32) => self.data_type = DataType::U32,
            (DataType::E2m1, DataType::U8) => {
                let Some(size) = self.dims.last_mut() else {
                    return self;
                };
                if self.strides.len() < 2 || self.strides.last() == Some(&1) {
                    self.data_type = DataType::E2m1;
                    *size = size.saturating_mul(2);
                    for stride in &mut self.strides {
                        *stride = stride.saturating_mul(2);
                    }
                    if let Some(last) = self.strides.last_mut() {
                        *last = 1;
                    }
                }
            }
            _ => {}
        }
        self
    }
}
