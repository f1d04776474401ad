//! A queue of work items that the warps of a launch share.

use ferry_layout::Counter;

use crate::machine::Machine;
use crate::work::partition::Partition;

/// Hands out tasks to the warps of a [`Partition`]. Each warp's first task has the warp's index; every
/// further task goes to the next warp that asks. Among warps that store to peers at the same time, some get
/// several times the bandwidth of others, so equal numbers of tasks would end at different times.
pub struct WorkQueue<'m, M: Machine> {
    machine: &'m M,
    partition: Partition,
    tasks: u32,
    /// Tickets that all warps have taken in this launch; 0 before.
    counter: Counter,
    /// This warp's ticket, on lane 0: its task, counted from the first task that is taken by ticket. A warp's
    /// first task is before those, so the number wraps around.
    ticket: M::Lanes<u32>,
}

impl<'m, M: Machine> WorkQueue<'m, M> {
    /// Queue of `tasks` tasks, for the warp with this `partition`.
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

    /// Whether no warp gets more than one task.
    #[inline(always)]
    fn is_one_each(&self) -> bool {
        self.tasks <= self.partition.of
    }

    /// The task of this warp's ticket, if there is such a task. The first one is below `partition.of`. All
    /// lanes.
    #[inline(always)]
    pub fn next_item(&mut self) -> Option<u32> {
        let machine = self.machine;
        let task = self
            .partition
            .of
            .wrapping_add(machine.broadcast(self.ticket, 0));
        (task < self.tasks).then_some(task)
    }

    /// Takes the next ticket: once between two calls of [`next_item`](Self::next_item). Call it before long
    /// work, so that the counter's answer arrives meanwhile; but as late as possible, as no other warp does
    /// the task meanwhile. All lanes.
    #[inline(always)]
    pub fn take_ticket(&mut self) {
        self.ticket = match self.is_one_each() {
            true => self.machine.lanes(|_| 0),
            false => self.machine.take_ticket(self.counter),
        };
    }
}
