//! The end of every wait, on a GPU.

use ferry_layout::{Arguments, Counter};
use ferry_protocol::Deadline;

use super::{Gpu, POLLS};
use crate::ptx::{memory, thread};

impl<A: Arguments, const SHMEM: bool> Deadline for Gpu<'_, A, SHMEM> {
    #[inline(always)]
    fn now(&self) -> u64 {
        thread::global_timer_ns()
    }

    #[inline(always)]
    fn timed_out_by(&self, deadline: u64) -> bool {
        self.polls.set(self.polls.get() + 1);
        if !self.polls.get().is_multiple_of(POLLS) {
            return false;
        }
        thread::ballot(self.is_over(deadline)) != 0
    }

    #[inline(always)]
    fn lane_timed_out(&self, look: u32) -> bool {
        look.is_multiple_of(POLLS) && self.is_over(u64::MAX)
    }
}

impl<A: Arguments, const SHMEM: bool> Gpu<'_, A, SHMEM> {
    /// Whether this lane's launch should abort.
    #[inline(always)]
    fn is_over(&self, deadline: u64) -> bool {
        let is_late = thread::global_timer_ns() > self.block.get().deadline_ns().min(deadline);
        // SAFETY: counters lie inside the workspace.
        let stopped = unsafe { memory::load_relaxed_gpu(self.counter(Counter::Aborted)) };
        stopped != 0 || is_late
    }
}
