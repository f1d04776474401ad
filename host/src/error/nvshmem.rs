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
