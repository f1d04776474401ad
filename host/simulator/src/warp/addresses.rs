//! Addresses of a warp's windows, tables and signals, and its loads and stores of bytes. Each address is
//! checked against the allocation that it is for.

use ferry_layout::{Args, Arguments, Counter, Rank, Table};

use super::Warp;
use crate::addresses::RANK_SHIFT;
use crate::error::SimulatorError;
use crate::memory::{Memory, Outside};
use crate::write::{Polled, Write};

/// Most bytes of a row that become visible at once.
const MAX_BYTES: usize = 1024;
/// Most bytes of a row with inline flags that become visible at once. Not a multiple of 16, so that vectors
/// become visible in parts, as their reader must expect.
const MAX_INLINE_BYTES: usize = 404;

impl Warp<'_> {
    /// The value of an access, or the end of the simulation.
    pub(super) fn checked<T>(&self, result: Result<T, Outside>) -> T {
        match result {
            Ok(value) => value,
            Err(outside) => {
                self.shared.report(outside, &self.name());
                self.end_here()
            }
        }
    }

    /// Ends the simulation with an error.
    pub(super) fn fail(&self, error: SimulatorError) -> ! {
        self.shared.fail(error);
        self.end_here()
    }

    /// Yields for ever: the scheduler sees the error and never resumes this warp.
    fn end_here(&self) -> ! {
        loop {
            self.pause();
        }
    }

    pub(super) fn with_memory<T>(&self, access: impl FnOnce(&Memory) -> Result<T, Outside>) -> T {
        let result = access(&self.shared.memory.borrow());
        self.checked(result)
    }

    /// Checks that `address` is in the allocation of `base`, and returns it.
    pub(super) fn within(&self, base: u64, address: u64) -> u64 {
        if !self
            .shared
            .memory
            .borrow()
            .are_in_one_allocation(base, address)
        {
            self.fail(SimulatorError::StrayAccess {
                seed: self.shared.seed,
                address,
                base,
                by: self.name(),
            });
        }
        address
    }

    /// Start of a rank's window, as this rank addresses it.
    pub(super) fn window(&self, rank: Rank) -> u64 {
        self.with_memory(|memory| memory.read_u64(self.common.peers + 8 * u64::from(rank.0)))
    }

    /// The window of a rank that must be on this node.
    pub(super) fn mapped_window(&self, rank: Rank) -> u64 {
        let (seed, me) = (self.shared.seed, self.common.rank());
        if !self.common.shape.same_node(me, rank) {
            self.fail(SimulatorError::NotMapped {
                seed,
                rank: me.0,
                peer: rank.0,
            });
        }
        self.window(rank)
    }

    /// Address of an offset in the window of a rank of another node, found from the own window's address, as
    /// in NVSHMEM.
    pub(super) fn remote_address(&self, rank: Rank, offset: u64) -> u64 {
        // Windows are allocated symmetrically: at the same place in each rank's memory.
        let start = |rank: Rank| u64::from(rank.0) << RANK_SHIFT;
        let own = self.common.rank();
        let window = self.window(own) - start(own) + start(rank);
        self.within(window, window + offset)
    }

    pub(super) fn table(&self, table: Table) -> u64 {
        match &*self.args {
            Args::Dispatch(args) => args.table(table),
            Args::Combine(args) => args.table(table),
            Args::Counts(args) => args.table(table),
            Args::GiveUp(args) => args.table(table),
            Args::Links(args) => args.table(table),
            Args::Silu(_) => 0,
        }
    }

    /// Address `bytes` after the start of a table.
    pub(super) fn in_table(&self, table: Table, bytes: u64) -> u64 {
        let base = self.table(table);
        self.within(base, base.wrapping_add(bytes))
    }

    /// Address `bytes` after the start of the own window.
    pub(super) fn in_window(&self, bytes: u64) -> u64 {
        let own = || self.window(self.common.rank());
        let window = *self.own_window.get_or_init(own);
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
        // Writes of other warps of the block to these bytes before a barrier come first.
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
