//! Exact mode: every expert output of a token goes back as it is, into the row of its top-k slot.

use ferry_layout::{NOT_ROUTED, Tensor};

use crate::combine::launch::Combine;
use crate::combine::received::read_positions;
use crate::combine::work::Work;
use crate::machine::Machine;
use crate::machine::rows::{Bits, ByteRange, Row};
use crate::sync::launch::Aborted;
use crate::wire::remote::RowPuts;
use crate::wire::{flagged, remote};
use crate::work::item::Item;
use crate::work::lanes::for_each_bit;

impl<M: Machine> Combine<'_, M> {
    /// Sends an item back, if it arrived. `written` is called after its rows, if any, are written.
    #[inline(always)]
    pub fn send_exact(
        &self,
        work: Work,
        mut puts: RowPuts<M>,
        written: impl FnOnce(),
    ) -> Result<RowPuts<M>, Aborted> {
        let Some(item) = work.item else {
            written();
            return Ok(puts);
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
            remote::exact_staging(common, position, shared)
        };
        let on_node = remote::is_p2p(machine, common, source);
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
            let mut left = routed;
            while let Some(k) = left.take_lowest() {
                let from = staging(machine.broadcast(positions, k));
                puts = remote::put_exact(self, puts, item, k, from)?;
            }
        }
        Ok(puts)
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
