//! A warp's access to the memory and the barrier of its block.

use ferry_protocol::{BlockMemory, LANES, Machine};

use super::Warp;
use crate::block::{Adder, Memory, Missed, Wrong};
use crate::error::SimulatorError;

impl Warp<'_> {
    fn in_block<T>(&self, access: impl FnOnce(&mut Memory) -> Result<T, Wrong>) -> T {
        let result = access(&mut self.block.memory.borrow_mut());
        result.unwrap_or_else(|(what, at)| {
            self.fail(SimulatorError::BlockMemory {
                seed: self.shared.seed,
                by: self.name(),
                what,
                at,
            })
        })
    }

    /// Ends the simulation if a barrier was missed.
    fn checked_barrier<T>(&self, result: Result<T, Missed>) -> T {
        result.unwrap_or_else(|Missed| {
            self.fail(SimulatorError::MissedBarrier {
                seed: self.shared.seed,
                rank: self.rank,
                block: self.warp_position().block,
            })
        })
    }

    /// Notes that this warp has ended: no warp of its block may wait for it any more.
    pub fn leave_block(&self) {
        self.checked_barrier(self.block.barrier.leave());
    }
}

impl BlockMemory for Warp<'_> {
    fn thread(&self, lane: u32) -> u32 {
        self.warp_position().index * LANES + lane
    }

    fn threads(&self) -> u32 {
        self.warp_position().in_block * LANES
    }

    fn store_block(&self, at: u32, word: u32) {
        self.in_block(|memory| memory.store(at, &word.to_le_bytes()));
    }

    fn store_block_byte(&self, at: u32, byte: u32) {
        self.in_block(|memory| memory.store(at, &[byte as u8]));
    }

    fn store_block_vector(&self, at: u32, words: [u32; 4]) {
        let bytes: [u8; 16] = bytemuck::cast(words.map(u32::to_le_bytes));
        self.in_block(|memory| memory.store(at, &bytes));
    }

    fn count_in_block(&self, at: u32) {
        self.in_block(|memory| memory.add(at, 1, None));
    }

    fn add_in_block(&self, at: u32, value: u32) -> u32 {
        let adder = Adder {
            warp: self.number,
            call: self.lanes_calls.get(),
        };
        self.in_block(|memory| memory.add(at, value, Some(adder)))
    }

    fn load_block(&self, at: u32) -> u32 {
        u32::from_le_bytes(self.in_block(|memory| memory.load(at)))
    }

    fn load_block_byte(&self, at: u32) -> u32 {
        let [byte] = self.in_block(|memory| memory.load(at));
        u32::from(byte)
    }

    fn load_block_vector(&self, at: u32) -> [u32; 4] {
        let bytes: [u8; 16] = self.in_block(|memory| memory.load(at));
        bytemuck::cast::<_, [[u8; 4]; 4]>(bytes).map(u32::from_le_bytes)
    }

    fn block_barrier(&self) {
        let memory = &self.block.memory;
        let barriers = || memory.borrow().barriers;
        let before = barriers();
        if self.checked_barrier(self.block.barrier.arrive(self.warp_position().in_block)) {
            memory.borrow_mut().barriers += 1;
            self.shared.bump(self.rank);
            return self.pause();
        }
        while barriers() == before {
            // Only the last warp of the block can end this.
            self.idle_at.set(Some(self.shared.version(self.rank)));
            self.pause();
        }
    }

    fn agree(&self, brings: impl FnOnce() -> u32) -> u32 {
        if self.warp_position().index == 0 {
            self.block.brought.set(brings());
        }
        self.block_barrier();
        self.agreed()
    }

    fn agreed(&self) -> u32 {
        self.block.brought.get()
    }
}
