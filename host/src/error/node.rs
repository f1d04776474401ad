//! Errors of processes that cannot be a node group.

use ferry_layout::Rank;

use super::cuda::CudaError;

/// Reason why processes cannot form a node group. No kernel was launched.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NodeError {
    /// A process that numbers or counts the ranks in another way than this one.
    #[error(
        "rank {} calls itself rank {called} of {theirs}, and here there are {ours} ranks; give every \
         process a rank of its own and the same number of ranks",
        rank.0
    )]
    RankCount {
        /// Position of its bytes in the all-gather.
        rank: Rank,
        /// Its own number for itself.
        called: u32,
        /// Number of ranks there.
        theirs: u32,
        /// Number of ranks here.
        ours: u32,
    },
    /// Ranks on different nodes.
    #[error(
        "ranks {} and {} are on different nodes, {first_node} and {second_node}; a node group has all \
         its ranks on one, an NVSHMEM group may have them on several",
        first.0, second.0
    )]
    OtherNode {
        /// The first rank.
        first: Rank,
        /// The first rank on another node.
        second: Rank,
        /// Name and boot of the first rank's machine.
        first_node: String,
        /// Name and boot of the second rank's machine.
        second_node: String,
    },
    /// Ranks of one process.
    #[error(
        "ranks {} and {} are in one process ({process}), which cannot map its own memory once more; \
         a local group has several ranks in one process",
        first.0, second.0
    )]
    SameProcess {
        /// The first rank.
        first: Rank,
        /// The next rank in the same process.
        second: Rank,
        /// The process's number.
        process: u32,
    },
    /// Ranks in containers that do not share a namespace.
    #[error(
        "ranks {} and {} are in different {kind} namespaces, and CUDA IPC needs one IPC namespace and one \
         PID namespace for all; give containers --ipc=host and --pid=host",
        first.0, second.0
    )]
    OtherNamespace {
        /// The first rank.
        first: Rank,
        /// The first rank in another namespace.
        second: Rank,
        /// Kind of the namespace: "IPC" or "PID".
        kind: &'static str,
    },
    /// A part of a GPU.
    #[error(
        "{device} is a part of a GPU (MIG), whose memory other processes cannot map; a node group \
         needs whole GPUs"
    )]
    PartOfGpu {
        /// The part, as the driver's tools name it.
        device: String,
    },
    /// Two ranks whose GPUs cannot write each other's memory.
    #[error(
        "the GPU of rank {} ({device}) cannot access the memory of the GPU of rank {} ({peer_device}); a \
         node group needs peer access between every two of its GPUs, which parts of a GPU (MIG) do not \
         have",
        rank.0, peer.0
    )]
    NoPeerAccess {
        /// This rank.
        rank: Rank,
        /// The other rank.
        peer: Rank,
        /// This rank's GPU, as the driver's tools name it.
        device: String,
        /// The other rank's GPU.
        peer_device: String,
    },
    /// A window that cannot be shared with other processes.
    #[error(
        "rank {} cannot share its window with other processes: {source}; parts of a GPU (MIG) and some \
         virtual machines have no CUDA IPC",
        rank.0
    )]
    NotShared {
        /// This rank.
        rank: Rank,
        /// Error of the driver.
        source: CudaError,
    },
    /// A window that is not an allocation of its own, or is shorter than its rank said: its handle would map
    /// other memory.
    #[error(
        "rank {} finds the window of rank {}, {wanted} bytes at {at:#x}, in an allocation of \
         {bytes} bytes at {base:#x}; a window is an allocation of its own",
        rank.0, owner.0
    )]
    NotWhole {
        /// This rank.
        rank: Rank,
        /// The window's rank.
        owner: Rank,
        /// Address of the window on this rank.
        at: u64,
        /// Bytes that it must have.
        wanted: u64,
        /// Start of the allocation.
        base: u64,
        /// Bytes of the allocation.
        bytes: u64,
    },
    /// Ranks that make different communicators at one time, and share each other's windows.
    #[error(
        "ranks 0 and {} share windows of different communicators: number {} of {} bytes, and number {} of {} \
         bytes; make communicators in the same order in all processes",
        second.0, numbers[0], bytes[0], numbers[1], bytes[1]
    )]
    OtherWindow {
        /// The first rank whose window is another one than rank 0's.
        second: Rank,
        /// Numbers of the windows within the group, on rank 0 and on that rank.
        numbers: [u64; 2],
        /// Bytes of the windows.
        bytes: [u64; 2],
    },
    /// A mapped window that is not its rank's memory.
    #[error(
        "the memory that rank {} mapped as the window of rank {} is not that window: it does not have the \
         number that rank {} wrote",
        rank.0, peer.0, peer.0
    )]
    OtherMemory {
        /// This rank.
        rank: Rank,
        /// The rank whose window it should be.
        peer: Rank,
    },
    /// A window of another rank that cannot be mapped.
    #[error(
        "rank {} cannot map the window of rank {}: {source}; CUDA IPC needs peer access between the \
         two GPUs, no parts of a GPU (MIG), and, if the processes are in containers, one IPC \
         namespace (--ipc=host) and one PID namespace for all",
        rank.0, peer.0
    )]
    NotMapped {
        /// This rank.
        rank: Rank,
        /// The window's rank.
        peer: Rank,
        /// Error of the driver.
        source: CudaError,
    },
}
