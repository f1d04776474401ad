//! Copies of handles: the handle itself, as what is behind it is one. Only a fault is data, which pickles.

use ferry::device::FaultPage;
use pyo3::prelude::*;

use crate::bootstrap::Bootstrap;
use crate::errors;
use crate::fault::{Fault, WORDS};
use crate::group::Group;
use crate::plan::Plan;
use crate::prepared::{PreparedCombine, PreparedDispatch};
use crate::scalars;
use crate::tensor::Tensor;

macro_rules! copy_to_themselves {
    ($($class:ident)*) => {$(
        #[pymethods]
        impl $class {
            fn __copy__(slf: Py<Self>) -> Py<Self> {
                slf
            }

            fn __deepcopy__(slf: Py<Self>, memo: &Bound<'_, PyAny>) -> Py<Self> {
                let _ = memo;
                slf
            }
        }
    )*};
}

copy_to_themselves!(Bootstrap Fault Group Plan PreparedCombine PreparedDispatch Tensor);

#[pymethods]
impl Fault {
    /// Makes a copy of what `__reduce__` returned: the record and the number of ranks that share the GPU.
    #[new]
    #[pyo3(signature = (words, gpu_ranks, /))]
    fn new(
        #[pyo3(from_py_with = scalars::words)] words: Vec<u64>,
        #[pyo3(from_py_with = scalars::gpu_ranks)] gpu_ranks: Option<u32>,
    ) -> PyResult<Self> {
        let words: Option<[u64; WORDS]> = words.try_into().ok();
        let page = words.map(bytemuck::cast::<_, FaultPage>);
        let fault = page.and_then(|page| page.fault()).ok_or_else(|| {
            errors::raise("ArgumentError", "words are no record of a kernel's fault")
        })?;
        Ok(Self(ferry::Fault { gpu_ranks, ..fault }))
    }

    fn __reduce__(slf: &Bound<'_, Self>) -> (Py<PyAny>, ([u64; WORDS], Option<u32>)) {
        let class = slf.get_type().into_any().unbind();
        (class, (slf.get().words(), slf.get().0.gpu_ranks))
    }
}
