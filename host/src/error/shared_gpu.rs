//! Why ranks cannot share a GPU as they were to.

use ferry_layout::{Kernel, Rank};

/// What does not work where several ranks share a GPU. Nothing was launched.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SharedGpuError {
    /// Communicators whose kernels do not find room on a GPU at one time: they could wait for each other
    /// until the deadline.
    #[error(
        "kernels that wait for peers find no room on {device} at one time: it has {multiprocessors} \
         multiprocessors, and they take {}; lower max_sms, or close a communicator first (one that was \
         dropped counts while graphs of its calls are alive, and for ever if others made them)",
        listed(.ranks)
    )]
    NoRoom {
        /// The GPU, as the driver's tools name it.
        device: String,
        /// Its multiprocessors.
        multiprocessors: u32,
        /// Of each rank of this process there (those of others are not known), the kind of its group, its
        /// number, and the multiprocessors that its largest communicator takes.
        ranks: Vec<(&'static str, Rank, u32)>,
    },
    /// More ranks of a group on a GPU, side by side, than it has multiprocessors for.
    #[error(
        "{ranks} ranks run side by side on {device}, which has {multiprocessors} multiprocessors, as far as \
         they know: each takes at least one, so at most {multiprocessors} find room"
    )]
    TooManyRanks {
        /// The GPU, as the driver's tools name it.
        device: String,
        /// The most multiprocessors that the context of one of its ranks reports.
        multiprocessors: u32,
        /// Its ranks.
        ranks: usize,
    },
    /// A kernel behind one that waits for it, in the same stream. The other one is enqueued already: it ends
    /// at its deadline, unless this call is made again with another stream before.
    #[error(
        "{} of rank {} would stand in a stream behind {} of rank {}, which waits for it: give ranks that \
         share a GPU a stream each, or send on all of them before one waits (dispatch_async, combine_async)",
        kernel.name(), rank.0, waiting_kernel.name(), waiting.0
    )]
    OneStream {
        /// Whose call it is.
        rank: Rank,
        /// What it would have enqueued.
        kernel: Kernel,
        /// Whose kernel stands before it, and waits for it.
        waiting: Rank,
        /// Which kernel that is.
        waiting_kernel: Kernel,
    },
    /// Ranks of an NVSHMEM group that share a GPU in turns.
    #[error(
        "rank {} shares {device} with other ranks and is no client of MPS, but in an NVSHMEM group their \
         kernels must be at work at one time: start nvidia-cuda-mps-control -d before all processes, or use \
         Group::node, which does with turns",
        rank.0
    )]
    NeedsMps {
        /// The first rank that is not.
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
