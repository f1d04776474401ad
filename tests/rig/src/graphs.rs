//! Captured pieces of rounds.

use anyhow::Result;
use ferry::{Error, Group, Stream};

use super::session::Session;

/// A piece of a round on every local rank, as a graph each.
pub struct Graphs(Vec<(Graph, Stream)>);

#[cfg(feature = "cuda")]
type Graph = ferry::cuda::CudaGraph;
#[cfg(not(feature = "cuda"))]
type Graph = std::convert::Infallible;

impl Graphs {
    /// Captures what `enqueue` enqueues on each local rank, given its place; `None` if the ranks have no CUDA
    /// devices.
    #[cfg(feature = "cuda")]
    pub fn capture(
        group: &Group,
        session: &mut Session,
        mut enqueue: impl FnMut(&mut Session, usize) -> Result<(), Error>,
    ) -> Result<Option<Self>> {
        let mut graphs = Vec::new();
        for (index, rank) in group.local_ranks().into_iter().enumerate() {
            let Some(device) = group.cuda(rank) else {
                return Ok(None);
            };
            let (_, stream) = session.local(index);
            let graph = device.capture(stream, || enqueue(session, index))?;
            graphs.push((graph, stream));
        }
        Ok(Some(Self(graphs)))
    }

    /// Captures nothing: there is nothing to capture with.
    #[cfg(not(feature = "cuda"))]
    pub fn capture(
        _: &Group,
        _: &mut Session,
        _: impl FnMut(&mut Session, usize) -> Result<(), Error>,
    ) -> Result<Option<Self>> {
        Ok(None)
    }

    /// Launches the graph of a local rank.
    pub fn launch(&mut self, index: usize) -> Result<(), Error> {
        let (graph, stream) = &mut self.0[index];
        #[cfg(feature = "cuda")]
        return graph.launch(*stream);
        #[cfg(not(feature = "cuda"))]
        {
            let _ = stream;
            match *graph {}
        }
    }

    /// The graph and the stream of each local rank, for threads.
    #[cfg(feature = "cuda")]
    pub fn each(&mut self) -> impl Iterator<Item = (&mut Graph, &Stream)> {
        self.0.iter_mut().map(|(graph, stream)| (graph, &*stream))
    }

    /// Launches the graphs of all local ranks.
    pub fn launch_all(&mut self) -> Result<(), Error> {
        (0..self.0.len()).try_for_each(|index| self.launch(index))
    }
}
