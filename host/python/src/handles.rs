//! Copies of handles: the handle itself, as what is behind it is one.

use pyo3::prelude::*;

use crate::bootstrap::Bootstrap;
use crate::fault::Fault;
use crate::group::Group;
use crate::plan::Plan;
use crate::prepared::{PreparedCombine, PreparedDispatch};
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
