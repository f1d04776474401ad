//! Where a warp's windows, tables and signals are, and how it loads and stores bytes. Each address
//! is checked against the allocation that it is for.

use ferry_layout::{Arguments, Counter, Rank, Table};

use super::Warp;
use crate::args::Args;
use crate::error::SimulatorError;
use crate::memory::{Memory, Outside};
use crate::store_buffer::{Polled, Write};

/// The most bytes of a row that become visible at once.
const MAX_BYTES: usize = 1024;
/// Likewise of a row with inline flags, whose reader must not take one word for another: no multiple of 16.
const MAX_INLINE_BYTES: usize = 404;

impl Warp<'_> {
    /// The value of an access, or the end of this simulation: the scheduler sees the report and
    /// never comes back here.
    pub(super) fn checked<T>(&self, result: Result<T, Outside>) -> T {
        match result {
            Ok(value) => value,
            Err(outside) => {
                self.shared.report(outside, &self.name());
                self.end_here()
            }
        }
    }

    pub(super) fn end_here(&self) -> ! {
        loop {
            self.pause();
        }
    }

    pub(super) fn with_memory<T>(&self, access: impl FnOnce(&Memory) -> Result<T, Outside>) -> T {
        let result = access(&self.shared.memory.borrow());
        self.checked(result)
    }

    /// `address`, if it lies in the allocation of `base`.
    pub(super) fn within(&self, base: u64, address: u64) -> u64 {
        if !self
            .shared
            .memory
            .borrow()
            .are_in_one_allocation(base, address)
        {
            let error = SimulatorError::StrayAccess {
                seed: self.shared.seed,
                address,
                base,
                by: self.name(),
            };
            self.shared.violation.borrow_mut().get_or_insert(error);
            self.end_here();
        }
        address
    }

    /// The start of a rank's window as this rank addresses it.
    pub(super) fn window(&self, rank: Rank) -> u64 {
        self.with_memory(|memory| memory.read_u64(self.common.peers + 8 * u64::from(rank.0)))
    }

    /// The window of a rank that must be on this node.
    pub(super) fn mapped_window(&self, rank: Rank) -> u64 {
        let (seed, me) = (self.shared.seed, self.common.rank());
        if !self.common.shape.same_node(me, rank) {
            let error = SimulatorError::NotMapped {
                seed,
                rank: me.0,
                peer: rank.0,
            };
            self.shared.violation.borrow_mut().get_or_insert(error);
            self.end_here();
        }
        self.window(rank)
    }

    /// The same place in the window of a rank of another node, found from the symmetric address
    /// as NVSHMEM does.
    pub(super) fn remote_address(&self, rank: Rank, offset: u64) -> u64 {
        // Windows are allocated symmetrically: at the same place in each rank's memory.
        let own = self.window(self.common.rank());
        let stride = 1 << 40;
        let far = own - stride * u64::from(self.common.rank().0) + stride * u64::from(rank.0);
        self.within(far, far + offset)
    }

    pub(super) fn table(&self, table: Table) -> u64 {
        match &*self.args {
            Args::Dispatch(args) => args.table(table),
            Args::Combine(args) => args.table(table),
            Args::Silu(_) => 0,
        }
    }

    /// The place `bytes` after the start of a table.
    pub(super) fn in_table(&self, table: Table, bytes: u64) -> u64 {
        let base = self.table(table);
        self.within(base, base.wrapping_add(bytes))
    }

    /// A place in the own window.
    pub(super) fn in_window(&self, bytes: u64) -> u64 {
        let window = self.window(self.common.rank());
        self.within(window, window + bytes)
    }

    pub(super) fn counter(&self, counter: Counter) -> u64 {
        self.common.workspace + counter.bytes()
    }

    pub fn load_bytes(&self, address: u64, bytes: u64) -> Vec<u8> {
        self.see(address, bytes);
        self.with_memory(|memory| memory.read(address, bytes).map(<[u8]>::to_vec))
    }

    pub fn load_word(&self, address: u64) -> u32 {
        self.see(address, 4);
        self.with_memory(|memory| memory.read_u32(address))
    }

    pub fn store_bytes(&self, address: u64, bytes: &[u8], polled: Polled) {
        // What others of the block wrote there before a barrier is older.
        self.see_others(address, bytes.len() as u64);
        let mut buffer = self.buffer.borrow_mut();
        let part_bytes = match polled {
            Polled::Inline => MAX_INLINE_BYTES,
            _ => MAX_BYTES,
        };
        for (index, part) in bytes.chunks(part_bytes).enumerate() {
            let address = address + (index * part_bytes) as u64;
            buffer.push(
                Write {
                    address,
                    bytes: part.to_vec(),
                    polled,
                    barriers: self.block.barriers(),
                },
                &self.shared,
            );
        }
    }
}
