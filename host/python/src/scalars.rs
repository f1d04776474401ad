//! Numbers, flags, texts and handles among the arguments of public calls. Their errors name the argument.

use std::path::PathBuf;

use pyo3::PyClass;
use pyo3::prelude::*;
use pyo3::pyclass::boolean_struct::True;
use pyo3::types::{PyBool, PyInt, PyString};

use crate::errors;

/// An argument.
pub(crate) trait Scalar: Sized {
    fn read(name: &str, given: &Bound<'_, PyAny>) -> PyResult<Self>;
}

/// Defines a reader of each argument, for `from_py_with`.
macro_rules! arguments {
    ($($name:ident)*) => {$(
        pub(crate) fn $name<T: Scalar>(given: &Bound<'_, PyAny>) -> PyResult<T> {
            T::read(stringify!($name), given)
        }
    )*};
}

arguments!(
    address bytes capacity check_links combined data_type deadline device devices expert_rows gpu_ranks
    id_type key library lost max_sms path patience rank ranks received_weights seed shape share_gpus
    stall_one_in stream strides timeout tokens topk_ids topk_weights warps weights words x
);

/// The error of an argument that is not what it should be.
fn refuse(name: &str, given: &Bound<'_, PyAny>, wanted: &str) -> PyErr {
    let text = format!("{name} is {}, but it is {wanted}", shown(given));
    errors::raise("ArgumentError", text)
}

/// Text of a wrong argument, as `ferry_ep.core.scalars` shows it.
pub(crate) fn shown(given: &Bound<'_, PyAny>) -> String {
    let scalars = given.py().import("ferry_ep.core.scalars");
    let text = scalars.and_then(|scalars| scalars.call_method1("shown", (given,))?.extract());
    text.unwrap_or_else(|_| String::from("of another type"))
}

/// Reads a whole number of at most `most`. True and False are none.
fn whole(name: &str, given: &Bound<'_, PyAny>, most: u64) -> PyResult<u64> {
    let read = match given.is_exact_instance_of::<PyInt>() {
        true => given.extract::<u64>().ok(),
        // NumPy's, and what else is one.
        false => {
            let scalars = given.py().import("ferry_ep.core.scalars")?;
            let read = scalars.call_method1("whole", (name, given))?;
            read.extract::<u64>().ok()
        }
    };
    read.filter(|read| *read <= most)
        .ok_or_else(|| refuse(name, given, &format!("a whole number of 0 to {most}")))
}

impl Scalar for u64 {
    fn read(name: &str, given: &Bound<'_, PyAny>) -> PyResult<Self> {
        whole(name, given, Self::MAX)
    }
}

impl Scalar for u32 {
    fn read(name: &str, given: &Bound<'_, PyAny>) -> PyResult<Self> {
        whole(name, given, Self::MAX.into()).map(|read| read as Self)
    }
}

impl Scalar for usize {
    fn read(name: &str, given: &Bound<'_, PyAny>) -> PyResult<Self> {
        whole(name, given, Self::MAX as u64).map(|read| read as Self)
    }
}

impl Scalar for f64 {
    fn read(name: &str, given: &Bound<'_, PyAny>) -> PyResult<Self> {
        let scalars = given.py().import("ferry_ep.core.scalars")?;
        scalars.call_method1("number", (name, given))?.extract()
    }
}

impl Scalar for bool {
    fn read(name: &str, given: &Bound<'_, PyAny>) -> PyResult<Self> {
        if let Ok(given) = given.cast_exact::<PyBool>() {
            return Ok(given.is_true());
        }
        let scalars = given.py().import("ferry_ep.core.scalars")?;
        scalars.call_method1("flag", (name, given))?.extract()
    }
}

impl Scalar for String {
    fn read(name: &str, given: &Bound<'_, PyAny>) -> PyResult<Self> {
        let text = given.cast::<PyString>().map(|text| text.extract());
        text.map_err(|_| refuse(name, given, "a text"))?
            .map_err(|_| refuse(name, given, "a text of Unicode"))
    }
}

impl Scalar for PathBuf {
    fn read(name: &str, given: &Bound<'_, PyAny>) -> PyResult<Self> {
        let path = given.extract();
        path.map_err(|_| refuse(name, given, "a path"))
    }
}

/// Key of a job, or bytes.
impl Scalar for Vec<u8> {
    fn read(name: &str, given: &Bound<'_, PyAny>) -> PyResult<Self> {
        if given.is_instance_of::<PyString>() {
            return String::read(name, given).map(String::into_bytes);
        }
        given
            .extract()
            .map_err(|_| refuse(name, given, "bytes or a text"))
    }
}

/// A list of numbers.
fn list<T: Scalar>(name: &str, given: &Bound<'_, PyAny>) -> PyResult<Vec<T>> {
    let items = match given.is_instance_of::<PyString>() {
        true => None,
        false => given.try_iter().ok(),
    };
    let items = items.ok_or_else(|| refuse(name, given, "a list of whole numbers"))?;
    let read = items.map(|item| T::read(name, &item?));
    read.collect()
}

impl Scalar for Vec<u64> {
    fn read(name: &str, given: &Bound<'_, PyAny>) -> PyResult<Self> {
        list(name, given)
    }
}

impl Scalar for Vec<usize> {
    fn read(name: &str, given: &Bound<'_, PyAny>) -> PyResult<Self> {
        list(name, given)
    }
}

/// A rank and a number of steps.
impl Scalar for (u32, u64) {
    fn read(name: &str, given: &Bound<'_, PyAny>) -> PyResult<Self> {
        let wanted = "a pair, (rank, steps)";
        match &list::<u64>(name, given)?[..] {
            [rank, steps] => {
                let rank = u32::try_from(*rank).map_err(|_| refuse(name, given, wanted))?;
                Ok((rank, *steps))
            }
            _ => Err(refuse(name, given, wanted)),
        }
    }
}

impl<T: Scalar> Scalar for Option<T> {
    fn read(name: &str, given: &Bound<'_, PyAny>) -> PyResult<Self> {
        (!given.is_none()).then(|| T::read(name, given)).transpose()
    }
}

/// Returns a handle of a class of this module, the argument `name`.
pub(crate) fn handle<'a, 'py, T: PyClass<Frozen = True>>(
    name: &str,
    given: &'a Bound<'py, PyAny>,
) -> PyResult<&'a Bound<'py, T>> {
    let class = given.py().get_type::<T>();
    let wanted = class.name().map(|name| format!("a ferry_ep.{name}"));
    let cast = given.cast::<T>();
    cast.map_err(|_| refuse(name, given, &wanted.unwrap_or_default()))
}
