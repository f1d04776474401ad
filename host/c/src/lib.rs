//! Ferry for C and for what calls C. The header, `ferry.h`, is generated from this crate by `cargo
//! xtask c-header`, so the documentation of its items is written for readers of the header.
//!
//! Types have the names that C knows them by. A handle is a pointer to a [`handle::Handle`]: a
//! magic word, then the value. A struct that a caller fills has its size first, see [`structs`].
//! Each entry's body is one call of [`status::guard`], which catches panics.
//!
//! # What a caller promises
//!
//! The `// SAFETY:` comments of entries name these rules, which the header states at its top:
//!
//! - **pointers**: a pointer is null, or points to as many values of its type as the entry says, which live
//!   and are not written by others until the entry returns. A struct with its size first lives for that many
//!   bytes. A text ends with a zero byte.
//! - **handles**: a handle is null, or came from the entry that makes its kind and was not given
//!   back. No other thread gives it back meanwhile.
//! - **memory**: an address of device memory, with the bytes behind it, is memory of the device
//!   that the call is for, until what was enqueued with it has ended and no graph of it is launched
//!   any more.
//! - **streams**: a stream is null (the default stream), or a live `CUstream` of the device's
//!   primary context. It is destroyed only after what was enqueued on it has ended. While a call enqueues on
//!   it, nobody but `ferry_graph_capture` begins or ends a capture that it is a part of.
//! - **graphs**: a graph of calls that `ferry_graph_capture` did not make is neither at work nor launched any
//!   more once a communicator whose calls it has is closed.
//! - **kernels**: kernels in a PTX text touch no other memory than Ferry's of the same names would,
//!   and end as those do.
#![allow(
    non_camel_case_types,
    reason = "types have the names that C knows them by"
)]
#![allow(
    clippy::missing_safety_doc,
    reason = "the header says once, at its top, what callers promise"
)]

pub mod arguments;
pub mod bootstrap;
pub mod buffers;
pub mod communicator;
pub mod config;
pub mod device;
pub mod fault;
pub mod graph;
pub mod group;
mod handle;
pub mod kernels;
pub mod local_ranks;
#[cfg(test)]
#[path = "../../tests/noted/mod.rs"]
mod noted;
pub mod plan;
pub mod pointers;
pub mod round;
pub mod silu;
pub mod status;
mod structs;
pub mod tensor;
pub mod version;
