//! Exact mode: every expert output of a token goes back as it is, into the row of its top-k slot.

use ferry_layout::{NOT_ROUTED, OVERFLOWED, Tensor};

use crate::combine::launch::Combine;
use crate::combine::received::read_positions;
use crate::combine::work::Work;
use crate::machine::Machine;
use crate::machine::rows::{ByteRange, Put, Row};
use crate::wire::flagged;
use crate::work::item::Item;
use crate::work::ranks::{for_each_bit, is_p2p};

impl<M: Machine> Combine<'_, M> {
    /// Sends an item back, if it arrived. `written` is called after its rows, if any, are written.
    #[inline(always)]
    pub fn send_exact(&self, work: Work, written: impl FnOnce()) {
        let Some(item) = work.item else {
            return written();
        };
        let (machine, common, epoch) = (self.machine, self.common, self.epoch);
        let (window, me) = (&common.window, common.rank());
        let Item { source, token, .. } = item;
        let positions = read_positions(self, item);
        let routed =
            machine.ballot(machine.lanes(|lane| machine.own(positions, lane) != NOT_ROUTED));
        let range = item.range(common.shape.combine_row_bytes());
        let staging = |position: u32| {
            // The shared expert's rows, which precede the others, are not staged.
            let shared = match self.options.shared_of {
                0 => 0,
                _ => common.row.padded(self.options.shared(self.tokens).count),
            };
            let row = (position & !OVERFLOWED).wrapping_sub(shared);
            window.exact_staging(row.min(common.shape.max_rows() as u32 - 1))
        };
        let on_node = is_p2p(machine, common, source);
        for_each_bit(routed, |k| {
            let position = machine.broadcast(positions, k);
            let to = match on_node {
                true => Row::Window(source, window.combine_row(token, k)),
                false => Row::Window(me, staging(position)),
            };
            match (position as u64) < self.args.row_capacity {
                true => {
                    let row = Row::Tensor(Tensor::Expert, position);
                    machine.copy_arrived(range, row, 1u32, |_| to);
                }
                // The row did not fit in the outputs. The source waits for it nevertheless.
                false => clear(machine, range, to),
            }
        });
        written();
        machine.release();
        if on_node {
            machine.lanes(|lane| {
                if routed >> lane & 1 != 0 {
                    let flag = window.combine_flag(item.flag(), lane);
                    flagged::publish(machine, source, flag, epoch);
                }
            });
        } else {
            for_each_bit(routed, |k| {
                machine.put(Put {
                    peer: source,
                    from: staging(machine.broadcast(positions, k)),
                    to: window.combine_row(token, k),
                    bytes: common.shape.combine_row_bytes(),
                    signal: window.combine_flag(item.flag(), k),
                    value: epoch.0,
                });
            });
        }
    }
}

/// Writes zeros to a byte range of a row.
#[inline(always)]
fn clear<M: Machine>(machine: &M, range: ByteRange, to: Row) {
    let (row, zeros) = (machine.row(to), [M::Vector::default()]);
    let mut start = range.start;
    while start < range.end {
        machine.store_tile(row, start, range.end, &zeros);
        start += M::WARP_BYTES;
    }
}
