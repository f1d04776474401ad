//! Results that dispatch left for combine: the items that arrived, and the positions of their rows.

use ferry_layout::{ByteOffset, NOT_ROUTED, Table};

use crate::combine::launch::Combine;
use crate::machine::Machine;
use crate::sync::launch::Launch;
use crate::work::extent::Extent;
use crate::work::item::Item;
use crate::work::lanes::lane_or_none;
use crate::work::received_row::received_row;

impl<M: Machine> Combine<'_, M> {
    /// The expert rows of an item's token, one a top-k slot. Of rows that stayed as they came, the only one
    /// is in slot 0.
    #[inline(always)]
    pub fn read_rows(&self, item: Item) -> M::Lanes<u32> {
        if !self.machine.keeps_rows() {
            return read_positions(self, item);
        }
        let row = received_row(self, self.options.rows.layout(), item.source, item.token);
        self.machine
            .lanes(|lane| if lane == 0 { row } else { NOT_ROUTED })
    }

    /// Slots whose rows are on this rank. Rows that did not fit in dispatch's outputs are
    /// [marked](ferry_layout::OVERFLOWED), and so above every capacity.
    #[inline(always)]
    pub fn slots_here(&self, positions: M::Lanes<u32>) -> u32 {
        let machine = self.machine;
        machine.ballot(machine.lanes(|lane| {
            let position = machine.own(positions, lane);
            position != NOT_ROUTED && (position as u64) < self.args.row_capacity
        }))
    }

    /// Weight of the row at `position`, as bits: from the user's table, or else from `header` in the own
    /// window, as dispatch brought it; 1 for rows that stayed as they came. For one lane.
    #[inline(always)]
    pub fn row_weight(&self, position: u32, header: ByteOffset) -> u32 {
        let machine = self.machine;
        if machine.keeps_rows() {
            return 1f32.to_bits();
        }
        if self.options.row_weights == 0 {
            return machine.read_window(header);
        }
        // A slot without a row on this rank is not summed.
        match position != NOT_ROUTED && (position as u64) < self.args.row_capacity {
            true => machine.read(Table::RowWeights, position as u64),
            false => 0,
        }
    }
}

/// The output rows of an item's token, one a top-k slot, from [`Table::RowMap`].
#[inline(always)]
pub fn read_positions<M: Machine>(launch: &Launch<M>, item: Item) -> M::Lanes<u32> {
    let (machine, common) = (launch.machine, launch.common);
    let shape = &common.shape;
    machine.lanes(|lane| {
        lane_or_none(lane, shape.top_k, || {
            let assignment = shape.row_map_index(item.source, item.token, lane);
            machine.read(Table::RowMap, assignment)
        })
    })
}

/// Item `index` of all that can come to this rank, if it has arrived.
#[inline(always)]
pub fn item_here<M: Machine>(launch: &Launch<M>, extent: Extent, index: u32) -> Option<Item> {
    let (machine, common) = (launch.machine, launch.common);
    // The dispatch has seen these words arrive, and they stay until this rank returns its credit.
    let parts = machine.lanes(|_| extent.parts_here(launch, index).unwrap_or(0));
    let parts = machine.broadcast(parts, 0);
    (parts != 0).then(|| extent.item(&common.shape, common.rank(), index, parts))
}
