//! The protocol's memory of a block: shared memory of the GPU.

use ferry_layout::Arguments;
use ferry_protocol::{BlockMemory, LANES};

use super::Gpu;
use crate::ptx::memory::Vector;
use crate::ptx::{shared, thread};

impl<A: Arguments, const SHMEM: bool> BlockMemory for Gpu<'_, A, SHMEM> {
    #[inline(always)]
    fn thread(&self, _lane: u32) -> u32 {
        thread::thread()
    }

    #[inline(always)]
    fn threads(&self) -> u32 {
        thread::threads()
    }

    #[inline(always)]
    fn store_block(&self, at: u32, word: u32) {
        // SAFETY: the protocol stays inside the block's memory.
        unsafe { shared::store_u32(self.block.get().protocols(at), word) };
    }

    #[inline(always)]
    fn store_block_byte(&self, at: u32, byte: u32) {
        // SAFETY: the protocol stays inside the block's memory.
        unsafe { shared::store_u8(self.block.get().protocols(at), byte) };
    }

    #[inline(always)]
    fn store_block_vector(&self, at: u32, words: Vector) {
        // SAFETY: the protocol stays inside the block's memory.
        unsafe { shared::store_vector(self.block.get().protocols(at), words) };
    }

    #[inline(always)]
    fn count_in_block(&self, at: u32) {
        // SAFETY: the protocol stays inside the block's memory, and counts in words that it has stored, and
        // not loaded.
        unsafe { shared::count(self.block.get().protocols(at)) };
    }

    #[inline(always)]
    fn add_in_block(&self, at: u32, value: u32) -> u32 {
        // SAFETY: the protocol stays inside the block's memory, and adds to words that it has stored, and not
        // loaded.
        unsafe { shared::add(self.block.get().protocols(at), value) }
    }

    #[inline(always)]
    fn load_block(&self, at: u32) -> u32 {
        // SAFETY: the protocol stays inside the block's memory, and neither stores nor adds to a word that it
        // has loaded.
        unsafe { shared::load_u32(self.block.get().protocols(at)) }
    }

    #[inline(always)]
    fn load_block_byte(&self, at: u32) -> u32 {
        // SAFETY: the protocol stays inside the block's memory, and stores no byte that it has loaded.
        unsafe { shared::load_u8(self.block.get().protocols(at)) }
    }

    #[inline(always)]
    fn load_block_vector(&self, at: u32) -> Vector {
        // SAFETY: the protocol stays inside the block's memory, and neither stores nor adds to a word that it
        // has loaded.
        unsafe { shared::load_vector(self.block.get().protocols(at)) }
    }

    #[inline(always)]
    fn block_barrier(&self) {
        self.block.set(self.block.get().barrier());
    }

    #[inline(always)]
    fn agree(&self, brings: impl FnOnce() -> u32) -> u32 {
        if thread::thread() < LANES {
            let word = brings();
            if self.lane == 0 {
                self.block.get().bring(word);
            }
        }
        self.block_barrier();
        self.agreed()
    }

    #[inline(always)]
    fn agreed(&self) -> u32 {
        self.block.get().brought()
    }
}
