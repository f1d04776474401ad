//! The handshake: no rank runs a whole round ahead of another.
//!
//! A rank whose warps have all sent back their combine rows is done with its dispatch rows,
//! counts and presence words, and says so to every rank ([`say_consumed`]). A rank ends combine
//! only when it has heard that from every rank ([`has_consumed`]). So when a round's dispatch
//! starts writing into a peer's window, the peer has finished reading the round before; and when
//! its combine starts writing into the peer's combine rows, the peer has sent counts of this
//! round, hence ended the combine before. Bare rows are made absent again by whoever reads them, before the
//! launch ends: those of dispatch before this rank says consumed, those of combine before it sends counts.
//! Every rank takes part in every round, also with no tokens.

use ferry_layout::{Epoch, Rank, Signal};

use crate::Signals;

/// Tells `to` that this rank has read all that `to` dispatched in `epoch`. For one lane.
#[inline(always)]
pub fn say_consumed<S: Signals>(signals: &S, to: Rank, word: Signal, epoch: Epoch) {
    signals.signal(to, word, epoch.0);
}

/// Whether the peer behind `word` has read all that this rank dispatched in `epoch`: its window
/// may be written again. For one lane.
#[inline(always)]
pub fn has_consumed<S: Signals>(signals: &S, word: Signal, epoch: Epoch) -> bool {
    signals.load_signal(word) >= epoch.0
}
