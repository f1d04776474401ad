//! GPUs through the CUDA driver.
//!
//! [`CudaDevice`] is one of them, with [graphs](CudaDevice::capture), [events](CudaDevice::event)
//! and [PTX of yours](CudaDevice::load_ptx), which only CUDA has. The driver is loaded by the first
//! call that needs one, which fails if there is none.
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
pub(crate) mod context;
mod core;
mod device;
pub(crate) mod error;
#[cfg(feature = "cust")]
mod foreign;
mod graph;
mod green;
mod library;
mod module;
mod modules;
#[cfg(any(feature = "cust", feature = "cudarc"))]
mod owner;
mod page;
pub(crate) mod sys;
mod user_ptx;

pub use context::{Current, device_count};
pub use device::CudaDevice;
pub use graph::{CudaEvent, CudaGraph};
pub use user_ptx::{CudaKernel, CudaModule, Grid};
