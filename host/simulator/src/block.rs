//! State shared by the warps of a block: counters, memory and a barrier.

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;

use ferry_layout::Counter;
use ferry_protocol::{BLOCK_MEMORY_BYTES, BlockCounter, LANES};

use crate::store_buffer::StoreBuffer;
use crate::write::Write;

/// State shared by the warps of a block.
#[derive(Default)]
pub struct Block {
    /// Values of counters when the launch began.
    pub peeked: [OnceCell<u64>; Counter::COUNT as usize],
    /// Its previous launch.
    pub last_launch: OnceCell<u64>,
    /// Credits of all ranks when the launch began, if they were asked for.
    pub credits: OnceCell<Vec<u64>>,
    /// Number of warps that have arrived on each block counter.
    pub arrivals: [Cell<u32>; BlockCounter::COUNT],
    /// Word that the first warp has brought.
    pub brought: Cell<u32>,
    /// Words handed to the last arriver, by warp.
    pub handed: [Cell<u64>; LANES as usize],
    /// Writes of the warps that have handed over, not yet visible to other ranks.
    pub writes: RefCell<Vec<Write>>,
    /// Store buffers of its warps.
    pub buffers: RefCell<Vec<Rc<RefCell<StoreBuffer>>>>,
    pub memory: RefCell<Memory>,
    pub barrier: Barrier,
}

impl Block {
    /// Number of barriers that all its warps have passed.
    pub fn barriers(&self) -> u16 {
        self.memory.borrow().barriers
    }
}

/// Barrier of the warps of a block.
#[derive(Default)]
pub struct Barrier {
    /// Number of warps that wait.
    arrived: Cell<u32>,
    /// Number of warps whose launch has ended.
    ended: Cell<u32>,
}

/// Error: some warps of a block wait for others that have ended.
#[derive(Debug, PartialEq, Eq)]
pub struct Missed;

impl Barrier {
    /// Arrives as one of `warps`. Returns whether it is the last one, which ends the wait of all.
    pub fn arrive(&self, warps: u32) -> Result<bool, Missed> {
        if self.ended.get() > 0 {
            return Err(Missed);
        }
        let arrived = self.arrived.get() + 1;
        self.arrived.set(arrived % warps);
        Ok(arrived == warps)
    }

    /// Leaves for good: a warp ends.
    pub fn leave(&self) -> Result<(), Missed> {
        self.ended.set(self.ended.get() + 1);
        match self.arrived.get() {
            0 => Ok(()),
            _ => Err(Missed),
        }
    }
}

/// Memory of a block. Refuses accesses whose outcome depends on the order of warps, in whatever order they
/// come.
#[derive(Default)]
pub struct Memory {
    /// Bytes up to the last one that was stored.
    bytes: Vec<Byte>,
    /// Last adders to words by address, if they used the previous values.
    adders: HashMap<u32, Adder>,
    /// Number of barriers that all warps have passed.
    pub barriers: u16,
}

/// A byte of a block's memory.
#[derive(Clone, Copy, Default)]
struct Byte {
    value: u8,
    /// Barriers passed when it was last stored, plus 1; 0 if nobody has stored it.
    stored: u16,
    /// Barriers passed when it was last added to, plus 1; 0 if nobody has.
    added: u16,
    is_loaded: bool,
}

/// Lanes of a warp that add to words in one call.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Adder {
    pub warp: u32,
    /// Number of the warp's call of `Machine::lanes`.
    pub call: u64,
}

