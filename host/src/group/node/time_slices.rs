//! Processes that share a GPU without MPS, which take turns on it.

use ferry_layout::Rank;

use crate::error::notice::Notice;

/// Warns that rounds wait for turns.
pub(super) fn warn(rank: Rank) {
    static SLOW: Notice = Notice::new();
    tracing::warn!(
        rank = rank.0,
        "processes share a GPU without MPS: a kernel waits for its peers' turns"
    );
    SLOW.tell(
        "processes of a node group share a GPU without MPS, and take turns on it: a kernel that waits for \
         its peers waits for their turns, for milliseconds; under MPS (nvidia-cuda-mps-control -d, before \
         all processes) their kernels run side by side",
    );
}
