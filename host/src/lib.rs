//! Ferry carries tokens to their experts and back: expert-parallel dispatch and combine for
//! mixture-of-experts models.
//!
//! A [`Group`] is the set of ranks, a [`Plan`] a checked [`Config`], and a
//! [`Communicator`] one rank's end. [`dispatch`](Communicator::dispatch) brings every token
//! to the ranks of its experts, in expert order; [`combine`](Communicator::combine) brings the
//! experts' outputs back and sums them. The [`guide`] has a page on each subject. The same kernels run on
//! GPUs (feature `cuda`) and, as here, in a simulator:
//!
//! ```
//! use std::time::Duration;
//!
//! use ferry::*;
//!
//! # fn main() -> Result<(), Error> {
//! let group = Group::simulated(2, 7)?;
//! let plan = Plan::new(&group, Config {
//!     deadline: Duration::from_secs(1),
//!     debug_checks: true,
//!     specialise: true,
//!     ..Config::new(4, 2, 8, 3)
//! })?;
//! let mut ranks = Communicator::new(&group, &plan)?;
//! let stream = Stream::DEFAULT;
//!
//! // Every rank has one token, for experts 1 (on rank 0) and 2 (on rank 1).
//! let one = 0x3f80_u16; // 1.0 as BF16
//! let mut memory = Vec::new();
//! for rank in &ranks {
//!     let device = rank.device();
//!     let mut rows = DispatchBuffers::new(device, &plan)?;
//!     let sums = CombineBuffers::new(device, &plan)?;
//!     let input = rows.upload(&[one; 8], &[1, 2], None)?;
//!     memory.push((input, rows, sums));
//! }
//!
//! // Enqueue on every rank, then wait for every rank. Experts would work in between,
//! // on `rows.output().tokens`; here they return their input.
//! for (rank, (input, rows, sums)) in ranks.iter_mut().zip(&memory) {
//!     rank.dispatch(stream, input, rows.output())?;
//!     let expert_rows = CombineInput::new(rows.output().tokens()?);
//!     rank.combine(stream, &expert_rows, &sums.output(1)?)?;
//! }
//! for (rank, (_, _, sums)) in ranks.iter().zip(&memory) {
//!     if let Some(fault) = rank.synchronize(stream)?.fault() {
//!         eprintln!("{fault}"); // an input was at fault; the rank goes on
//!     }
//!     assert_eq!(sums.download::<u16>(1)?, [0x4000; 8]); // 1.0 + 1.0
//! }
//! Communicator::close_all(ranks)?;
//! for (_, rows, sums) in memory {
//!     // SAFETY: the communicators are closed, so no kernel uses the buffers.
//!     unsafe { rows.free().and(sums.free())? };
//! }
//! group.close()
//! # }
//! ```
//!
//! # Errors, faults and waits
//!
//! A wrong argument is an [`Error`] before anything is launched. A problem in a kernel
//! is a [`Fault`], which [`Communicator::check`] returns: as a value, an [`InputFault`], if the
//! input was at fault and the round went on, and as [`Error::Fault`] if the rank gave up. Every wait of
//! a kernel ends at the deadline of the [`Config`], or [of its call](Communicator::set_deadline), and no
//! kernel traps, so the device stays usable.
//!
//! # Features
//!
//! `simulator`, a default one: the group `Group::simulated`, whose ranks run the same protocol on the CPU.
//!
//! `cuda`: the groups `Group::local` and `Group::node`. Nothing of CUDA is linked: the driver is loaded at
//! run time, by the first call that needs one. So a program builds and starts without it. At run time one
//! variable is read, only for a warning if ranks of a process share a GPU (`CUDA_DEVICE_MAX_CONNECTIONS`),
//! and with `nvshmem` two that say how NVSHMEM uses a NIC. The kernels' PTX comes with the package, or is
//! built from the sources of a checkout; if the environment variable `FERRY_PTX_DIR` names a folder of PTX at
//! build time, that is used instead.
//!
//! `nvshmem`: `cuda`, and `Group::nvshmem`, whose kernels call NVSHMEM. They are built on your machine, which
//! takes a toolchain of its own and NVSHMEM's device code, unless `FERRY_PTX_DIR` has them; the host library
//! is loaded at run time.
//!
//! `cust`: `cuda`, and streams and memory of the crate `cust`, which links the driver.
//!
//! `cudarc`: `cuda`, and streams and memory of the crate `cudarc`, which loads the driver at run time.
//!
//! `candle`: `cudarc`, and tensors and devices of the crate `candle-core`, whose build needs `nvcc`. It
//! links the driver, cuBLAS, cuRAND and CUDA's runtime: a program with candle does not start without them.
//!
//! `serde`: reads a [`Config`] from files and writes it, [formats as words](Config#in-files).

