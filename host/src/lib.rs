//! Ferry carries tokens to their experts and back: expert-parallel dispatch and combine for
//! mixture-of-experts models.
//!
//! A [`Group`] is the ranks that take part, a [`Plan`] a checked [`Config`], and an
//! [`ExpertParallel`] one rank's end. [`dispatch`](ExpertParallel::dispatch) brings every token
//! to the ranks of its experts, in expert order; [`combine`](Dispatched::combine) brings the
//! experts' outputs back and sums them. The same kernels run on GPUs (feature `cuda`) and, as
//! here, in a simulator:
//!
//! ```
//! use std::time::Duration;
//!
//! use ferry::*;
//!
//! # fn main() -> Result<(), Error> {
//! let group = Group::simulated(2, 7)?;
//! let plan = Plan::new(&group, Config {
//!     experts: 4,
//!     top_k: 2,
//!     hidden: 8,
//!     max_tokens_per_rank: 3,
//!     p2p_world_size: None,
//!     format: TokenFormat::Bf16,
//!     combine: CombineMode::Reduced,
//!     deadline: Duration::from_secs(1),
//!     debug_checks: true,
//!     max_sms: None,
//!     specialise: true,
//! })?;
//! let mut ranks = ExpertParallel::new(&group, &plan)?;
//! let stream = Stream::DEFAULT;
//!
//! // Every rank has one token, which goes to expert 1 (on rank 0) and expert 2 (on rank 1).
//! let upload = |rank: &ExpertParallel, bytes: &[u8]| -> Result<DevicePtr, Error> {
//!     let at = rank.device().alloc(bytes.len() as u64)?;
//!     rank.device().upload(at, bytes)?;
//!     Ok(at)
//! };
//! let one = 0x3f80_u16.to_le_bytes(); // 1.0 as BF16
//! let mut memory = Vec::new();
//! for rank in &ranks {
//!     let rows = plan.max_rows();
//!     let input = DispatchInput {
//!         x: Tensor::contiguous(upload(rank, &one.repeat(8))?, [1, 8]),
//!         topk_ids: Tensor::contiguous(upload(rank, &[1, 0, 0, 0, 2, 0, 0, 0])?, [1, 2]),
//!         topk_weights: None,
//!         input_scale: None,
//!     };
//!     let output = DispatchOutput {
//!         tokens: Tensor::contiguous(rank.device().alloc(rows as u64 * 16)?, [rows, 8]),
//!         scales: None,
//!         row_scales: None,
//!         row_offsets: Tensor::contiguous(rank.device().alloc(3 * 4)?, [3]),
//!         expert_ids: Tensor::contiguous(rank.device().alloc(2 * 4)?, [2]),
//!         src_info: Tensor::contiguous(rank.device().alloc(rows as u64 * 8)?, [rows, 2]),
//!     };
//!     let combined = Tensor::contiguous(rank.device().alloc(16)?, [1, 8]);
//!     memory.push((input, output, combined));
//! }
//!
//! // Enqueue on every rank, then wait for every rank. Experts would work in between, on
//! // `output.tokens`; here they return what they get.
//! for (rank, (input, output, combined)) in ranks.iter_mut().zip(&memory) {
//!     let dispatched = rank.dispatch(stream, input, output)?;
//!     let expert_rows = CombineInput { expert_rows: output.tokens, topk_weights: None };
//!     let combined = CombineOutput { combined: CombineTensor::Summed(*combined) };
//!     dispatched.combine(stream, &expert_rows, &combined)?;
//! }
//! for (rank, (_, _, combined)) in ranks.iter().zip(&memory) {
//!     rank.synchronize(stream)?;
//!     let mut sum = [0; 2];
//!     rank.device().download(combined.at, &mut sum)?;
//!     assert_eq!(sum, 0x4000_u16.to_le_bytes()); // 1.0 + 1.0
//! }
//! ranks.into_iter().try_for_each(ExpertParallel::close)
//! # }
//! ```
//!
//! # Errors, faults and waits
//!
//! What is wrong with an argument is an [`Error`] before anything is launched. What a kernel
//! meets is a [`Fault`], which [`ExpertParallel::check`] returns; every wait of a kernel ends at
//! the deadline of the [`Config`], and no kernel traps, so the device stays usable.
//!
//! # Features
//!
//! `cuda`: the groups `Group::local` and `Group::nvshmem`. It links the CUDA driver library;
//! NVSHMEM is loaded at run time, by `Group::nvshmem` alone. Nothing reads the environment.

mod arguments;
mod bootstrap;
mod config;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod device;
mod error;
mod expert_parallel;
#[cfg(any(feature = "cuda", test))]
mod fault_page;
mod group;
#[cfg(any(feature = "cuda", test))]
mod job;
#[cfg(any(feature = "cuda", test))]
mod kernels;
mod loaded_kernels;
mod memory;
#[cfg(feature = "cuda")]
mod nvshmem;
#[cfg(any(feature = "cuda", test))]
mod own_gpu;
mod plan;
mod round;
mod silu;
mod simulated;
#[cfg(any(feature = "cuda", test))]
mod specialise;
mod tensor;

pub use arguments::{
    CombineInput, CombineOutput, CombineTensor, DispatchInput, DispatchOutput, ScaleTensor,
};
pub use bootstrap::{Bootstrap, BootstrapError, TcpBootstrap};
pub use config::Config;
pub use device::{Device, DevicePtr, Fabric, Stream};
pub use error::{CudaError, Error};
pub use expert_parallel::ExpertParallel;
pub use ferry_layout::silu::Activation;
pub use ferry_layout::{
    CombineMode, Fault, FaultKind, Kernel, Rank, Region, ScaleLayout, Shape, TokenFormat,
};
pub use ferry_simulator as simulator;
pub use group::Group;
#[cfg(feature = "cuda")]
pub use group::NvshmemOptions;
#[cfg(feature = "cuda")]
pub use kernels::{Kernels, KernelsError};
pub use loaded_kernels::LoadedKernels;
pub use plan::{Plan, PlanError, Problem};
pub use round::{CombinePending, DispatchPending, Dispatched, Unfinished};
pub use silu::{FusedSilu, fused_silu};
pub use tensor::{Tensor, TensorError};
