//! What went wrong in a simulation.

use ferry_layout::{MAX_BLOCKS, MAX_RANKS};

/// What went wrong in a simulation. The text names the seed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SimulatorError {
    /// An access outside every live allocation.
    #[error(
        "simulator (seed {seed}): {what} of {bytes} bytes at {address:#x} is outside every allocation{by}"
    )]
    BadAccess {
        /// The run's seed.
        seed: u64,
        /// "read", "write", ...
        what: &'static str,
        /// Where.
        address: u64,
        /// How many.
        bytes: u64,
        /// Which warp, if it was one.
        by: String,
    },
    /// An access that left the allocation of the tensor, window or workspace that it was for.
    #[error(
        "simulator (seed {seed}): an access at {address:#x} is outside the allocation of {base:#x}, \
         for which it was, by {by}"
    )]
    StrayAccess {
        /// The run's seed.
        seed: u64,
        /// Where.
        address: u64,
        /// Where the tensor, window or workspace begins.
        base: u64,
        /// Which warp.
        by: String,
    },
    /// A warp used the memory of its block so that what comes of it depends on which warp is first, or is
    /// anything.
    #[error("simulator (seed {seed}): {by} {what}: byte {at} of its block's memory")]
    BlockMemory {
        /// The run's seed.
        seed: u64,
        /// Which warp.
        by: String,
        /// What it did.
        what: &'static str,
        /// Bytes from the start.
        at: u32,
    },
    /// Some warps of a block wait at a barrier at which others will not arrive, as they have ended.
    #[error(
        "simulator (seed {seed}): not all warps of block {block} of rank {rank} arrive at a barrier"
    )]
    MissedBarrier {
        /// The run's seed.
        seed: u64,
        /// Whose block.
        rank: u32,
        /// Which one.
        block: u32,
    },
    /// A launch goes on waiting long after its deadline. One that works longer than that does not.
    #[error(
        "simulator (seed {seed}): a launch of rank {rank} goes on waiting {late_ns} ns after its deadline"
    )]
    Overdue {
        /// The run's seed.
        seed: u64,
        /// Whose.
        rank: u32,
        /// How late it is, in simulated time.
        late_ns: u64,
    },
    /// A warp touched the window of a rank of another node.
    #[error(
        "simulator (seed {seed}): rank {rank} wrote directly into the window of rank {peer}, \
         which is on another node"
    )]
    NotMapped {
        /// The run's seed.
        seed: u64,
        /// Who.
        rank: u32,
        /// Whose window.
        peer: u32,
    },
    /// A signal arrived at a rank that had finished its round without it.
    #[error(
        "simulator (seed {seed}): a signal of round {round} arrived at rank {rank}, which had finished it"
    )]
    LateSignal {
        /// The run's seed.
        seed: u64,
        /// Where.
        rank: u32,
        /// Its round.
        round: u64,
    },
    /// A rank's addresses, 1 TiB, or this process's memory do not suffice for an allocation.
    #[error("simulator: no memory for an allocation of {bytes} bytes on rank {rank}")]
    OutOfMemory {
        /// Whose.
        rank: u32,
        /// Of what size.
        bytes: u64,
    },
    /// The rank was lost.
    #[error("simulator (seed {seed}): rank {rank} was lost")]
    RankLost {
        /// The run's seed.
        seed: u64,
        /// Which.
        rank: u32,
    },
    /// The kernel and its arguments do not belong together.
    #[error("simulator: {kernel} was given the arguments of another kernel")]
    WrongArguments {
        /// Which kernel.
        kernel: &'static str,
    },
    /// A machine without ranks, or of more than a group has.
    #[error("simulator: ranks is {ranks}, but a machine has 1 to {MAX_RANKS}")]
    Ranks {
        /// How many it would have.
        ranks: u32,
    },
    /// There is no such rank.
    #[error("simulator: rank {rank} is not among {ranks} ranks")]
    NoSuchRank {
        /// Which.
        rank: u32,
        /// How many there are.
        ranks: u32,
    },
    /// Launches would have more blocks than there may be.
    #[error("simulator: warps is {warps}, which makes more than {MAX_BLOCKS} blocks")]
    TooManyWarps {
        /// [`Options::warps`](crate::Options::warps).
        warps: u32,
    },
    /// The simulation ended because a kernel panicked.
    #[error("simulator: the simulation has ended; a kernel panicked")]
    Ended,
}