#[cfg(doc)]
#[doc = include_str!("../docs/links.md")]
#[doc = include_str!("../docs/guide.md")]
pub mod guide {
    /// Defines a module for each page of `docs`.
    macro_rules! pages {
        ($($(#[$condition:meta])* $page:ident)*) => {$(
            $(#[$condition])*
            pub mod $page {
                #![doc = include_str!("../docs/links.md")]
                #![doc = include_str!(concat!("../docs/", stringify!($page), ".md"))]
                use crate::*;
            }
        )*};
    }

    // Without the feature `cuda`, the code of some pages does not compile: it is no doctest then.
    pages! {
        engines
        rounds
        #[cfg(any(not(doctest), feature = "cuda"))] groups
        receive
        capacity
        formats
        options
        silu
        #[cfg(any(not(doctest), feature = "cuda"))] graphs
        recovery
        doctor
        #[cfg(any(not(doctest), feature = "cuda"))] shared_gpu
        c
        python
        deep_ep
        deep_ep_seen
        building
        #[cfg(any(not(doctest), feature = "cuda"))] codegen
        checks
        terms
        reference
    }
}

/// The code of the README compiles.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

/// Misuse does not compile.
#[cfg(doctest)]
#[doc = include_str!("../tests/misuse.md")]
struct Misuse;

mod call;
mod communicator;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod device;
mod doctor;
pub mod error;
mod group;
mod interop;
mod plan;
mod tensor;

pub use call::arguments::Argument;
pub use call::buffers::copies::ReceivedRows;
pub use call::buffers::decode::decode_rows;
pub use call::buffers::{CombineBuffers, DispatchBuffers};
pub use call::epilogue::{CombineEpilogue, CombineSteps, OwnEpilogue};
pub use call::scales::ScaleTensor;
pub use call::silu::FusedSilu;
pub use call::tensors::TensorLayout;
pub use call::{Call, CombineInput, CombineOutput, DispatchInput, DispatchOutput};
pub use communicator::Communicator;
pub use communicator::close::{CloseAllError, CloseError};
pub use communicator::counts::ReceivedCounts;
pub use communicator::view::View;
pub use device::Device;
#[cfg(feature = "cuda")]
pub use device::kernels::Kernels;
pub use error::Error;
pub use error::input_fault::{InputFault, InputReport};
pub use error::links::{Link, LinkReport, LinkState};
pub use error::round::Round;
pub use ferry_layout::formats;
pub use ferry_layout::silu::Activation;
pub use ferry_layout::{
    CombineMode, Fault, FaultKind, LinkTest, Rank, ReceiveLayout, ScaleLayout, TokenFormat,
};
#[cfg(feature = "simulator")]
#[doc(inline)]
pub use ferry_simulator as simulator;
pub use group::Group;
pub use group::fabric::Fabric;
pub use group::options::GroupOptions;
#[cfg(feature = "candle")]
pub use interop::candle;
#[cfg(feature = "cudarc")]
pub use interop::cudarc;
#[cfg(feature = "cust")]
pub use interop::cust;
pub use interop::lease::{AsStream, AsTensor, Lease};
pub use plan::Plan;
pub use plan::capacity::Capacity;
pub use plan::check::MAX_EXPERT_ALIGNMENT;
pub use plan::config::Config;
pub use plan::receive::{ByExpert, KeptRows, Padded, Receive, ReceiveFields, StridedRows};
pub use tensor::Tensor;
pub use tensor::any::AnyTensor;
pub use tensor::data_type::{DataType, TensorElement};
pub use tensor::handles::{DevicePtr, Stream};

/// Bootstraps: the exchange of bytes between processes before they have a group.
pub mod bootstrap {
    pub use crate::group::bootstrap::Bootstrap;
    pub use crate::group::bootstrap::function::FnBootstrap;
    pub use crate::group::bootstrap::tcp::TcpBootstrap;
}

/// The memory layout that host and kernels share: sizes, regions and kernels by name.
pub mod layout {
    pub use ferry_layout::{
        Epilogue, Kernel, Load, MAX_RANKS, OutputElement, Region, Shape, Sizes, UnknownName,
    };
}
