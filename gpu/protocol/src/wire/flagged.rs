//! A slot: a place for one row and the flag that says the row is whole.
//!
//! ```text
//! sender:    write the row ; release ; flag := epoch          (publish)
//! receiver:  flag >= epoch, acquired ; read the row           (is_full)
//! ```
//!
//! A slot is written again only in a later round, and the [`handshake`](crate::handshake) keeps
//! that round from starting before the receiver is done. The flag is never reset: a later epoch
//! is a larger number.

use ferry_layout::{Epoch, Rank, Signal};

use crate::machine::signals::Signals;

/// Marks a slot of `to` as full, after the row was written. Several slots may share one
/// [`Signals::release`]: this is for the flag alone. For one lane.
#[inline(always)]
pub fn publish<S: Signals>(signals: &S, to: Rank, flag: Signal, epoch: Epoch) {
    signals.signal(to, flag, epoch.0);
}

/// Whether the slot holds the row of `epoch`; if so, it can be read. For one lane.
#[inline(always)]
pub fn is_full<S: Signals>(signals: &S, flag: Signal, epoch: Epoch) -> bool {
    signals.load_signal(flag) >= epoch.0
}
