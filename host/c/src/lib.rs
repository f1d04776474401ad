//! Ferry for C and languages that call C. The header, `ferry.h`, is generated from this crate by `cargo
//! xtask c-header`, so items are documented for readers of the header.
//!
//! Types have their C names. A handle is a pointer to a [`handle::Handle`]: a magic word, then the value. A
//! struct that a caller fills begins with its size, see [`structs`]. Each entry's body is one call of
//! [`status::guard`], which catches panics.
//!
//! # Promises of the caller
//!
//! `// SAFETY:` comments name these rules, which the header states at its top:
//!
//! - **pointers**: a pointer is null, or points to as many values of its type as the entry documents, which
//!   live and are not written by others until the entry returns. A struct that begins with its size has that
//!   many bytes. A text ends with a zero byte.
//! - **handles**: a handle is null, or came from the entry that makes its kind and was not freed. No other
//!   thread frees it meanwhile.
//! - **memory**: an address with the bytes after it is memory of the call's device, until work enqueued with
//!   it has ended and no graph of that work is launched any more.
//! - **streams**: a stream is null (the default stream), or a live `CUstream` of the device's primary
//!   context. It is destroyed only after work enqueued on it has ended. While a call enqueues on it, nobody
//!   but `ferry_graph_capture` begins or ends a capture that it is a part of.
//! - **graphs**: a graph of calls that `ferry_graph_capture` did not make neither runs nor is launched any
//!   more once one of its communicators is closed.
//! - **kernels**: kernels in a PTX text touch no other memory than Ferry's of the same names, and end as they
//!   do.
#![allow(non_camel_case_types, reason = "types have their C names")]
#![allow(
    clippy::missing_safety_doc,
    reason = "the header states the callers' promises once, at its top"
)]

pub mod arguments;
pub mod bootstrap;
pub mod buffers;
pub mod communicator;
pub mod config;
pub mod counts;
pub mod device;
pub mod fault;
pub mod graph;
pub mod group;
mod handle;
pub mod kernels;
#[cfg(test)]
#[allow(dead_code, reason = "tests here use a part of it")]
#[path = "../../tests/suite/noted/mod.rs"]
mod noted;
pub mod plan;
pub mod pointers;
pub mod round;
pub mod silu;
pub mod status;
mod structs;
pub mod tensor;
pub mod together;
pub mod version;
pub mod view;
