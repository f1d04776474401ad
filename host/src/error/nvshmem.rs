//! Errors of NVSHMEM.

use ferry_layout::Rank;

/// Reason why NVSHMEM cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NvshmemError {
    /// A call failed.
    #[error("{call} failed with status {status}")]
    Call {
        /// The function.
        call: &'static str,
        /// Its result.
        status: i64,
    },
    /// A host library that does not fit the device code linked into the kernels.
    #[error(
        "the NVSHMEM host library is version {found}, but the kernels were linked with {linked}; \
         install {linked}"
    )]
    Version {
        /// Version of the device code in the PTX.
        linked: String,
        /// Version of the host library.
        found: String,
    },
    /// NVSHMEM numbers the ranks in another way than the bootstrap.
    #[error(
        "NVSHMEM calls rank {} of {ranks} its PE {pe} of {pes}; a process can be in one job only",
        rank.0
    )]
    Ranks {
        /// This rank, by the bootstrap.
        rank: Rank,
        /// Number of ranks, by the bootstrap.
        ranks: u32,
        /// This rank, by NVSHMEM.
        pe: i64,
        /// Number of ranks, by NVSHMEM.
        pes: i64,
    },
    /// NVSHMEM's state on the device is not laid out as the kernels' code has it.
    #[error(
        "NVSHMEM's state says {field} {found}, but {wanted} was expected: its library is not of the version \
         that the kernels were linked with"
    )]
    State {
        /// The field, by its name in NVSHMEM.
        field: &'static str,
        /// Its value.
        found: u64,
        /// The expected one.
        wanted: u64,
    },
    /// Nothing carries data to a rank whose memory is not mapped.
    #[error(
        "NVSHMEM has no channel to rank {}: its thread on the host must carry rows between nodes, which \
         NVSHMEM_REMOTE_TRANSPORT=none (as for IBGDA) leaves out; unset it, as these kernels use no IBGDA",
        peer.0
    )]
    NoChannel {
        /// The rank.
        peer: Rank,
    },
    /// A device on which data from a network may become visible after the flag behind it.
    #[error(
        "{device} does not order the writes of a network (GPU_DIRECT_RDMA_WRITES_ORDERING is {ordering}, and \
         100 is needed), so that a row could be read before it is there; use a group of one node"
    )]
    WritesUnordered {
        /// The device.
        device: String,
        /// The attribute's value.
        ordering: u32,
    },
    /// A NIC whose writes may pass each other, by the variables that NVSHMEM reads.
    #[error(
        "NVSHMEM_IB_ENABLE_RELAXED_ORDERING is {}; unless it is 0, a NIC's writes may pass each other on \
         PCIe and a row be read before it is there: set NVSHMEM_IB_ENABLE_RELAXED_ORDERING=0 for all ranks \
         before the group is made",
        value.as_deref().map_or_else(|| "unset (1 to NVSHMEM)".into(), |value| format!("{value:?}"))
    )]
    RelaxedOrdering {
        /// The variable's value; `None` if it is unset.
        value: Option<String>,
    },
    /// NVSHMEM's thread on the host reads no more requests: a call that waits for it would not end. Nothing
    /// is freed, and the job is not left.
    #[error(
        "NVSHMEM's thread on the host is stuck with {bytes} bytes of requests for other nodes: a peer or the \
         network takes nothing; end the process"
    )]
    Stalled {
        /// Bytes that it has not read.
        bytes: u64,
    },
    /// NVSHMEM's symmetric heap is exhausted.
    #[error(
        "NVSHMEM has no {bytes} bytes left for a window; lower max_tokens_per_rank, or raise \
         NVSHMEM_SYMMETRIC_SIZE (used with NVSHMEM_DISABLE_CUDA_VMM=1) or \
         NVSHMEM_MAX_MEMORY_PER_GPU (used without)"
    )]
    Heap {
        /// Bytes of a window.
        bytes: u64,
    },
    /// A rank of the same node whose memory cannot be addressed directly.
    #[error(
        "rank {} cannot address the window of rank {}, which p2p_world_size puts on its node; \
         lower p2p_world_size, or start neighbouring ranks on one node with peer access",
        rank.0, peer.0
    )]
    NotMapped {
        /// This rank.
        rank: Rank,
        /// The other rank.
        peer: Rank,
    },
}
