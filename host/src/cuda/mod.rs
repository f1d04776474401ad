//! GPUs through the CUDA driver.
//!
//! [`LocalFabric`] drives several GPUs from one process; [`CudaDevice`] is one of them, with
//! what only CUDA has: [graphs](CudaDevice::capture), [events](CudaDevice::event) and
//! [PTX of yours](CudaDevice::load_ptx). The driver is loaded by the first call that needs one,
//! which fails where there is none.
//!
//! ```no_run
//! # fn main() -> Result<(), ferry::Error> {
//! # use ferry::*;
//! # let device = cuda::CudaDevice::open(0)?;
//! # let enqueue_a_round = || Ok::<(), Error>(());
//! let stream = device.stream()?;
//! let mut graph = device.capture(stream, enqueue_a_round)?;
//! let milliseconds = device.time_ms(stream, || graph.launch(stream))?;
//! # let _ = milliseconds;
//! # Ok(())
//! # }
//! ```

mod captures;
mod context;
mod core;
mod device;
mod error;
#[cfg(feature = "cust")]
mod foreign;
mod graph;
mod green;
mod ipc;
mod library;
mod local;
mod module;
mod modules;
#[cfg(any(feature = "cust", feature = "cudarc"))]
mod owner;
mod page;
mod sys;
mod user_ptx;

pub use context::{Current, device_count};
pub use device::CudaDevice;
pub use graph::{CudaEvent, CudaGraph};
pub(crate) use ipc::Ipc;
pub use local::LocalFabric;
pub use user_ptx::{CudaKernel, CudaModule, Grid};
