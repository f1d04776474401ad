//! Device memory of all ranks, checked at every access.

use std::cell::Cell;

use crate::addresses::{Machine, RANK_SHIFT, rank_of};
use crate::error::SimulatorError;

/// Allocations start at multiples of this, with a gap of as much behind each.
const ALIGN: u64 = 256;
/// Content of fresh memory: as a BF16 a large number, as a word neither 0 nor -1.
const PATTERN: u8 = 0x5a;

/// Bytes of a page, for which a rank remembers the allocation that was accessed last.
const PAGE: u64 = 1024;
/// Pages that a rank remembers.
const RECENT: usize = 64;

/// An access outside every live allocation.
#[derive(Clone, Copy, Debug)]
pub struct Outside {
    pub what: &'static str,
    pub address: u64,
    pub bytes: u64,
}

struct Allocation {
    start: u64,
    bytes: Vec<u8>,
}

impl Allocation {
    fn holds(&self, address: u64, bytes: u64) -> bool {
        address >= self.start && address + bytes <= self.start + self.bytes.len() as u64
    }
}

struct RankMemory {
    /// Ascending by start.
    live: Vec<Allocation>,
    next: u64,
    /// Indices of the allocations that were accessed last, by the page of the address: the next access to a
    /// page likely has the same one.
    recent: [Cell<usize>; RECENT],
}

impl RankMemory {
    fn new() -> Self {
        Self {
            live: Vec::new(),
            next: 0,
            recent: [const { Cell::new(0) }; RECENT],
        }
    }

    /// Index of the allocation that was accessed last in the page of `address`.
    fn recent_of(&self, address: u64) -> &Cell<usize> {
        &self.recent[(address / PAGE) as usize % RECENT]
    }

    /// Looks for the allocation that holds `bytes` bytes at `address` among all, and remembers it.
    #[cold]
    fn search(&self, address: u64, bytes: u64) -> Option<(usize, &Allocation)> {
        let above = self.live.partition_point(|a| a.start <= address);
        let index = above.checked_sub(1)?;
        let found = &self.live[index];
        found.holds(address, bytes).then(|| {
            self.recent_of(address).set(index);
            (index, found)
        })
    }
}

pub struct Memory {
    ranks: Vec<RankMemory>,
    machine: Machine,
}

impl Memory {
    pub fn new(ranks: u32, machine: Machine) -> Self {
        Self {
            machine,
            ranks: (0..ranks).map(|_| RankMemory::new()).collect(),
        }
    }

    pub fn alloc(&mut self, rank: u32, bytes: u64) -> Result<u64, SimulatorError> {
        let ranks = self.ranks.len() as u32;
        let memory = self
            .ranks
            .get_mut(rank as usize)
            .ok_or(SimulatorError::NoSuchRank { rank, ranks })?;
        let out_of_memory = || SimulatorError::OutOfMemory { rank, bytes };
        let next = memory
            .next
            .checked_add(ALIGN)
            .and_then(|next| next.checked_add(bytes.checked_next_multiple_of(ALIGN)?))
            // Behind those addresses the next rank's begin.
            .filter(|&next| next <= 1 << RANK_SHIFT)
            .ok_or_else(out_of_memory)?;
        let mut content = Vec::new();
        content
            .try_reserve_exact(bytes as usize)
            .map_err(|_| out_of_memory())?;
        content.resize(bytes as usize, PATTERN);
        let start = self.machine.base() + ((u64::from(rank) + 1) << RANK_SHIFT) + memory.next;
        memory.next = next;
        memory.live.push(Allocation {
            start,
            bytes: content,
        });
        Ok(start)
    }

    /// Allocates `bytes` on every rank, at the same place in each rank's memory; on none where one fails.
    pub fn alloc_symmetric(&mut self, bytes: u64) -> Result<Vec<u64>, SimulatorError> {
        let next = self.ranks.iter().map(|memory| memory.next).max();
        for memory in &mut self.ranks {
            memory.next = next.unwrap_or(0);
        }
        let mut addresses = Vec::new();
        for rank in 0..self.ranks.len() as u32 {
            match self.alloc(rank, bytes) {
                Ok(address) => addresses.push(address),
                Err(error) => {
                    // The newest of each rank's.
                    let allocated = &mut self.ranks[..rank as usize];
                    allocated.iter_mut().for_each(|memory| {
                        memory.live.pop();
                    });
                    return Err(error);
                }
            }
        }
        Ok(addresses)
    }

