//! Calls of the ranks of a process, to tell a rank that is late from one that was never called.

use std::sync::atomic::{AtomicU64, Ordering};

use ferry_layout::{Kernel, Rank};

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

    /// Whether fewer calls of `late` than of `rank` were enqueued, and both are known.
    pub(crate) fn is_behind(&self, late: Rank, rank: Rank) -> bool {
        let [Some(late), Some(own)] = [late, rank].map(|rank| self.calls(rank)) else {
            return false;
        };
        let [late, own] = [late, own].map(|calls| calls.load(Ordering::Relaxed));
        own != UNKNOWN && late < own
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_that_made_fewer_calls_is_behind_unless_graphs_have_some() {
        let progress = Progress::of(vec![Rank(2), Rank(3)]);
        let call = |rank, kernel| progress.enqueued(Rank(rank), kernel, InGraph::No);
        assert!(!progress.is_behind(Rank(3), Rank(2)));
        call(2, Kernel::DispatchAsync);
        call(2, Kernel::DispatchWait);
        assert!(progress.is_behind(Rank(3), Rank(2)));
        assert!(!progress.is_behind(Rank(2), Rank(3)));
        // Of another process.
        assert!(!progress.is_behind(Rank(0), Rank(2)));
        call(3, Kernel::Dispatch);
        assert!(!progress.is_behind(Rank(3), Rank(2)));
        call(2, Kernel::Combine);
        assert!(progress.is_behind(Rank(3), Rank(2)));
        progress.enqueued(Rank(3), Kernel::Combine, InGraph::Held);
        call(2, Kernel::Dispatch);
        assert!(!progress.is_behind(Rank(3), Rank(2)));
        progress.enqueued(Rank(2), Kernel::Combine, InGraph::Foreign);
        assert!(!progress.is_behind(Rank(3), Rank(2)));
    }
}
