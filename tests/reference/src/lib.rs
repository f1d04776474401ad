//! The oracle: the results of dispatch and combine, bit for bit, and seeded
//! workloads for it.
//!
//! Everything here is sequential loops over plain vectors. It shares no code
//! with the library that it checks, uses no GPU, and prefers obvious code to
//! fast code.
//!
//! ```
//! use ferry_reference::workload::{Routing, WorkloadSpec, generate};
//! use ferry_reference::{CombineMode, apply_expert_scale, combine, dispatch, first_difference};
//!
//! let problem = generate(WorkloadSpec {
//!     ranks: 2,
//!     experts: 8,
//!     top_k: 2,
//!     hidden: 64,
//!     tokens: vec![5, 0],
//!     routing: Routing::Uniform,
//!     seed: 1,
//! });
//! let dispatched = dispatch(&problem);
//! let rows = apply_expert_scale(&problem, &dispatched, &[1.0; 8]);
//! assert_eq!(first_difference(&dispatched[0].tokens, &rows[0], 64), None);
//! let combined = combine(&problem, &rows, CombineMode::Exact);
//! assert_eq!(combined[0].len(), 5 * 64);
//! assert!(combined[1].is_empty());
//! ```

#![forbid(unsafe_code)]

mod aligned;
mod combine;
mod combine_rows;
mod compare;
mod dispatch;
pub mod e2m1;
mod finish;
pub mod fp8;
mod local;
pub mod mxfp4;
pub mod mxfp8;
pub mod nvfp4;
pub mod passed;
mod problem;
mod random;
mod rows;
pub mod scale_layout;
#[cfg(test)]
mod testing;
pub mod text;
pub mod threads;
pub mod workload;

pub use aligned::{AlignedRows, Room, align};
pub use combine::{CombineMode, combine, round_to_bf16};
pub use combine_rows::{combine_rows, combine_weights};
pub use compare::{Difference, first_difference};
pub use dispatch::{
    Dispatched, apply_expert_scale, dispatch, dispatch_with_shared, dispatch_with_shared_part,
    part_of,
};
pub use finish::{Element, Finish, SharedRows, combine_with};
pub use local::share_of;
pub use problem::{Problem, ProblemError, RankInput};
pub use rows::{ReceivedRows, RowNumbers, narrow_ids, receive_rows};

/// The element type of every row.
pub use half::bf16;
