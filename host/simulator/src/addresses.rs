//! Addresses: each has the number of its machine, then that of its rank, in its upper bits.

use std::sync::atomic::{AtomicU64, Ordering};

/// A machine's addresses start at its number times `1 << MACHINE_SHIFT`.
const MACHINE_SHIFT: u32 = 48;
/// A rank's addresses start at `(rank + 1) << RANK_SHIFT` after that.
pub const RANK_SHIFT: u32 = 40;

/// The rank in whose memory an address lies.
pub fn rank_of(address: u64) -> Option<usize> {
    let of_machine = address & ((1 << MACHINE_SHIFT) - 1);
    ((of_machine >> RANK_SHIFT) as usize).checked_sub(1)
}

/// Machines of this process so far.
static MACHINES: AtomicU64 = AtomicU64::new(0);
/// Number of machines after which numbers repeat.
const MOST_MACHINES: u64 = 1 << 14;

/// The number of a machine, which the addresses of its memory have in their upper bits: a tensor of another
/// machine is told from one of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Machine(u64);

impl Machine {
    pub fn next() -> Self {
        Self(MACHINES.fetch_add(1, Ordering::Relaxed) % MOST_MACHINES)
    }

    /// The lowest address of its memory.
    pub const fn base(self) -> u64 {
        self.0 << MACHINE_SHIFT
    }

    /// Whether an address is of this machine.
    pub const fn has(self, address: u64) -> bool {
        address >> MACHINE_SHIFT == self.0
    }

    /// Whether an address is of another machine of this process.
    pub fn is_of_another(self, address: u64) -> bool {
        let machine = address >> MACHINE_SHIFT;
        let exists = machine < MACHINES.load(Ordering::Relaxed).min(MOST_MACHINES);
        !self.has(address) && exists && rank_of(address).is_some()
    }

    /// The owner of an address in the words of a message, if it is another machine.
    pub fn whose(self, address: u64) -> &'static str {
        match self.is_of_another(address) {
            true => ", in the memory of another group",
            false => "",
        }
    }
}
