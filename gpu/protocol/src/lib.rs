//! Who may touch Ferry's bytes when: dispatch and combine, written once for every machine.
//!
//! The unit of execution is a warp. What its 32 lanes do together is an operation of the
//! [`Machine`]; what they hold apart is a [`Machine::Lanes`]. This crate names no address, no
//! instruction and no clock, and has no unsafe code.
//!
//! The smallest pieces, each of which also runs under a model checker: [`slot`] (a row and its
//! flag), [`gather`] (work that many warps of a GPU finish), [`handshake`] (no rank runs a
//! round ahead).
#![no_std]
#![forbid(unsafe_code)]

#[cfg(test)]
extern crate std;

mod announce;
mod combine;
mod dispatch;
pub mod gather;
mod gave_up;
mod groups;
pub mod handshake;
mod machine;
mod offsets;
mod pieces;
mod places;
mod receive;
mod route;
mod scales;
mod send;
mod send_back;
mod send_group_back;
mod share;
pub mod slot;
mod sum_up;
mod units;
mod wait;

pub use announce::count_below;
pub use combine::{combine, combine_async, combine_wait};
pub use dispatch::{dispatch, dispatch_async, dispatch_wait};
pub use machine::{Bits, Counters, Gate, LANES, Machine, Put, Row, Signals, Span};
pub use share::Seat;
pub use wait::Stopped;
