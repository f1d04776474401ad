//! GPUs through the CUDA driver.
//!
//! [`CudaDevice`] is one of them, with [graphs](CudaDevice::capture), [events](CudaDevice::event)
//! and [PTX of yours](CudaDevice::load_ptx), which only CUDA has. The driver is loaded by the first
//! call that needs one, which fails if there is none. A round as a graph, on two GPUs:
//!
//! ```no_run
//! use std::thread;
//!
//! use ferry::*;
//!
//! # fn main() -> Result<(), Error> {
//! let group = Group::local(&[0, 1], &GroupOptions::default())?;
//! let plan = Plan::new(&group, Config::new(256, 8, 7168, 128))?;
//! let mut threads = Vec::new();
//! for mut rank in Communicator::new(&group, &plan)? {
//!     let device = group.cuda(rank.rank()).expect("a rank of this process");
//!     threads.push(thread::spawn(move || -> Result<(), Error> {
//!         let stream = device.stream()?;
//!         let mut rows = DispatchBuffers::new(rank.device(), &plan)?;
//!         let sums = CombineBuffers::new(rank.device(), &plan)?;
//!         let input = rows.upload(&[0x3f80_u16; 7168], &[0, 1, 2, 3, 4, 5, 6, 7], None)?;
//!
//!         let mut graph = device.capture(stream, || {
//!             rank.dispatch(stream, &input, rows.output())?;
//!             // Experts work here, on the same stream. These return their input.
//!             let answers = CombineInput::new(rows.output().tokens()?);
//!             rank.combine(stream, &answers, &sums.output(1)?)
//!         })?;
//!         for _ in 0..100 {
//!             graph.launch(stream)?; // as often as on the other rank
//!         }
//!         if let Some(fault) = rank.synchronize(stream)?.fault() {
//!             eprintln!("{fault}");
//!         }
//!         drop(graph);
//!         rank.close()?;
//!         // SAFETY: the communicator is closed and its graph is gone, so no kernel uses the buffers.
//!         unsafe { rows.free().and(sums.free()) }
//!     }));
//! }
//! for thread in threads {
//!     thread.join().expect("a rank's thread panicked")?;
//! }
//! group.close()
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
