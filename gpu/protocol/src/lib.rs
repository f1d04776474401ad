//! Rules for who may touch Ferry's bytes, and when: dispatch and combine, written once for every machine.
//!
//! The code runs on a warp. An operation of its 32 lanes together is a method of [`Machine`]; a value for
//! each lane is a [`Machine::Lanes`]. This crate names no address, no instruction and no clock, and has no
//! unsafe code.
//!
//! [`tactics`] decides once how a launch works. The smallest parts also run under a model checker:
//! [`wire::flagged`] (a row and its flag), [`wire::inline`] (a row whose words are their flags), [`arrivals`]
//! (work that many warps of a GPU finish), [`wire::credit`] (no rank runs a round ahead),
//! [`wire::ticket`] (words for the host).
#![no_std]
#![forbid(unsafe_code)]

#[cfg(test)]
extern crate std;

mod combine;
mod dispatch;
mod links;
mod local;
mod machine;
mod sync;
pub mod tactics;
pub mod wire;
mod work;

pub use combine::{combine, combine_async, combine_wait, give_up};
pub use dispatch::receive::host_counts::dispatch_counts;
pub use dispatch::send::numbering::block::BLOCK_MEMORY_BYTES;
pub use dispatch::{dispatch, dispatch_async, dispatch_wait};
pub use links::links;
pub use local::combine::combine_local;
pub use local::dispatch::dispatch_local;
pub use machine::block_memory::BlockMemory;
pub use machine::counters::{BlockCounter, Counters};
pub use machine::deadline::Deadline;
pub use machine::finishing::{Finish, Finishing, Rounding};
pub use machine::host::Host;
pub use machine::miss::TimedOut;
pub use machine::position::{Grid, WarpPosition};
pub use machine::puts::{PUTS_AT_ONCE, Put, Puts};
pub use machine::rows::{Bits, ByteRange, OutputRow, Row, TokenPart};
pub use machine::signals::Signals;
pub use machine::tile::Tiles;
pub use machine::turns::Turns;
pub use machine::{LANES, Machine};
pub use sync::arrivals;
pub use sync::launch::Aborted;
pub use work::extent::Extent;
