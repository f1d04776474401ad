//! Entries of rows by expert in the tables that the user asks for.

use ferry_layout::{Header, Table};

use crate::dispatch::launch::Dispatch;
use crate::machine::Machine;
use crate::work::item::Item;

impl<M: Machine> Dispatch<'_, M> {
    /// This rank's number in the group: with `skip_a2a`, a launch knows itself as rank 0.
    #[inline(always)]
    pub fn own_number(&self) -> u32 {
        match self.options.all_experts {
            0 => self.common.rank().0,
            _ => self.options.shared_index,
        }
    }

    /// Writes the entries of the rows `positions` of a token that has not travelled, one a top-k slot, for
    /// the slots `here`. `experts`: of each slot, counted from this rank's first. Its weights are in the own
    /// window.
    #[inline(always)]
    pub fn describe_own_rows(
        &self,
        item: Item,
        positions: M::Lanes<u32>,
        here: u32,
        experts: M::Lanes<u32>,
    ) {
        let (machine, common) = (self.machine, self.common);
        let row = common.window.dispatch_row(item.source, item.token);
        let header = row.plus(common.row.header);
        machine.lanes(|lane| {
            if here >> lane & 1 != 0 {
                let weight = Header::weight(common.shape.top_k, lane);
                let weight = machine.read_window(header.plus(weight));
                let group = machine.own(experts, lane) + self.options.has_shared_expert() as u32;
                let position = machine.own(positions, lane) as u64;
                let source = [self.options.shared_index, item.token, lane];
                self.write_entries(position, group, weight, source);
            }
        });
    }

    /// Writes a row's entries of the tables that there are. For one lane.
    #[inline(always)]
    pub fn write_entries(
        &self,
        row: u64,
        group: u32,
        weight: u32,
        [source, token, slot]: [u32; 3],
    ) {
        let (machine, tables) = (self.machine, &self.options.groups);
        if tables.m_indices != 0 {
            machine.write(Table::GroupsOfRows, row, group);
        }
        if tables.weights != 0 {
            machine.write(Table::WeightsOfRows, row, weight);
            machine.write(Table::SrcInfo, 3 * row, source);
            machine.write(Table::SrcInfo, 3 * row + 1, token);
            machine.write(Table::SrcInfo, 3 * row + 2, slot);
        }
    }
}
