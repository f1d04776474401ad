//! Credits: no rank runs a whole round ahead of another.
//!
//! In round `n`, ranks write to two areas of each other's windows:
//!
//! 1. The dispatch area: counts, presence words, dispatch rows and their flags. A rank is done with it when
//!    all its warps that send combine rows back have read theirs, and then returns a credit for `n` to every
//!    rank ([`Credit`]). **A dispatch of round `n + 1` stores nothing into a rank's window before it has the
//!    credits of all ranks for `n`** ([`has_credit`]). The first round needs none.
//! 2. The combine area: combine rows and their flags. A rank is done with it when its combine has ended. **A
//!    combine of round `n` stores only rows that answer rows of round `n`**, hence after their source has
//!    sent its counts of `n`, which it did after the end of its combine of `n - 1`.
//!
//! A round that is given up takes the epochs `n` and `n + 1`; its credits, for `n + 1`, also stand for `n`,
//! as nothing is dispatched in `n + 1`. The combine area is left as it is: nobody sent rows.
//!
//! Every rank takes part in every round, even without tokens. Combine does not wait for credits: if nobody is
//! late, they are there when the next dispatch checks them. More follows from these two rules:
//! - Counts and presence words are compared with their epoch for equality. One of `n` stays as long as its
//!   reader needs it: senders of combine read it before they return the credit, and nobody reads it
//!   afterwards.
//! - Flags and credits are never reset: a later epoch is larger. Credits of a peer come in order, as it
//!   returns one only after a dispatch that had this rank's counts, and this rank sent those with all credits
//!   of the round before in hand.
//! - Rows whose words are their own flags are re-armed by their reader before its launch ends: those of
//!   dispatch before this rank's combine returns a credit, those of combine before its next dispatch sends
//!   counts.
//! - What is staged for a rank of another node stays until it was delivered: [`remote`](crate::wire::remote).
//!   A row or a word of dispatch is staged again after credits for it; one of combine, and a credit, in the
//!   next round's combine, after the dispatch between has received counts of all ranks, each of which had
//!   received all its rows and credits.
//! - A launch reads its round from `Counter::Finished`. A fused combine stores it together with the credit,
//!   after all its blocks have begun; of a split one the last block of the waiting half does, of `give_up`
//!   the last block. The next launch begins after that launch's end.
//! - Windows are freed after all ranks have closed and their last kernels ended. A kernel's end waits for its
//!   stores into windows of its node, but not for data on a network. So **if ranks are on other nodes,
//!   combine and `give_up` end only after they have all credits for the round**: nothing is under way to a
//!   rank whose round has ended.

use ferry_layout::{Counter, Epoch, Rank, Region, Signal};

use crate::machine::signals::Signals;
use crate::machine::{LANES, Machine};
use crate::sync::launch::{Aborted, Awaited, Launch};

/// The right to tell peers that this rank has read the rows that they dispatched in a round. Only a release
/// grants it.
#[derive(Clone, Copy)]
pub struct Credit {
    word: Signal,
    epoch: Epoch,
}

impl Credit {
    /// Orders all reads of the round, this warp's and those that it knows of, before the stores of
    /// [`return_to`](Self::return_to): a peer that sees the word may write the rows again. `word` is this
    /// rank's in every window. All lanes.
    #[inline(always)]
    pub fn release<S: Signals>(signals: &S, word: Signal, epoch: Epoch) -> Self {
        debug_assert!(epoch.0 > 0, "nobody waits for a credit of no round");
        signals.release();
        Self { word, epoch }
    }

    /// Returns the credit to `to`: this rank has read everything that `to` dispatched in the round. For one
    /// lane.
    #[inline(always)]
    pub fn return_to<S: Signals>(self, signals: &S, to: Rank) {
        signals.signal(to, self.word, self.epoch.0);
    }
}

/// Whether the peer of `word` has read everything that this rank dispatched in `epoch`, so that its window
/// may be written again. Acquires that, for this warp and those to which it hands on. For one lane.
#[inline(always)]
pub fn has_credit<S: Signals>(signals: &S, word: Signal, epoch: Epoch) -> bool {
    signals.load_signal(word) >= epoch.0
}

/// Makes sure that every rank has read the rows of the round before, before anything of this round is stored
/// into a rank's window.
#[inline(always)]
pub(crate) fn require_credits<M: Machine>(launch: &Launch<M>) -> Result<(), Aborted> {
    let machine = launch.machine;
    // With ranks of other nodes, the last combine has waited.
    if machine.spans_nodes() {
        return Ok(());
    }
    let (ranks, finished) = (machine.ranks(), machine.peek(Counter::Finished));
    debug_assert_eq!(
        launch.epoch,
        Epoch::after(finished),
        "rounds follow each other"
    );
    for first in (0..ranks).step_by(LANES as usize) {
        let missing = machine.ballot(machine.lanes(|lane| {
            let rank = Rank((first + lane).min(ranks - 1));
            machine.peek_credit(rank) < finished
        }));
        if missing != 0 {
            return wait_for_credits(launch);
        }
    }
    Ok(())
}

/// Waits until every rank has read the rows that this one dispatched: in combine in this round, in dispatch
/// in the one before. Dispatch waits only as long as that round's combine could have waited: ranks that have
/// all credits wait for this one meanwhile, and learn in time which rank is at fault.
#[inline(always)]
pub(crate) fn wait_for_credits<M: Machine>(launch: &Launch<M>) -> Result<(), Aborted> {
    let (machine, common) = (launch.machine, launch.common);
    let (ranks, epoch) = (common.shape.ranks, launch.follows());
    debug_assert!(epoch.0 <= launch.epoch.0, "{epoch:?} in {:?}", launch.epoch);
    let deadline = match epoch == launch.epoch {
        true => u64::MAX,
        false => machine.load(Counter::CreditsDue),
    };
    for first in (0..ranks).step_by(LANES as usize) {
        let peer = |lane: u32| Rank((first + lane).min(ranks - 1));
        let word = |lane| common.window.credit(peer(lane));
        launch.wait_lanes_until(
            deadline,
            |lane| has_credit(machine, word(lane), epoch).then_some(()),
            |lane| Awaited {
                peer: peer(lane),
                region: Region::Credit,
                index: 0,
                saw: machine.load_signal(word(lane)),
            },
        )?;
    }
    Ok(())
}