    pub fn free(&mut self, address: u64) -> Result<(), Outside> {
        let outside = Outside {
            what: "free",
            address,
            bytes: 0,
        };
        let memory = rank_of(address)
            .and_then(|rank| self.ranks.get_mut(rank))
            .ok_or(outside)?;
        let index = memory
            .live
            .binary_search_by_key(&address, |a| a.start)
            .map_err(|_| outside)?;
        memory.live.remove(index);
        Ok(())
    }

    pub fn read(&self, address: u64, count: u64) -> Result<&[u8], Outside> {
        let (rank, index, offset) = self.find("read", address, count)?;
        Ok(&self.ranks[rank].live[index].bytes[offset..offset + count as usize])
    }

    pub fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), Outside> {
        let (rank, index, offset) = self.find("write", address, bytes.len() as u64)?;
        self.ranks[rank].live[index].bytes[offset..offset + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    pub fn check_write(&self, address: u64, count: u64) -> Result<(), Outside> {
        self.find("write", address, count).map(|_| ())
    }

    pub fn read_u32(&self, address: u64) -> Result<u32, Outside> {
        let bytes = self.read(address, 4)?;
        Ok(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
    }

    pub fn read_u64(&self, address: u64) -> Result<u64, Outside> {
        let mut word = [0; 8];
        word.copy_from_slice(self.read(address, 8)?);
        Ok(u64::from_le_bytes(word))
    }

    /// Whether both addresses lie in the same allocation.
    pub fn are_in_one_allocation(&self, one: u64, other: u64) -> bool {
        let found = self.find("access", one, 1);
        found.is_ok_and(|(rank, index, _)| self.ranks[rank].live[index].holds(other, 1))
    }

    /// Rank and index of the allocation that holds `bytes` bytes at `address`, and their offset in it.
    #[inline]
    fn find(
        &self,
        what: &'static str,
        address: u64,
        bytes: u64,
    ) -> Result<(usize, usize, usize), Outside> {
        let found = rank_of(address)
            .and_then(|rank| Some((rank, self.ranks.get(rank)?)))
            .and_then(|(rank, memory)| {
                let index = memory.recent_of(address).get();
                let is_recent = |allocation: &&Allocation| allocation.holds(address, bytes);
                let recent = memory.live.get(index).filter(is_recent);
                let (index, found) = match recent {
                    Some(found) => (index, found),
                    None => memory.search(address, bytes)?,
                };
                Some((rank, index, (address - found.start) as usize))
            });
        found.ok_or(Outside {
            what,
            address,
            bytes,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_refused() {
        let mut memory = Memory::new(2, Machine::next());
        let first = memory.alloc(0, 8).unwrap();
        for bytes in [1 << RANK_SHIFT, u64::MAX - 10, u64::MAX] {
            let refused = Some(SimulatorError::OutOfMemory { rank: 0, bytes });
            assert_eq!(memory.alloc(0, bytes).err(), refused);
            assert_eq!(memory.alloc_symmetric(bytes).err(), refused);
        }
        // The second rank alone has no addresses left.
        memory.ranks[1].next = (1 << RANK_SHIFT) - 2 * ALIGN;
        memory.alloc(1, ALIGN).unwrap();
        let (rank, bytes) = (1, 0);
        let refused = Err(SimulatorError::OutOfMemory { rank, bytes });
        assert_eq!(memory.alloc(rank, bytes), refused);
        assert_eq!(memory.ranks[0].live.len(), 1);
        let refused = Err(SimulatorError::OutOfMemory { rank: 0, bytes });
        assert_eq!(memory.alloc_symmetric(bytes), refused);
        assert_eq!(memory.read(first, 8).unwrap().len(), 8);
    }

    #[test]
    fn accesses_outside_are_refused() {
        let mut memory = Memory::new(2, Machine::next());
        let (a, b) = (memory.alloc(1, 100).unwrap(), memory.alloc(1, 8).unwrap());
        memory.write(a + 92, &[1; 8]).unwrap();
        assert!(memory.write(a + 93, &[1; 8]).is_err());
        assert!(memory.read(a - 1, 1).is_err());
        assert!(memory.read(0, 1).is_err());
        assert_eq!(memory.read_u64(b).unwrap(), 0x5a5a_5a5a_5a5a_5a5a);
        assert!(memory.are_in_one_allocation(a, a + 99));
        assert!(!memory.are_in_one_allocation(a, a + 100) && !memory.are_in_one_allocation(a, b));
        memory.free(a).unwrap();
        assert!(memory.read(a, 1).is_err());
        assert!(memory.free(a).is_err());
        assert_eq!(memory.read(b, 8).unwrap().len(), 8);
    }
}
