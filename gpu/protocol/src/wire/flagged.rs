//! Flagged rows: a row, and a word that is set after the row is whole.
//!
//! ```text
//! sender:    write the row ; release ; flag := epoch          (publish)
//! receiver:  flag >= epoch, acquired ; read the row           (is_full)
//! ```
//!
//! A row is written again only in a later round, and the [`credit`](crate::wire::credit) keeps that round
//! from starting before the receiver has read the row. The flag is never reset: a later epoch is a larger
//! number.

use ferry_layout::{Epoch, Rank, Signal};

use crate::machine::Machine;
use crate::machine::counters::BlockCounter;
use crate::machine::position::WarpPosition;
use crate::machine::signals::Signals;
use crate::work::partition::{Partition, warps_of_block};

/// Flags a row of `to` as whole, after the row was written. Several rows may share one [`Signals::release`],
/// which this does not include. For one lane.
#[inline(always)]
pub fn publish<S: Signals>(signals: &S, to: Rank, flag: Signal, epoch: Epoch) {
    debug_assert!(epoch.0 > 0, "all flags are at least 0");
    signals.signal(to, flag, epoch.0);
}

/// Whether the row of `epoch` is whole. If so, the row can be read afterwards. For one lane.
#[inline(always)]
pub fn is_full<S: Signals>(signals: &S, flag: Signal, epoch: Epoch) -> bool {
    signals.load_signal(flag) >= epoch.0
}

/// Publishes the only item that each sender of a block has, of `items` among the senders of `partition`: the
/// last sender releases the rows of all of them. `word` describes this sender's item; `flag` sets the flags
/// of an item, and is called with the item's number and its sender's word, one item a lane.
#[inline(always)]
pub fn publish_by_block<M: Machine>(
    machine: &M,
    partition: Partition,
    items: u32,
    word: u64,
    flag: impl Fn(u32, u64),
) {
    partition.debug_assert_is_one();
    debug_assert!(
        items <= partition.of,
        "{items} items for {} senders",
        partition.of
    );
    let first = machine.warp() - partition.index;
    let callers = warps_of_block(machine, first, items);
    let Some(words) = machine.hand_to_last(BlockCounter::Sent, callers, word) else {
        return;
    };
    machine.release();
    machine.lanes(|lane| {
        // A lane for each warp of the block.
        let position = WarpPosition {
            index: lane,
            ..machine.warp_position()
        };
        flag(
            position.warp().wrapping_sub(first),
            machine.own(words, lane),
        );
    });
}
