//! What README.md shows of graphs, word for word below this line.

use ferry::cuda::{CudaDevice, CudaGraph};
use ferry::{CombineInput, CombineOutput, Communicator, DispatchInput, DispatchOutput, Error, Stream};

// On each rank; `device` is what `group.cuda(rank.rank())` gives. Everything outlives the graph.
fn capture(
    device: &CudaDevice, stream: Stream, rank: &mut Communicator,
    input: &DispatchInput, rows: &DispatchOutput, sums: &CombineOutput,
) -> Result<CudaGraph, Error> {
    device.capture(stream, || {
        rank.dispatch(stream, input, rows)?;
        // ... your experts, on the same stream ...
        rank.combine(stream, &CombineInput::new(rows.tokens), sums)
    })
}

// On each rank, as often as on the others. Kernels see what the tensors hold at the time.
fn replay(graph: &mut CudaGraph, rank: &Communicator, stream: Stream) -> Result<(), Error> {
    graph.launch(stream)?;
    if let Some(fault) = rank.synchronize(stream)? {
        eprintln!("{fault}"); // of an input: the round went on
    }
    Ok(())
}
