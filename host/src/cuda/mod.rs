//! GPUs through the CUDA driver.
//!
//! [`LocalFabric`] drives several GPUs from one process; [`CudaDevice`] is one of them, with
//! what only CUDA has: [graphs](CudaDevice::capture), [events](CudaDevice::event) and
//! [PTX of yours](CudaDevice::load_ptx). The crate
//! `cust` gives types, devices and primary contexts; calls that it lacks, or whose errors it
//! cannot tell, are declared here.
//!
//! ```no_run
//! # fn main() -> Result<(), ferry::Error> {
//! # use ferry::*;
//! # let device = cuda::CudaDevice::open(0)?;
//! # let enqueue_a_round = || Ok(());
//! let stream = device.stream()?;
//! let mut graph = device.capture(stream, enqueue_a_round)?;
//! let milliseconds = device.time_ms(stream, || graph.launch(stream))?;
//! # let _ = milliseconds;
//! # Ok(())
//! # }
//! ```

mod context;
mod device;
mod error;
mod graph;
mod green;
mod local;
mod module;
mod page;
mod sys;
mod user_ptx;

pub use context::{Current, device_count};
pub use device::CudaDevice;
pub use graph::{CudaEvent, CudaGraph};
pub use local::LocalFabric;
pub use user_ptx::{CudaKernel, CudaModule, Grid};
