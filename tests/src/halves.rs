//! The half calls of a round, and the tensors that they take.

use ferry::{
    CombineInput, CombineOutput, Communicator, DispatchInput, DispatchOutput, Error, Stream,
};

/// Half calls of a round: dispatch, its wait, combine, its wait. A fused rank skips the waits.
pub const HALVES: usize = 4;

/// A rank's tensors of one round.
#[derive(Clone, Copy)]
pub struct Tensors {
    /// Input of dispatch.
    pub input: DispatchInput,
    /// Output of dispatch.
    pub output: DispatchOutput,
    /// Input of combine.
    pub expert_rows: CombineInput,
    /// Output of combine.
    pub combined: CombineOutput,
}

impl Tensors {
    /// Enqueues a half call of a round, or nothing if a fused rank has done it already.
    pub fn enqueue(
        &self,
        rank: &mut Communicator,
        stream: Stream,
        half: usize,
        split: bool,
    ) -> Result<(), Error> {
        match (half, split) {
            (0, false) => rank.dispatch(stream, &self.input, &self.output),
            (0, true) => rank.dispatch_async(stream, &self.input),
            (1, true) => rank.dispatch_wait(stream, &self.output),
            (2, false) => rank.combine(stream, &self.expert_rows, &self.combined),
            (2, true) => rank.combine_async(stream, &self.expert_rows, &self.combined),
            (_, true) => rank.combine_wait(stream),
            (_, false) => Ok(()),
        }
    }
}
