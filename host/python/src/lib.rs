//! The native module of the Python package: handles, plain tensors, checked arguments, calls and errors.
//!
//! What `ferry_ep` does not hand on is for the Python sources beside it, which document the public names.

use pyo3::prelude::*;

mod arguments;
mod arrays;
mod bootstrap;
mod calls;
mod communicator;
mod dlpack;
mod errors;
mod fault;
mod group;
mod handles;
mod interface;
mod interrupt;
mod links;
mod memory;
mod messages;
mod operators;
mod placed;
mod plan;
mod prepared;
mod process;
mod reader;
mod scalars;
mod silu;
mod storages;
mod tensor;

#[pymodule]
mod _ferry {
    use super::PyResult;
    use pyo3::prelude::*;

    #[pymodule_export]
    use super::arguments::{Call, arguments_of};
    #[pymodule_export]
    use super::arrays::{describe, element_named};
    #[pymodule_export]
    use super::bootstrap::Bootstrap;
    #[pymodule_export]
    use super::communicator::Communicator;
    #[pymodule_export]
    use super::dlpack::dlpack;
    #[pymodule_export]
    use super::fault::Fault;
    #[pymodule_export]
    use super::group::Group;
    #[pymodule_export]
    use super::links::LinkReport;
    #[pymodule_export]
    use super::placed::Places;
    #[pymodule_export]
    use super::plan::{Plan, capacity_of, decode_rows, format_sizes, layout_of};
    #[pymodule_export]
    use super::prepared::{PreparedCombine, PreparedDispatch};
    #[pymodule_export]
    use super::reader::Reader;
    #[pymodule_export]
    use super::storages::{require_numpy_memory, require_plain, require_storage};
    #[pymodule_export]
    use super::tensor::Tensor;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        crate::process::count_forks(module.py())?;
        crate::messages::begin(module.py())?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        module.add("has_cuda", cfg!(feature = "cuda"))?;
        module.add("has_nvshmem", cfg!(feature = "nvshmem"))
    }
}
