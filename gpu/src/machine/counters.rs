//! Words that the warps of a GPU share.

use bytemuck::cast;
use ferry_layout::{Arguments, Counter};
use ferry_protocol::Counters;

use super::{Gpu, PEEKED};
use crate::ptx::{memory, thread};

impl<A: Arguments, const SHMEM: bool> Counters for Gpu<'_, A, SHMEM> {
    #[inline(always)]
    fn add(&self, counter: Counter, amount: u64) -> u64 {
        thread::converge();
        let mut before = 0;
        if self.lane == 0 {
            // SAFETY: counters lie inside the workspace.
            before = unsafe { memory::add_acq_rel_gpu(self.counter(counter), amount) };
        }
        let halves: [u32; 2] = cast(before);
        thread::converge();
        cast(halves.map(|half| thread::broadcast(half, 0)))
    }

    #[inline(always)]
    fn count(&self, counter: Counter) {
        thread::converge();
        if self.lane == 0 {
            // SAFETY: counters lie inside the workspace.
            unsafe { memory::count_release_gpu(self.counter(counter)) };
        }
    }

    #[inline(always)]
    fn load(&self, counter: Counter) -> u64 {
        // SAFETY: counters lie inside the workspace.
        unsafe { memory::load_acquire_gpu(self.counter(counter)) }
    }

    #[inline(always)]
    fn load_relaxed(&self, counter: Counter) -> u64 {
        // SAFETY: counters lie inside the workspace.
        unsafe { memory::load_relaxed_gpu(self.counter(counter)) }
    }

    #[inline(always)]
    fn peek(&self, counter: Counter) -> u64 {
        match PEEKED.iter().position(|&peeked| peeked == counter) {
            Some(index) => self.block.get().word(index as u32),
            None => self.load(counter),
        }
    }

    #[inline(always)]
    fn store(&self, counter: Counter, value: u64) {
        thread::converge();
        if self.lane == 0 {
            // SAFETY: counters lie inside the workspace.
            unsafe { memory::store_release_gpu(self.counter(counter), value) };
        }
    }

    #[inline(always)]
    fn raise(&self, counter: Counter, value: u64) -> bool {
        let at = self.counter(counter);
        // Loaded first: of many callers, only one needs to change it.
        // SAFETY: counters lie inside the workspace.
        unsafe {
            memory::load_relaxed_gpu(at) < value && memory::max_relaxed_gpu(at, value) < value
        }
    }
}
