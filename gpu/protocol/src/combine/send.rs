//! Combine on the experts' rank: the results for received rows return to their sources.

use ferry_layout::{CombineMode, Counter, StagedEpoch};

use crate::combine::credits;
use crate::combine::launch::Combine;
use crate::combine::received::item_here;
use crate::combine::work::Work;
use crate::machine::Machine;
use crate::sync::launch::Aborted;
use crate::tactics::Wire;
use crate::tactics::combine::CombineTactics;
use crate::wire::remote::RowPuts;
use crate::work::batches::Batches;
use crate::work::extent::Extent;
use crate::work::partition::Partition;
use crate::work::queue::WorkQueue;

impl<M: Machine> Combine<'_, M> {
    /// Sends every row that this rank received back to its source: this warp's items, if it sends.
    #[inline(always)]
    pub fn send_back(
        &self,
        extent: Extent,
        tactics: CombineTactics,
        sender: Option<Partition>,
    ) -> Result<(), Aborted> {
        let machine = self.machine;
        if machine.warp() == 0 {
            machine.leave(Counter::DispatchTickets, 0);
        }
        let Some(partition) = sender else {
            return Ok(());
        };
        let items = extent.items(&self.common.shape);
        let batches = match tactics.batch {
            1 => Batches::none(items),
            size => Batches::of(items, partition.of, size),
        };
        let tickets = batches.tickets();
        let mut queue = WorkQueue::new(machine, partition, tickets, Counter::CombineTickets);
        let mut puts = RowPuts::none(machine);
        let mut has_read = false;
        while let Some(ticket) = queue.next_item() {
            let index = batches.first_item(ticket);
            if batches.is_batch(ticket) {
                self.send_batched(extent, index, || queue.take_ticket());
                continue;
            }
            let item = item_here(self, extent, index);
            // If items are flagged by block, a warp without one takes part, too.
            if item.is_none() && tactics.wire != Wire::FlaggedByBlock {
                queue.take_ticket();
                continue;
            }
            // Before the rows are written, so that nothing waits for their stores.
            let read = || match tactics.one_item_each {
                true => {
                    has_read = true;
                    credits::count_read(self, tactics)
                }
                false => Ok(()),
            };
            let work = Work {
                wire: tactics.wire,
                partition,
                items,
                item,
            };
            match self.common.shape.mode() {
                CombineMode::Reduced => {
                    puts = self.send_reduced(work, puts, read, || queue.take_ticket())?;
                }
                CombineMode::Exact => {
                    puts = self.send_exact(work, puts, || queue.take_ticket())?;
                }
            }
        }
        if machine.spans_nodes() {
            puts.flush(self, StagedEpoch::Combine)?;
        }
        if !has_read {
            credits::count_read(self, tactics)?;
        }
        // A warp that reduces late, if at all.
        if tactics.one_item_each && partition.index == partition.of / 2 {
            credits::wait_and_return(self)?;
        }
        Ok(())
    }
}
