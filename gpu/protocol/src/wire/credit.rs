//! The handshake: no rank runs a whole round ahead of another.
//!
//! A rank whose warps have all sent back their combine rows is done with its dispatch rows,
//! counts and presence words, and says so to every rank ([`Credit`]). A rank ends combine
//! only when it has heard that from every rank ([`has_credit`]). So when a round's dispatch
//! starts writing into a peer's window, the peer has finished reading the round before; and when
//! its combine starts writing into the peer's combine rows, the peer has sent counts of this
//! round, hence ended the combine before. Bare rows are made absent again by whoever reads them, before the
//! launch ends: those of dispatch before this rank says consumed, those of combine before it sends counts.
//! Every rank takes part in every round, also with no tokens.

use ferry_layout::{Epoch, Rank, Signal};

use crate::machine::signals::Signals;

/// This rank has read what its peers dispatched in a round: the right to say so, which only a release gives.
#[derive(Clone, Copy)]
pub struct Credit {
    word: Signal,
    epoch: Epoch,
}

impl Credit {
    /// Orders all reads of the round, this warp's and those that it knows of, before what [`say`](Self::say) stores:
    /// a peer that sees the word may write the rows again. `word` is this rank's in every window. All lanes.
    #[inline(always)]
    pub fn release<S: Signals>(signals: &S, word: Signal, epoch: Epoch) -> Self {
        signals.release();
        Self { word, epoch }
    }

    /// Tells `to` that this rank has read all that `to` dispatched in the round. For one lane.
    #[inline(always)]
    pub fn return_to<S: Signals>(self, signals: &S, to: Rank) {
        signals.signal(to, self.word, self.epoch.0);
    }
}

/// Whether the peer behind `word` has read all that this rank dispatched in `epoch`: its window
/// may be written again. For one lane.
#[inline(always)]
pub fn has_credit<S: Signals>(signals: &S, word: Signal, epoch: Epoch) -> bool {
    signals.load_signal(word) >= epoch.0
}
