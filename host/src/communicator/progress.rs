//! Calls of the ranks of a process, to tell a rank that is late from one that was never called.

use std::sync::atomic::{AtomicU64, Ordering};

use ferry_layout::{Epoch, Kernel, Rank};

use crate::device::InGraph;

/// Number of a rank whose calls are not known, because graphs have some.
const UNKNOWN: u64 = u64::MAX;

/// Numbers of calls for which peers wait, of the ranks of this process.
pub(crate) struct Progress(Vec<(Rank, AtomicU64)>);

impl Progress {
    pub(crate) fn of(ranks: Vec<Rank>) -> Self {
        let calls = ranks.into_iter().map(|rank| (rank, AtomicU64::new(0)));
        Self(calls.collect())
    }

    fn calls(&self, rank: Rank) -> Option<&AtomicU64> {
        let mut all = self.0.iter();
        all.find_map(|(other, calls)| (*other == rank).then_some(calls))
    }

    /// Notes that a kernel of `rank` was enqueued.
    pub(crate) fn enqueued(&self, rank: Rank, kernel: Kernel, in_graph: InGraph) {
        let sends = matches!(
            kernel,
            Kernel::Dispatch
                | Kernel::DispatchAsync
                | Kernel::Combine
                | Kernel::CombineAsync
                | Kernel::GiveUp
        );
        let Some(calls) = self.calls(rank).filter(|_| sends) else {
            return;
        };
        // One thread at a time enqueues for a rank.
        let before = calls.load(Ordering::Relaxed);
        let after = match in_graph {
            InGraph::No if before != UNKNOWN => before + 1,
            _ => UNKNOWN,
        };
        calls.store(after, Ordering::Relaxed);
    }

    /// Whether `late` is of this process, its calls are known, and that of `kernel` in round `epoch`, for
    /// which a peer waits, was not enqueued.
    pub(crate) fn is_behind(&self, late: Rank, kernel: Kernel, epoch: u64) -> bool {
        let before = 2 * Epoch(epoch).rounds().saturating_sub(1);
        let awaited = match kernel {
            Kernel::Combine | Kernel::CombineAsync | Kernel::CombineWait => before + 2,
            _ => before + 1,
        };
        let calls = self.calls(late);
        calls.is_some_and(|calls| calls.load(Ordering::Relaxed) < awaited)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_is_behind_if_the_call_that_is_awaited_was_not_made() {
        let progress = Progress::of(vec![Rank(2), Rank(3)]);
        let call = |rank, kernel| progress.enqueued(Rank(rank), kernel, InGraph::No);
        let behind = |rank, kernel, epoch| progress.is_behind(Rank(rank), kernel, epoch);
        assert!(behind(3, Kernel::Dispatch, 1));
        call(3, Kernel::DispatchAsync);
        call(3, Kernel::DispatchWait);
        // Also where the peer has enqueued its combine meanwhile, which is not what it waited for.
        call(2, Kernel::Dispatch);
        call(2, Kernel::Combine);
        assert!(!behind(3, Kernel::DispatchWait, 1));
        assert!(behind(3, Kernel::CombineWait, 1));
        assert!(!behind(2, Kernel::Combine, 1) && behind(2, Kernel::Dispatch, 2));
        // Of another process.
        assert!(!behind(0, Kernel::Dispatch, 1));
        call(3, Kernel::GiveUp);
        assert!(!behind(3, Kernel::Combine, 1) && behind(3, Kernel::Dispatch, 2));
        progress.enqueued(Rank(3), Kernel::Dispatch, InGraph::Held);
        assert!(!behind(3, Kernel::Combine, 7));
        progress.enqueued(Rank(2), Kernel::Combine, InGraph::Foreign);
        assert!(!behind(2, Kernel::Dispatch, 9));
    }
}
