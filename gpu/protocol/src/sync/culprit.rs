//! The rank at fault, if a rank waits for one that has aborted itself.
//!
//! A rank that times out on a peer tells every rank the culprit: that peer, or the culprit that the peer has
//! told. A rank that waits for an aborted rank thus names the first rank of the chain, and tells that name in
//! turn. The words are for the record alone: nobody waits for them. They carry no epoch, since a rank aborts
//! only once.

use ferry_layout::{Common, CulpritWord, Rank};

use crate::machine::Machine;
use crate::machine::signals::Signals;

/// The culprit that `peer` has told this rank, or else `peer`. For one lane.
#[inline(always)]
pub fn culprit<S: Signals>(signals: &S, common: &Common, peer: Rank) -> Rank {
    let word = signals.load_tagged(common.window.culprit(peer)).0;
    CulpritWord(word).rank(common.shape.ranks).unwrap_or(peer)
}

/// Tells every rank that this one has aborted because of `culprit`; from kernels that only wait, the ranks of
/// its node. All lanes.
#[inline(always)]
pub fn tell_culprit<M: Machine>(machine: &M, common: &Common, culprit: Rank) {
    let word = common.window.culprit(common.rank());
    machine.signal_all(word, CulpritWord::of(culprit).0);
}
