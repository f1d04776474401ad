//! Errors of ranks that share a GPU.

use ferry_layout::{Kernel, Rank};

/// Reason why ranks cannot share a GPU. Nothing was launched.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SharedGpuError {
    /// Communicators whose kernels do not fit on a GPU at one time: they could wait for each other
    /// until the deadline.
    #[error(
        "kernels that wait for peers do not fit on {device} at one time: it has {multiprocessors} \
         multiprocessors, and they take {}; lower max_sms, or close a communicator first (one that was \
         dropped counts while graphs of its calls are alive, and for ever if others made them)",
        listed(.ranks)
    )]
    NoRoom {
        /// The GPU, as the driver's tools name it.
        device: String,
        /// Its multiprocessors.
        multiprocessors: u32,
        /// Kind of group, rank, and multiprocessors of its largest communicator, for each rank of this
        /// process there; those of other processes are not known.
        ranks: Vec<(&'static str, Rank, u32)>,
    },
    /// More ranks of a group on a GPU, side by side, than it has multiprocessors.
    #[error(
        "{ranks} ranks run side by side on {device}, of which their contexts report {multiprocessors} \
         multiprocessors: each rank takes at least one, so at most {multiprocessors} fit"
    )]
    TooManyRanks {
        /// The GPU, as the driver's tools name it.
        device: String,
        /// The most multiprocessors that the context of one of its ranks reports.
        multiprocessors: u32,
        /// Number of its ranks.
        ranks: usize,
    },
    /// A kernel that would follow one that waits for it, in the same stream. The waiting kernel is enqueued
    /// already: it ends at its deadline, unless this call is made again with another stream before.
    #[error(
        "{} of rank {} would follow {} of rank {} in a stream, and that waits for it: give ranks that \
         share a GPU a stream each, or send on all of them before one waits (dispatch_async, combine_async)",
        kernel.name(), rank.0, waiting_kernel.name(), waiting.0
    )]
    OneStream {
        /// The rank of the call.
        rank: Rank,
        /// The call's kernel.
        kernel: Kernel,
        /// The rank whose kernel precedes it in the stream, and waits for it.
        waiting: Rank,
        /// The waiting kernel.
        waiting_kernel: Kernel,
    },
    /// Ranks of an NVSHMEM group that share a GPU in turns.
    #[error(
        "rank {} shares {device} with other ranks and is no client of MPS, but in an NVSHMEM group their \
         kernels must be at work at one time: start nvidia-cuda-mps-control -d before all processes, or use \
         a node group, whose kernels may take turns",
        rank.0
    )]
    NeedsMps {
        /// The first rank that is no client.
        rank: Rank,
        /// The GPU, as the driver's tools name it.
        device: String,
    },
}

fn listed(ranks: &[(&'static str, Rank, u32)]) -> String {
    let each = ranks
        .iter()
        .map(|(kind, rank, blocks)| format!("{blocks} (rank {}, {kind} group)", rank.0));
    each.collect::<Vec<_>>().join(", ")
}
