//! Received rows that stay as they came: one for each (source rank, token) with an expert here.
//!
//! Nobody waits for numbers of assignments. A row of a view is in its place once it has arrived, unless it
//! came with inline flags; strided rows are copied to the same places of the outputs. Only rows that are
//! moved together wait, for the number of rows before them. All words of a row are acquired before the launch
//! ends, so later kernels of its stream read views without a fence.

mod count;
mod describe;
mod place;

use ferry_layout::{Counter, ReceiveLayout, ReceivedRows, Region};

use crate::dispatch::launch::Dispatch;
use crate::dispatch::receive::batch::Batch;
use crate::dispatch::receive::counts::wait_for_token_counts;
use crate::machine::Machine;
use crate::machine::miss::TimedOut;
use crate::sync::launch::{Aborted, Awaited};
use crate::tactics::roles::computes_offsets;
use crate::wire::flagged;
use crate::work::item::Item;
use crate::work::partition::Partition;
use crate::work::received_row::received_row;

/// Outputs of a launch that receives rows.
struct Receiver<'a, M> {
    dispatch: &'a Dispatch<'a, M>,
    rows: &'a ReceivedRows,
    layout: ReceiveLayout,
    /// Whether received ids are i64.
    is_wide: bool,
    /// Whether receivers count assignments themselves, as not all rows fit in the outputs.
    overflows: bool,
}

impl<M: Machine> Dispatch<'_, M> {
    /// Receives this warp's partition of the items that may arrive, and writes its part of the tables.
    #[inline(always)]
    pub fn receive_unsorted(&self, partition: Partition) -> Result<(), Aborted> {
        let (machine, shape) = (self.machine, &self.common.shape);
        let mut receiver = Receiver {
            dispatch: self,
            rows: &self.options.rows,
            layout: self.options.rows.layout(),
            is_wide: self.options.wide_ids != 0,
            overflows: false,
        };
        if computes_offsets(shape, partition) {
            receiver.count_rows()?;
        }
        let extent = wait_for_token_counts(self)?;
        // A warp that receives nothing, if there is one.
        if partition.index == partition.of - 1 {
            machine.store(Counter::Extent, extent.word());
        }
        if receiver.layout == ReceiveLayout::Compact {
            self.wait_for_offsets()?;
            receiver.overflows = self.has_overflowed();
        }
        receiver.describe_rest(extent, partition);
        let mut batch = Batch::first(shape, extent, partition);
        while batch.is_some() {
            let present = self.wait_lanes(
                |lane: u32| batch.present(self, lane),
                |lane| batch.awaited(self, lane),
            )?;
            let parts = machine.lanes(|lane| machine.own(present, lane).unwrap_or(0));
            receiver.receive_batch(batch, parts)?;
            batch = batch.next();
        }
        Ok(())
    }
}

impl<M: Machine> Receiver<'_, M> {
    /// Receives the items of a batch that come to this rank, as they arrive, and describes the rows of the
    /// others. `parts`: those of each lane's item, 0 if it does not come.
    #[inline(always)]
    fn receive_batch(&self, batch: Batch, parts: M::Lanes<u32>) -> Result<(), Aborted> {
        let (machine, common, epoch) = (
            self.dispatch.machine,
            self.dispatch.common,
            self.dispatch.epoch,
        );
        let item = |lane: u32, parts| batch.item(lane, parts, &common.shape, common.rank());
        let is_first = |lane| item(lane, 1).part == 0;
        let coming = machine.ballot(machine.lanes(|lane| machine.own(parts, lane) != 0));
        let absent = machine.ballot(
            machine
                .lanes(|lane| batch.has(lane) && is_first(lane) && machine.own(parts, lane) == 0),
        );
        // Rows that are moved together have none for the others.
        if self.layout != ReceiveLayout::Compact {
            self.describe_absent(batch, absent);
        }
        let rows = machine.lanes(|lane| match coming >> lane & 1 != 0 {
            true => {
                let Item { source, token, .. } = item(lane, 1);
                received_row(self.dispatch, self.layout, source, token)
            }
            false => 0,
        });
        let flags = machine.lanes(|lane| {
            let Item { source, .. } = item(lane, 1);
            let parts = machine.own(parts, lane);
            common
                .window
                .dispatch_flag(source, item(lane, parts).flag())
        });
        let is_inline = |lane| common.dispatches_inline(machine.own(parts, lane));
        let mut left = coming;
        while left != 0 {
            let arrived = self.dispatch.wait_any(
                left,
                |lane| {
                    is_inline(lane) || flagged::is_full(machine, machine.own(flags, lane), epoch)
                },
                |lane| Awaited {
                    peer: item(lane, 1).source,
                    region: Region::DispatchRow,
                    index: item(lane, 1).token as u64,
                    saw: machine.load_signal(machine.own(flags, lane)),
                },
            )?;
            left &= !arrived;
            let described = machine.lanes(|lane| !is_inline(lane) && is_first(lane));
            self.describe_arrived(batch, arrived & machine.ballot(described), rows);
            let mut arrived = arrived;
            while arrived != 0 {
                let lane = arrived.trailing_zeros();
                arrived &= arrived - 1;
                let parts = machine.broadcast(parts, lane);
                let row = machine.broadcast(rows, lane);
                let item = item(lane, parts);
                self.place(item, row)
                    .or_else(|timed_out| self.time_out(item, timed_out))?;
            }
        }
        Ok(())
    }

    /// Times out the wait for the words of an item.
    #[inline(always)]
    fn time_out(&self, item: Item, _: TimedOut) -> Result<(), Aborted> {
        self.dispatch.time_out_on(Awaited {
            peer: item.source,
            region: Region::DispatchRow,
            index: item.token as u64,
            saw: 0,
        })
    }
}
