//! Arguments of the kernels that measure the machine, and where their words lie.

use bytemuck::{Pod, Zeroable};

use crate::MAX_RANKS;

/// What every probe takes, by value. Each reads what it needs.
///
/// Every rank has *probe memory*, which all others map: words of 64 bits first (see the
/// constants), rows from [`offset`](Self::offset) on. Addresses are device addresses.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct ProbeArgs {
    /// `[u64; ranks]`: each rank's probe memory.
    pub peers: u64,
    /// The rows to copy, `rows` of them.
    pub source: u64,
    /// Where rows begin in each rank's probe memory, in bytes.
    pub offset: u64,
    /// A word to wait for before anything else, or 0.
    pub gate: u64,
    /// What it must reach.
    pub gate_value: u64,
    /// Longest wait, in nanoseconds from the kernel's start.
    pub deadline_ns: u64,
    /// Bytes of a row, a multiple of 16.
    pub row_bytes: u32,
    /// Rows for each peer; all get the same.
    pub rows: u32,
    /// Pieces that a row is copied in, each by a warp (or block) of its own.
    pub parts: u32,
    /// This rank.
    pub rank: u32,
    /// Ranks.
    pub ranks: u32,
    /// Peers are ranks `rank + first_peer` and up: 0 includes the own one.
    pub first_peer: u32,
    /// Number of peers.
    pub peer_count: u32,
    /// Round trips of the ping.
    pub repeats: u32,
}

impl ProbeArgs {
    /// Bytes of the words at the start of probe memory.
    pub const WORDS_BYTES: u64 = 1024;
    /// Barriers that this rank has passed.
    pub const COUNT: u64 = 8 * MAX_RANKS as u64;
    /// Where the peer's ping arrives.
    pub const PING: u64 = Self::COUNT + 128;
    /// Round trips so far.
    pub const PINGS: u64 = Self::COUNT + 256;
    /// Not zero: a wait was given up.
    pub const EXPIRED: u64 = Self::COUNT + 384;
    /// Most bytes that [`parts`](Self::parts) may leave in a piece for the bulk copy.
    pub const BULK_BYTES: u32 = 15_360;

    /// Bytes of a piece of a row.
    pub const fn piece_bytes(&self) -> u32 {
        self.row_bytes.div_ceil(self.parts).next_multiple_of(16)
    }

    /// Where rank `rank` says that it has come to the barrier.
    pub const fn arrival(rank: u32) -> u64 {
        8 * rank as u64
    }
}

const _: () = assert!(ProbeArgs::EXPIRED + 8 <= ProbeArgs::WORDS_BYTES);
