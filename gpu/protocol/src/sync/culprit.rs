//! Who is at fault where a rank waits for one that has aborted itself.
//!
//! A rank that times out on a peer tells every rank the culprit: that peer, or the culprit that the peer has
//! told. Who waits for an aborted rank thus names the first rank of the chain, and tells that name in turn.
//! The words are for the record alone: nobody waits for them. No epoch stands in them, since a rank aborts
//! once.

use ferry_layout::{Common, Rank};

use crate::machine::Machine;
use crate::machine::signals::Signals;

/// The upper half of a word that names a rank. As an epoch it is that of no round, and neither is the 0 of a
/// word that nobody has written.
const NAMES_RANK: u64 = u32::MAX as u64;

/// The culprit that `peer` has told this rank, or else `peer`. For one lane.
#[inline(always)]
pub fn culprit<S: Signals>(signals: &S, common: &Common, peer: Rank) -> Rank {
    let word = signals.load_tagged(common.window.culprit(peer)).0;
    match word >> 32 == NAMES_RANK && (word as u32) < common.shape.ranks {
        true => Rank(word as u32),
        false => peer,
    }
}

/// Tells every rank that this one has aborted because of `culprit`; from kernels that only wait, the ranks of
/// its node. All lanes.
#[inline(always)]
pub fn tell_culprit<M: Machine>(machine: &M, common: &Common, culprit: Rank) {
    let word = common.window.culprit(common.rank());
    machine.signal_all(word, NAMES_RANK << 32 | culprit.0 as u64);
}
