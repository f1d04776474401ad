//! Writes of a warp that are not visible to others yet.

use rand::Rng;

use crate::addresses::rank_of;
use crate::shared::Shared;
use crate::write::Write;

/// Maximum number of writes in a store buffer; a full one drains.
const BUFFERED: usize = 48;

/// More barriers than a block passes, to select all writes.
pub const EVER: u16 = u16::MAX;

/// Writes of a warp that are not visible to others yet.
pub struct StoreBuffer {
    rank: u32,
    pub writes: Vec<Write>,
}

impl StoreBuffer {
    pub fn new(rank: u32) -> Self {
        Self {
            rank,
            writes: Vec::new(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.writes.is_empty()
    }

    pub fn push(&mut self, write: Write, shared: &Shared) {
        if let Err(outside) = shared
            .memory
            .borrow()
            .check_write(write.address, write.bytes.len() as u64)
        {
            return shared.report(outside, &format!("rank {}", self.rank));
        }
        shared.note_work(self.rank);
        self.writes.push(write);
        if self.writes.len() > BUFFERED {
            self.drain_one(shared);
        }
    }

    /// Makes a random write visible; writes to the same place stay in order.
    pub fn drain_one(&mut self, shared: &Shared) {
        let chosen = shared.rng.borrow_mut().random_range(0..self.writes.len());
        let first = (0..chosen)
            .find(|&earlier| overlap(&self.writes[earlier], &self.writes[chosen]))
            .unwrap_or(chosen);
        let write = self.writes.remove(first);
        shared.commit(self.rank, write);
    }

    pub fn drain_all(&mut self, shared: &Shared) {
        self.drain_before(EVER, shared);
    }

    /// Makes the writes visible that were made before so many barriers of the block.
    pub fn drain_before(&mut self, barriers: u16, shared: &Shared) {
        self.drain_if(shared, |write| write.barriers < barriers);
    }

    /// Does the same as [`drain_before`](Self::drain_before) for writes to the own rank's memory, the effect
    /// of a device-scope release.
    pub fn drain_own_before(&mut self, barriers: u16, shared: &Shared) {
        let own = Some(self.rank as usize);
        self.drain_if(shared, |write| {
            write.barriers < barriers && rank_of(write.address) == own
        });
    }

    /// Does the same as [`drain_before`](Self::drain_before) for writes that overlap `bytes` bytes.
    pub fn drain_under(&mut self, address: u64, bytes: u64, barriers: u16, shared: &Shared) {
        let read = address..address + bytes;
        self.drain_if(shared, |write| {
            write.barriers < barriers
                && write.address < read.end
                && read.start < write.address + write.bytes.len() as u64
        });
    }

    fn drain_if(&mut self, shared: &Shared, chosen: impl Fn(&Write) -> bool) {
        if !self.writes.iter().any(&chosen) {
            return;
        }
        let out: Vec<_> = self.writes.extract_if(.., |write| chosen(write)).collect();
        for write in out {
            shared.commit(self.rank, write);
        }
    }
}

fn overlap(a: &Write, b: &Write) -> bool {
    a.address < b.address + b.bytes.len() as u64 && b.address < a.address + a.bytes.len() as u64
}
