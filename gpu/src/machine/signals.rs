//! Words that peers or the host read, on a GPU.

use ferry_layout::{Arguments, Rank, Signal, Table, Tagged};
use ferry_protocol::{Host, Signals};

use super::Gpu;
use crate::ptx::{memory, thread};

impl<A: Arguments, const SHMEM: bool> Signals for Gpu<'_, A, SHMEM> {
    #[inline(always)]
    fn release(&self) {
        thread::converge();
        // Every lane fences, so that any of them may signal: a release pattern is a fence and
        // then a store of the same thread.
        memory::fence_acq_rel_sys();
    }

    #[inline(always)]
    fn signal(&self, to: Rank, at: Signal, value: u64) {
        // SAFETY: signals lie inside the windows, which hold 64-bit words there, and the rank is on this
        // node.
        unsafe { memory::store_relaxed_sys(self.window(to) + at.bytes(), value) };
    }

    #[inline(always)]
    fn load_signal(&self, at: Signal) -> u64 {
        // SAFETY: signals lie inside the own window.
        unsafe { memory::load_acquire_sys(self.window(self.common().rank()) + at.bytes()) }
    }

    #[inline(always)]
    fn load_tagged(&self, at: Signal) -> Tagged {
        // SAFETY: signals lie inside the own window.
        Tagged(unsafe { memory::load_relaxed_sys(self.window(self.common().rank()) + at.bytes()) })
    }
}

impl<A: Arguments, const SHMEM: bool> Host for Gpu<'_, A, SHMEM> {
    #[inline(always)]
    fn tell_host(&self, ticket: u64) {
        // SAFETY: the counts, which begin with the ticket, follow the fault page: the host built the
        // arguments with their memory.
        unsafe { memory::store_relaxed_sys(self.args.table(Table::HostCounts), ticket) }
    }
}
