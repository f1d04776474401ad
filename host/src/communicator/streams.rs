//! Streams with launches of a communicator, and whether these have ended.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::device::InGraph;
use crate::tensor::handles::Stream;

/// Most streams that a communicator remembers.
const MAX: usize = 16;
/// The driver's handle for the default stream of the calling thread.
const DEFAULT_OF_A_THREAD: u64 = 2;

/// Streams with launches of a communicator.
#[derive(Default)]
pub(crate) struct Streams {
    known: Vec<Known>,
    /// A launch was forgotten before its end was seen.
    has_forgotten: bool,
    /// A graph was captured: its streams and its end are not known here.
    has_graphs: bool,
    /// Others captured a graph, or may have: whether it will be launched is not known, either.
    has_foreign_graphs: bool,
}

struct Known {
    stream: Stream,
    /// Whether something may have been launched since the last wait.
    is_busy: AtomicBool,
}

impl Known {
    fn is_busy(&mut self) -> bool {
        *self.is_busy.get_mut()
    }
}

impl Streams {
    /// Notes that a kernel is about to be launched into `stream`.
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

    /// Notes that the launched kernel may be in a graph.
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

    /// Notes that all graphs that others made have ended and will not be launched any more.
    pub(crate) const fn forget_foreign_graphs(&mut self) {
        self.has_foreign_graphs = false;
    }

    /// Notes that everything in `stream` has ended.
    pub(crate) fn pass(&self, stream: Stream) {
        // This thread's default stream was waited for, and another thread may have launched into its own.
        if stream.handle() == DEFAULT_OF_A_THREAD {
            return;
        }
        if let Some(known) = self.known.iter().find(|known| known.stream == stream) {
            known.is_busy.store(false, Ordering::Relaxed);
        }
    }

    /// Whether all launches are known to have ended.
    pub(crate) fn are_done(&mut self) -> bool {
        let may_run = self.has_forgotten || self.has_graphs || self.has_foreign_graphs;
        !may_run && !self.known.iter_mut().any(Known::is_busy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(handle: u64) -> Stream {
        // SAFETY: `Stream::new` is about enqueued work, and nothing here enqueues.
        unsafe { Stream::new(handle) }
    }

    /// Launches into the stream with this handle.
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
