//! Graphs of ranks that share a GPU: what their captures have recorded counts when they are launched.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ferry_layout::Kernel;

use super::{Halves, Lane, Order, Progress, RECORDINGS, Recording, Wait, lock};
use crate::SharedGpuError;

/// What a graph has of an order.
pub(crate) struct Recorded {
    order: Arc<Order>,
    halves: Halves,
}

impl Halves {
    /// What of `graph` must not come into `lane`: the rank's index, and what stands there.
    fn conflict_with(&self, graph: &Self, lane: Lane) -> Option<(usize, &Wait)> {
        let mut each = graph.ranks.iter().enumerate();
        each.find_map(|(index, part)| {
            let part = part.filter(|part| part.sent > part.before)?;
            let sent = self.ranks[index].map_or(part.before, |progress| progress.sent);
            Some((index, self.waiting(index, sent, lane)?))
        })
    }

    /// `graph` was launched into `lane`. It is one: within it, its capture has seen the order.
    fn enter_all(&mut self, graph: &Self, lane: Lane) {
        let mut waits = Vec::new();
        for (index, part) in graph.ranks.iter().enumerate() {
            let Some(part) = part else { continue };
            let progress = self.ranks[index].get_or_insert(Progress {
                sent: part.before,
                ..*part
            });
            let until = (progress.sent + part.until).saturating_sub(part.before);
            progress.sent += part.sent - part.before;
            if part.until > 0 {
                (progress.until, progress.by) = (until, part.by);
                let kernel = part.by;
                waits.push(Wait {
                    lane,
                    index,
                    kernel,
                    until,
                });
            }
        }
        self.forget_what_came();
        waits.into_iter().for_each(|wait| self.wait(wait));
    }
}

/// What the capture with this number has recorded, for its graph, or to be thrown away.
pub(crate) fn take(capture: u64) -> Vec<Recorded> {
    let mut recordings = lock(&RECORDINGS);
    let is_of = |known: &mut Recording| known.capture == capture;
    let taken = recordings.extract_if(.., is_of);
    let recorded = |Recording { order, halves, .. }| Recorded { order, halves };
    taken.map(recorded).collect()
}

impl Recorded {
    /// Refuses a launch of the graph that would come behind a kernel that waits for it.
    pub(crate) fn check(&self, lane: Lane) -> Result<(), SharedGpuError> {
        let refused = self.order.look(lane, |halves| {
            let (index, wait) = halves.conflict_with(&self.halves, lane)?;
            let kernel = self.halves.ranks[index].map_or(Kernel::Dispatch, |part| part.by);
            Some(self.order.refusal(index, kernel, wait))
        });
        refused.map_or(Ok(()), Err)
    }

    /// The graph was launched, perhaps into a capture, whose graph may be launched unseen.
    pub(crate) fn enter(&self, lane: Lane) {
        if lane.capture.is_some() {
            self.order.is_uncertain.store(true, Ordering::Relaxed);
        }
        let enter = |halves: &mut Halves| halves.enter_all(&self.halves, lane);
        self.order.change(lane, enter);
    }
}
