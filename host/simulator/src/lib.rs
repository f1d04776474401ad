//! A machine without GPUs that runs Ferry's kernels: many ranks in one thread, reproducible
//! from a seed.
//!
//! Each warp of each rank is a fibre that runs the same protocol code as a GPU's warp. A seeded
//! scheduler decides which warp runs next, and when writes become visible:
//!
//! - Writes wait in the warp's store buffer and drain in any order, until a release drains them.
//!   A device-scope release drains only writes to the own rank's memory.
//! - A put to a rank of another node travels in parts, in any order with other puts unless a fence of its
//!   warp keeps it behind them, and each part is read from its source when it is delivered. Some puts are
//!   held back until nothing else can be done.
//! - Warps stall for a while; a rank can be lost, with all writes that are not visible yet. A link from one
//!   rank to another can lose, change or delay writes.
//!
//! These are errors:
//!
//! - an access outside the allocation that it is for, or a write into the window of a rank of another node
//! - a launch with a tensor in the memory of another rank, or of another machine of this process
//! - a launch that goes on waiting after its deadline
//! - a use of a block's memory whose outcome depends on the order of warps, and a barrier at which not all
//!   warps of a block arrive
//! - a signal that arrives after its round is over, which could pass for one of a later round, or undo one
//!
//! Allocations are filled with a pattern, not with zeros.
//!
//! Not modelled: reads of old values after their flag was acquired (the model checker's part), divergent
//! lanes of a warp, and time. A deadline passes when nothing else can happen. While another thread may still
//! launch something, simulated time passes like wall time, or the next deadline passes after
//! [`Options::patience`] of wall time.
#![forbid(unsafe_code)]

mod addresses;
mod args;
mod bad_link;
mod block;
mod combines;
mod command;
mod encode;
mod error;
mod lane;
mod lent;
mod memory;
mod network;
mod options;
mod owner;
mod process;
mod racing;
mod remote;
mod run;
mod scheduler;
mod shared;
mod silu;
mod simulator;
mod socket;
mod stacks;
mod store_buffer;
mod warp;
mod write;

pub use bad_link::{BadLink, BadLinkKind};
pub use combines::Combines;
pub use error::SimulatorError;
pub use ferry_layout::{
    Args, CombineWith, DispatchWith, EpilogueWords, Kernel, MAX_BLOCKS, SiluArgs,
};
pub use network::Stalled;
pub use options::{Lost, Options};
pub use racing::Racing;
pub use silu::Portable;
pub use simulator::{Simulator, same_place};