/// A forbidden access and its position.
pub type Wrong = (&'static str, u32);

impl Memory {
    pub fn store(&mut self, at: u32, bytes: &[u8]) -> Result<(), Wrong> {
        let end = at as usize + bytes.len();
        if end > BLOCK_MEMORY_BYTES as usize {
            return Err(("stores outside", at));
        }
        if !(at as usize).is_multiple_of(bytes.len()) {
            return Err(("stores out of alignment", at));
        }
        if self.bytes.len() < end {
            self.bytes.resize(end, Byte::default());
        }
        let stored = self.barriers + 1;
        for (index, &value) in (at..).zip(bytes) {
            let byte = &mut self.bytes[index as usize];
            if byte.is_loaded {
                return Err(("stores what has been loaded", index));
            }
            if byte.stored == stored {
                return Err(("stores twice between two barriers", index));
            }
            *byte = Byte {
                value,
                stored,
                ..Byte::default()
            };
        }
        Ok(())
    }

    /// Adds to a word and returns the previous value. `adder` is given if the previous value is used.
    pub fn add(&mut self, at: u32, value: u32, adder: Option<Adder>) -> Result<u32, Wrong> {
        let barriers = self.barriers;
        let bytes = self.bytes.get_mut(at as usize..at as usize + 4);
        let Some(bytes) = bytes.filter(|_| at.is_multiple_of(4)) else {
            return Err(("adds to what nobody has stored, or out of alignment", at));
        };
        let last = self.adders.get(&at).copied();
        for byte in &mut *bytes {
            if byte.stored == 0 || byte.stored > barriers {
                return Err(("adds to what nobody has stored before a barrier", at));
            }
            if byte.is_loaded {
                return Err(("adds to what has been loaded", at));
            }
            if byte.added > barriers && last.map(|by| by.warp) != adder.map(|by| by.warp) {
                return Err(("adds what depends on the order of warps", at));
            }
            if byte.added > barriers && adder.is_some() && last == adder {
                return Err(("adds what depends on the order of lanes", at));
            }
            byte.added = barriers + 1;
        }
        match adder {
            Some(adder) => self.adders.insert(at, adder),
            None => self.adders.remove(&at),
        };
        let before = (0..4).fold(0, |word, byte| {
            word | u32::from(bytes[byte].value) << (8 * byte)
        });
        for (byte, value) in bytes.iter_mut().zip((before + value).to_le_bytes()) {
            byte.value = value;
        }
        Ok(before)
    }

    pub fn load<const COUNT: usize>(&mut self, at: u32) -> Result<[u8; COUNT], Wrong> {
        if !(at as usize).is_multiple_of(COUNT) {
            return Err(("loads out of alignment", at));
        }
        let mut values = [0; COUNT];
        for (index, value) in (at..).zip(&mut values) {
            match self.bytes.get_mut(index as usize) {
                Some(byte) if byte.stored > self.barriers => {
                    return Err(("loads before a barrier what was stored", index));
                }
                Some(byte) if byte.added > self.barriers => {
                    return Err(("loads before a barrier what was added", index));
                }
                Some(byte) if byte.stored > 0 => {
                    byte.is_loaded = true;
                    *value = byte.value;
                }
                _ => return Err(("loads what nobody has stored", index)),
            }
        }
        Ok(values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_stored_once_between_barriers_and_loaded_after_one() {
        let mut memory = Memory::default();
        assert_eq!(
            memory.load::<1>(0),
            Err(("loads what nobody has stored", 0))
        );
        memory.store(16, &[1; 16]).unwrap();
        let twice = "stores twice between two barriers";
        assert_eq!(memory.store(20, &[2; 4]), Err((twice, 20)));
        let early = "loads before a barrier what was stored";
        assert_eq!(memory.load::<4>(20), Err((early, 20)));
        memory.barriers += 1;
        memory.store(20, &[2; 4]).unwrap();
        memory.barriers += 1;
        assert_eq!(memory.load::<4>(20), Ok([2; 4]));
        assert_eq!(memory.load::<1>(24), Ok([1]));
        let loaded = "stores what has been loaded";
        assert_eq!(memory.store(24, &[3]), Err((loaded, 24)));
        memory.store(25, &[3]).unwrap();
        assert_eq!(
            memory.load::<4>(12),
            Err(("loads what nobody has stored", 12))
        );
    }

    #[test]
    fn words_are_stored_then_added_to_then_loaded_with_barriers_between() {
        let mut memory = Memory::default();
        let nobody = "adds to what nobody has stored, or out of alignment";
        assert_eq!(memory.add(0, 1, None), Err((nobody, 0)));
        memory.store(0, &[0; 16]).unwrap();
        assert_eq!(memory.add(2, 1, None), Err((nobody, 2)));
        let early = "adds to what nobody has stored before a barrier";
        assert_eq!(memory.add(4, 1, None), Err((early, 4)));
        memory.barriers += 1;
        assert_eq!(memory.add(4, 300, None), Ok(0));
        assert_eq!(memory.add(4, 1, None), Ok(300));
        let by = |warp, call| Some(Adder { warp, call });
        let order = "adds what depends on the order of warps";
        assert_eq!(memory.add(4, 1, by(1, 1)), Err((order, 4)));
        assert_eq!(memory.add(8, 5, by(1, 1)), Ok(0));
        assert_eq!(memory.add(8, 5, by(1, 2)), Ok(5));
        let of_lanes = "adds what depends on the order of lanes";
        assert_eq!(memory.add(8, 5, by(1, 2)), Err((of_lanes, 8)));
        assert_eq!(memory.add(8, 5, by(2, 3)), Err((order, 8)));
        let loaded_early = "loads before a barrier what was added";
        assert_eq!(memory.load::<4>(4), Err((loaded_early, 4)));
        memory.barriers += 1;
        assert_eq!(memory.add(8, 5, by(2, 4)), Ok(10));
        assert_eq!(memory.load::<4>(4), Ok(301u32.to_le_bytes()));
        assert_eq!(
            memory.add(4, 1, None),
            Err(("adds to what has been loaded", 4))
        );
    }

    #[test]
    fn a_warp_that_ends_is_missed_at_a_barrier() {
        let barrier = Barrier::default();
        for _ in 0..2 {
            assert_eq!(barrier.arrive(2), Ok(false));
            assert_eq!(barrier.arrive(2), Ok(true));
        }
        assert_eq!(barrier.leave(), Ok(()));
        assert_eq!(barrier.arrive(2), Err(Missed));
        let waiting = Barrier::default();
        assert_eq!(waiting.arrive(2), Ok(false));
        assert_eq!(waiting.leave(), Err(Missed));
    }

    #[test]
    fn accesses_outside_or_out_of_alignment_are_refused() {
        let mut memory = Memory::default();
        memory.store(BLOCK_MEMORY_BYTES - 4, &[0; 4]).unwrap();
        let end = BLOCK_MEMORY_BYTES;
        assert_eq!(memory.store(end, &[0]), Err(("stores outside", end)));
        assert_eq!(
            memory.store(2, &[0; 4]),
            Err(("stores out of alignment", 2))
        );
        assert_eq!(memory.load::<16>(8), Err(("loads out of alignment", 8)));
    }
}
