//! The streams that a communicator was launched into, and whether what was launched is over.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::device::InGraph;
use crate::tensor::handles::Stream;

/// Most streams that a communicator remembers.
const MAX: usize = 16;
/// The driver's number for the default stream of whichever thread asks.
const DEFAULT_OF_A_THREAD: u64 = 2;

/// Streams that were launched into.
#[derive(Default)]
pub(crate) struct Streams {
    known: Vec<Known>,
    /// A launch is known no more whose end was not seen.
    has_forgotten: bool,
    /// A graph was captured: where that is launched, and when it has ended, is not known here.
    has_graphs: bool,
    /// Others captured one, or may have: whether it will be launched is not known, either.
    has_foreign_graphs: bool,
}

struct Known {
    stream: Stream,
    /// Since it was last waited for, something may have been launched.
    is_busy: AtomicBool,
}

impl Known {
    fn is_busy(&mut self) -> bool {
        *self.is_busy.get_mut()
    }
}

impl Streams {
    /// Something is about to be launched into `stream`.
    pub(crate) fn enter(&mut self, stream: Stream) {
        let mut known = self.known.iter_mut();
        if let Some(known) = known.find(|known| known.stream == stream) {
            *known.is_busy.get_mut() = true;
            return;
        }
        if self.known.len() == MAX {
            self.has_forgotten |= self.known.iter_mut().any(Known::is_busy);
            self.known.clear();
        }
        self.known.push(Known {
            stream,
            is_busy: AtomicBool::new(true),
        });
    }

    /// What was launched may be in a graph.
    pub(crate) const fn launched(&mut self, in_graph: InGraph) {
        match in_graph {
            InGraph::No => {}
            InGraph::Held => self.has_graphs = true,
            InGraph::Foreign => self.has_foreign_graphs = true,
        }
    }

    /// Whether a graph that others made may be launched.
    pub(crate) const fn have_foreign_graphs(&self) -> bool {
        self.has_foreign_graphs
    }

    /// All graphs that others made have ended, and none is launched any more.
    pub(crate) const fn forget_foreign_graphs(&mut self) {
        self.has_foreign_graphs = false;
    }

    /// All that was launched into `stream` has ended.
    pub(crate) fn pass(&self, stream: Stream) {
        // What was waited for is this thread's, which may be another than the one that launched.
        if stream.handle() == DEFAULT_OF_A_THREAD {
            return;
        }
        if let Some(known) = self.known.iter().find(|known| known.stream == stream) {
            known.is_busy.store(false, Ordering::Relaxed);
        }
    }

    /// Whether all that was ever launched is known to have ended.
    pub(crate) fn are_done(&mut self) -> bool {
        let may_run = self.has_forgotten || self.has_graphs || self.has_foreign_graphs;
        !may_run && !self.known.iter_mut().any(Known::is_busy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(handle: u64) -> Stream {
        // SAFETY: nothing here enqueues.
        unsafe { Stream::new(handle) }
    }

    /// A launch into the stream with this handle.
    fn launch(streams: &mut Streams, handle: u64) {
        streams.enter(stream(handle));
    }

    #[test]
    fn every_stream_that_was_launched_into_is_waited_for() {
        let mut streams = Streams::default();
        assert!(streams.are_done());
        launch(&mut streams, 8);
        launch(&mut streams, 9);
        streams.pass(stream(8));
        streams.pass(stream(10));
        assert!(!streams.are_done());
        streams.pass(stream(9));
        assert!(streams.are_done());
        launch(&mut streams, 8);
        assert!(!streams.are_done());
    }

    #[test]
    fn a_launch_that_is_forgotten_is_never_done() {
        let mut streams = Streams::default();
        for handle in 8..8 + MAX as u64 + 1 {
            launch(&mut streams, handle);
        }
        for handle in 8..8 + MAX as u64 + 1 {
            streams.pass(stream(handle));
        }
        assert!(!streams.are_done());
    }

    #[test]
    fn streams_that_are_done_may_be_forgotten() {
        let mut streams = Streams::default();
        for handle in 8..100 {
            launch(&mut streams, handle);
            streams.pass(stream(handle));
        }
        assert!(streams.are_done());
    }

    #[test]
    fn neither_a_graph_nor_a_threads_own_default_stream_is_known_to_be_done() {
        for (in_graph, is_done) in [
            (InGraph::No, true),
            (InGraph::Held, false),
            (InGraph::Foreign, false),
        ] {
            let mut streams = Streams::default();
            streams.launched(in_graph);
            assert_eq!(streams.are_done(), is_done);
            assert_eq!(streams.have_foreign_graphs(), in_graph == InGraph::Foreign);
            streams.forget_foreign_graphs();
            assert_eq!(streams.are_done(), in_graph != InGraph::Held);
        }
        let mut streams = Streams::default();
        launch(&mut streams, DEFAULT_OF_A_THREAD);
        streams.pass(stream(DEFAULT_OF_A_THREAD));
        assert!(!streams.are_done());
    }
}
