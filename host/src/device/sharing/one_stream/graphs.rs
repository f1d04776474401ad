//! Graphs of ranks that share a GPU: their recorded calls count when they are launched.

use std::sync::Arc;

use ferry_layout::Kernel;

use super::{Halves, Lane, Order, Progress, RECORDINGS, Recording, Reserved, Step, Wait, lock};
use crate::error::SharedGpuError;

/// Calls of an order's ranks in a graph.
pub(crate) struct Recorded {
    order: Arc<Order>,
    halves: Halves,
}

impl Halves {
    /// A conflict of `graph` with a kernel in `lane`: the rank's index, and the kernel that waits for it.
    fn conflict_with(&self, graph: &Self, lane: Lane) -> Option<(usize, &Wait)> {
        let mut each = graph.ranks.iter().enumerate();
        each.find_map(|(index, part)| {
            let part = part.filter(|part| part.sent > part.before)?;
            let sent = self.ranks[index].map_or(part.before, |progress| progress.sent);
            Some((index, self.waiting(index, sent, lane)?))
        })
    }

    /// Counts `graph` as launched into `lane`, as a whole: its capture has checked the order within it.
    fn enter_all(&mut self, graph: &Self, lane: Lane) -> Vec<Step> {
        let mut steps = Vec::new();
        for (index, part) in graph.ranks.iter().enumerate() {
            let Some(part) = part else { continue };
            let before = self.ranks[index];
            let mut progress = before.unwrap_or(Progress {
                sent: part.before,
                ..*part
            });
            let until = (progress.sent + part.until).saturating_sub(part.before);
            let sends = part.sent - part.before;
            progress.sent += sends;
            let wait = (part.until > 0).then_some(Wait {
                lane,
                index,
                kernel: part.by,
                until,
            });
            if wait.is_some() {
                (progress.until, progress.by) = (until, part.by);
            }
            self.ranks[index] = Some(progress);
            self.waits.extend(wait);
            steps.push(Step {
                index,
                sends,
                before,
                wait,
            });
        }
        steps
    }
}

/// Takes the recordings of the capture with this number, for its graph or to be discarded.
pub(crate) fn take(capture: u64) -> Vec<Recorded> {
    let mut recordings = lock(&RECORDINGS);
    let is_of = |known: &mut Recording| known.capture == capture;
    let taken = recordings.extract_if(.., is_of);
    let recorded = |Recording { order, halves, .. }| Recorded { order, halves };
    taken.map(recorded).collect()
}

impl Recorded {
    /// Refuses a launch of the graph that would follow a kernel that waits for it; otherwise counts it as
    /// launched.
    pub(crate) fn reserve(&self, lane: Lane) -> Result<Reserved, SharedGpuError> {
        let refused = |halves: &Halves| {
            let (index, wait) = halves.conflict_with(&self.halves, lane)?;
            let kernel = self.halves.ranks[index].map_or(Kernel::Dispatch, |part| part.by);
            Some(self.order.refusal(index, kernel, wait))
        };
        let enter = |halves: &mut Halves| halves.enter_all(&self.halves, lane);
        self.order.reserve(lane, refused, enter)
    }
}
