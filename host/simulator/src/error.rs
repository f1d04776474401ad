//! Errors of a simulation.

use ferry_layout::{MAX_BLOCKS, MAX_RANKS};

/// Error of a simulation. The text names the seed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SimulatorError {
    /// An access outside every live allocation.
    #[error(
        "simulator (seed {seed}): {what} of {bytes} bytes at {address:#x} is outside every allocation{by}"
    )]
    BadAccess {
        /// The run's seed.
        seed: u64,
        /// The access: "read", "write", ...
        what: &'static str,
        /// Its address.
        address: u64,
        /// Its bytes.
        bytes: u64,
        /// Origin of the access: ", by warp 3 of rank 0".
        by: String,
    },
    /// A launch with a tensor in the memory of another rank, or of another machine. Nothing was enqueued.
    #[error(
        "simulator (seed {seed}): tensor {tensor} of a launch of rank {rank}, at {address:#x}, is in the \
         memory of {owner}; give tensors of the rank's own device"
    )]
    ForeignTensor {
        /// The run's seed.
        seed: u64,
        /// The rank of the launch.
        rank: u32,
        /// Name of the tensor.
        tensor: &'static str,
        /// Its address.
        address: u64,
        /// The owner: "rank 1", "another group".
        owner: String,
    },
    /// An access outside the allocation of its tensor, window or workspace.
    #[error(
        "simulator (seed {seed}): an access at {address:#x} is outside the allocation of {base:#x}, \
         for which it was, by {by}"
    )]
    StrayAccess {
        /// The run's seed.
        seed: u64,
        /// Its address.
        address: u64,
        /// Start of the tensor, window or workspace.
        base: u64,
        /// The warp.
        by: String,
    },
    /// A warp's use of its block's memory has an outcome that is undefined or depends on the order of warps.
    #[error("simulator (seed {seed}): {by} {what}: byte {at} of its block's memory")]
    BlockMemory {
        /// The run's seed.
        seed: u64,
        /// The warp.
        by: String,
        /// The access: "stores outside".
        what: &'static str,
        /// Position in bytes.
        at: u32,
    },
    /// Some warps of a block wait at a barrier at which others will not arrive, because they have ended.
    #[error(
        "simulator (seed {seed}): not all warps of block {block} of rank {rank} arrive at a barrier"
    )]
    MissedBarrier {
        /// The run's seed.
        seed: u64,
        /// The rank.
        rank: u32,
        /// The block.
        block: u32,
    },
    /// A launch goes on waiting long after its deadline. A launch that works that long is no error.
    #[error(
        "simulator (seed {seed}): a launch of rank {rank} goes on waiting {late_ns} ns after its deadline"
    )]
    Overdue {
        /// The run's seed.
        seed: u64,
        /// The rank.
        rank: u32,
        /// Simulated time since the deadline.
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
        /// The rank of the warp.
        rank: u32,
        /// The rank of the window.
        peer: u32,
    },
    /// A signal arrived at a rank that had finished its round without it.
    #[error(
        "simulator (seed {seed}): a signal of round {round} arrived at rank {rank}, which had finished it"
    )]
    LateSignal {
        /// The run's seed.
        seed: u64,
        /// The receiving rank.
        rank: u32,
        /// The signal's round.
        round: u64,
    },
    /// A rank's addresses, 1 TiB, or this process's memory do not suffice for an allocation.
    #[error("simulator: no memory for an allocation of {bytes} bytes on rank {rank}")]
    OutOfMemory {
        /// The rank.
        rank: u32,
        /// Bytes of the allocation.
        bytes: u64,
    },
    /// The rank was lost.
    #[error("simulator (seed {seed}): rank {rank} was lost")]
    RankLost {
        /// The run's seed.
        seed: u64,
        /// The rank.
        rank: u32,
    },
    /// A machine in another process refused a request, or that process ended.
    #[error("{reason}")]
    Remote {
        /// The reason, in words of rank 0's process.
        reason: String,
    },
    /// A wait that [`Options::interrupted`](crate::Options::interrupted) ended. Work goes on.
    #[error("simulator: the wait was interrupted")]
    Interrupted,
    /// Another call of this rank still waits: one during whose wait
    /// [`Options::interrupted`](crate::Options::interrupted) is asked, or an interrupted one that is not
    /// answered yet. Nothing was done.
    #[error(
        "simulator: another call of this rank, perhaps interrupted, still waits for other ranks"
    )]
    Busy,
    /// The kernel and its arguments do not match.
    #[error("simulator: {kernel} was given the arguments of another kernel")]
    WrongArguments {
        /// The kernel.
        kernel: &'static str,
    },
    /// A machine without ranks, or with more than a group may have.
    #[error("simulator: ranks is {ranks}, but a machine has 1 to {MAX_RANKS}")]
    Ranks {
        /// The number of ranks.
        ranks: u32,
    },
    /// There is no such rank.
    #[error("simulator: rank {rank} is not among {ranks} ranks")]
    NoSuchRank {
        /// The rank.
        rank: u32,
        /// The number of ranks.
        ranks: u32,
    },
    /// Launches would have too many blocks.
    #[error("simulator: warps is {warps}, which makes more than {MAX_BLOCKS} blocks")]
    TooManyWarps {
        /// [`Options::warps`](crate::Options::warps).
        warps: u32,
    },
    /// The simulation ended because a kernel panicked.
    #[error("simulator: the simulation has ended; a kernel panicked")]
    Ended,
}
