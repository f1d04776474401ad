//! A queue of work items that the warps of a launch share.

use ferry_layout::Counter;

use crate::machine::Machine;
use crate::work::partition::Partition;

/// Deals tasks to the warps that share them: the first ones one each, the others to whoever is done
/// first. Of warps that store to peers at the same time, some get several times as much of the wire as
/// others.
pub struct WorkQueue<'m, M: Machine> {
    machine: &'m M,
    partition: Partition,
    tasks: u32,
    /// Draws of all warps in this launch; 0 before.
    counter: Counter,
    /// Which of the tasks after everybody's first one is the next, on lane 0. Wraps around for a first one.
    ticket: M::Lanes<u32>,
}

impl<'m, M: Machine> WorkQueue<'m, M> {
    /// Of `tasks` tasks, for the warp with this `partition`.
    #[inline(always)]
    pub fn new(machine: &'m M, partition: Partition, tasks: u32, counter: Counter) -> Self {
        partition.debug_assert_is_one();
        Self {
            machine,
            partition,
            tasks,
            counter,
            ticket: machine.lanes(|_| partition.index.wrapping_sub(partition.of)),
        }
    }

    /// Whether no warp gets more than one.
    #[inline(always)]
    fn is_one_each(&self) -> bool {
        self.tasks <= self.partition.of
    }

    /// This warp's next task; its first one is below `partition.of`. All lanes.
    #[inline(always)]
    pub fn next_item(&mut self) -> Option<u32> {
        let machine = self.machine;
        let task = self
            .partition
            .of
            .wrapping_add(machine.broadcast(self.ticket, 0));
        (task < self.tasks).then_some(task)
    }

    /// Asks for the next task: once between two calls of [`next_item`](Self::deal), before something that takes
    /// long, so that nobody waits for the counter; but late, as nobody else does the task meanwhile. All lanes.
    #[inline(always)]
    pub fn take_ticket(&mut self) {
        self.ticket = match self.is_one_each() {
            true => self.machine.lanes(|_| 0),
            false => self.machine.take_ticket(self.counter),
        };
    }
}
