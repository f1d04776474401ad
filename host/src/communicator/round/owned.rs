//! A round under way that has its rank: what a struct can keep, as it borrows nothing.

use std::fmt;

use super::{CombinePending, DispatchPending, Dispatched};
use crate::call::{CombineInput, CombineOutput, DispatchInput, DispatchOutput};
use crate::call::{Received, Returned, Sent};
use crate::communicator::Communicator;
use crate::communicator::Round;
use crate::error::Error;
use crate::tensor::handles::Stream;

/// Why a call of an owned round was refused, and its rank. It becomes an [`Error`] by `?`, and then drops the
/// rank, [which tears it down](Communicator#dropped).
///
/// A refused call leaves the round as it was:
/// [`unfinished_owned`](Communicator::unfinished_owned) gives it back.
pub struct RoundError {
    /// What went wrong.
    pub error: Error,
    /// The rank.
    pub communicator: Box<Communicator>,
}

impl fmt::Debug for RoundError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.error, f)
    }
}

impl fmt::Display for RoundError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.error, f)
    }
}

impl std::error::Error for RoundError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

impl From<RoundError> for Error {
    fn from(refused: RoundError) -> Self {
        refused.error
    }
}

impl RoundError {
    /// Only this allocates: a call that succeeds moves its rank, about 1.3 KiB, and a `Box` would cost more.
    #[cold]
    fn of(error: Error, rank: Communicator) -> Self {
        Self {
            error,
            communicator: Box::new(rank),
        }
    }
}

impl Communicator {
    /// [`dispatch`](Self::dispatch), and what comes of it has the rank. Enqueues only. Collective.
    ///
    /// # Errors
    /// As [`dispatch`](Self::dispatch), with the rank as it was.
    pub fn dispatch_owned(
        mut self,
        stream: Stream,
        input: &DispatchInput,
        output: &DispatchOutput,
    ) -> Result<DispatchedOwned, RoundError> {
        let called = self.dispatch(stream, input, output);
        match called.map(|dispatched| dispatched.received) {
            Ok(received) => Ok(DispatchedOwned::of(self, received)),
            Err(error) => Err(RoundError::of(error, self)),
        }
    }

    /// [`dispatch_async`](Self::dispatch_async), and what comes of it has the rank. Enqueues only.
    /// Collective.
    ///
    /// # Errors
    /// As [`dispatch_async`](Self::dispatch_async), with the rank as it was.
    pub fn dispatch_async_owned(
        mut self,
        stream: Stream,
        input: &DispatchInput,
    ) -> Result<DispatchPendingOwned, RoundError> {
        let called = self.dispatch_async(stream, input);
        match called.map(|pending| pending.sent) {
            Ok(sent) => Ok(DispatchPendingOwned::of(self, sent)),
            Err(error) => Err(RoundError::of(error, self)),
        }
    }

    /// As [`unfinished`](Self::unfinished), and what comes of it has the rank. Not collective.
    pub fn unfinished_owned(self) -> UnfinishedOwned {
        match self.round {
            Round::Idle => UnfinishedOwned::Nothing(self),
            Round::Sent(sent) => {
                UnfinishedOwned::DispatchWait(DispatchPendingOwned::of(self, sent))
            }
            Round::Received(received) => {
                UnfinishedOwned::Combine(DispatchedOwned::of(self, received))
            }
            Round::Returned(returned) => {
                UnfinishedOwned::CombineWait(CombinePendingOwned::of(self, returned))
            }
        }
    }
}

/// How far a round is, with its rank: what an engine keeps between its calls. The owned forms are those that
/// borrow ([`Unfinished`](crate::Unfinished)) in all else; the two may be mixed. Dropped, it
/// [tears the rank down](Communicator#dropped).
///
/// A call takes the value and gives the next one, or a [`RoundError`] with the rank:
///
/// ```
/// use ferry::*;
///
/// /// A layer whose dispatch and combine are calls of their own.
/// struct Layer {
///     /// `None` only while a call runs.
///     round: Option<UnfinishedOwned>,
///     stream: Stream,
///     rows: DispatchBuffers,
///     sums: CombineBuffers,
/// }
///
/// impl Layer {
///     fn dispatch(&mut self, input: &DispatchInput) -> Result<(), Error> {
///         match self.round.take() {
///             Some(UnfinishedOwned::Nothing(rank)) => {
///                 let called = rank.dispatch_owned(self.stream, input, self.rows.output());
///                 self.keep(called.map(UnfinishedOwned::Combine))
///             }
///             open => {
///                 self.round = open;
///                 Err(Error::DispatchWithoutCombine)
///             }
///         }
///     }
///
///     fn combine(&mut self, tokens: usize) -> Result<(), Error> {
///         let experts = CombineInput::new(self.rows.output().tokens);
///         let sums = self.sums.output(tokens)?;
///         match self.round.take() {
///             Some(UnfinishedOwned::Combine(dispatched)) => {
///                 let called = dispatched.combine(self.stream, &experts, &sums);
///                 self.keep(called.map(UnfinishedOwned::Nothing))
///             }
///             _ => panic!("combine comes after dispatch"),
///         }
///     }
///
///     /// Keeps what a call gave, also when it was refused.
///     fn keep(&mut self, called: Result<UnfinishedOwned, RoundError>) -> Result<(), Error> {
///         let (round, outcome) = match called {
///             Ok(round) => (round, Ok(())),
///             Err(refused) => (refused.communicator.unfinished_owned(), Err(refused.error)),
///         };
///         self.round = Some(round);
///         outcome
///     }
/// }
///
/// # fn main() -> Result<(), Error> {
/// let group = Group::simulated(1, 7)?;
/// let plan = Plan::new(&group, Config::new(4, 2, 8, 3))?;
/// let rank = Communicator::new(&group, &plan)?.remove(0);
/// let device = rank.device().clone();
/// let x = device.upload_tensor([1, 8], &[0x3f80_u16; 8])?;
/// let input = DispatchInput::new(x, device.upload_tensor([1, 2], &[1_i32, 2])?);
/// let mut layer = Layer {
///     rows: DispatchBuffers::new(&device, &plan)?,
///     sums: CombineBuffers::new(&device, &plan)?,
///     stream: Stream::DEFAULT,
///     round: Some(UnfinishedOwned::Nothing(rank)),
/// };
/// layer.dispatch(&input)?;
/// assert!(layer.dispatch(&input).is_err());
/// layer.combine(1)?;
/// device.synchronize(layer.stream)?;
/// let rank = layer.round.expect("no call runs").into_expert_parallel();
/// Ok(rank.close()?)
/// # }
/// ```
#[must_use = "a round that is not ended blocks its communicator"]
#[derive(Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "a rank is kept by value: no call allocates"
)]
pub enum UnfinishedOwned {
    /// No round is open.
    Nothing(Communicator),
    /// The wait of a `dispatch_async`.
    DispatchWait(DispatchPendingOwned),
    /// The combine of a dispatch.
    Combine(DispatchedOwned),
    /// The wait of a `combine_async`.
    CombineWait(CombinePendingOwned),
}

impl UnfinishedOwned {
    /// The rank, to read and to [`synchronize`](Communicator::synchronize).
    pub const fn expert_parallel(&self) -> &Communicator {
        match self {
            Self::Nothing(rank) => rank,
            Self::DispatchWait(pending) => pending.expert_parallel(),
            Self::Combine(dispatched) => dispatched.expert_parallel(),
            Self::CombineWait(pending) => pending.expert_parallel(),
        }
    }

    /// The rank, whose round stays as it is.
    pub fn into_expert_parallel(self) -> Communicator {
        match self {
            Self::Nothing(rank) => rank,
            Self::DispatchWait(pending) => pending.into_expert_parallel(),
            Self::Combine(dispatched) => dispatched.into_expert_parallel(),
            Self::CombineWait(pending) => pending.into_expert_parallel(),
        }
    }
}

/// A [`DispatchPending`] that has its rank. Dropped, it [tears the rank down](Communicator#dropped).
#[must_use = "a dispatch that is not waited for blocks its communicator"]
#[derive(Debug)]
pub struct DispatchPendingOwned {
    rank: Communicator,
    sent: Sent,
}

impl DispatchPendingOwned {
    /// After the kernel was enqueued.
    const fn of(rank: Communicator, sent: Sent) -> Self {
        Self { rank, sent }
    }

    /// The rank, to read and to [`synchronize`](Communicator::synchronize).
    pub const fn expert_parallel(&self) -> &Communicator {
        &self.rank
    }

    /// The rank, whose round stays open.
    pub fn into_expert_parallel(self) -> Communicator {
        self.rank
    }

    /// [`DispatchPending::wait`]. Enqueues only. Collective.
    ///
    /// # Errors
    /// As [`DispatchPending::wait`], with the rank.
    pub fn wait(
        mut self,
        stream: Stream,
        output: &DispatchOutput,
    ) -> Result<DispatchedOwned, RoundError> {
        let called = DispatchPending::of(&mut self.rank, self.sent).wait(stream, output);
        match called.map(|dispatched| dispatched.received) {
            Ok(received) => Ok(DispatchedOwned::of(self.rank, received)),
            Err(error) => Err(RoundError::of(error, self.rank)),
        }
    }
}

/// A [`Dispatched`] that has its rank. Dropped, it [tears the rank down](Communicator#dropped).
#[must_use = "a dispatch that is not combined blocks its communicator"]
#[derive(Debug)]
pub struct DispatchedOwned {
    rank: Communicator,
    received: Received,
}

impl DispatchedOwned {
    /// After the kernel was enqueued.
    const fn of(rank: Communicator, received: Received) -> Self {
        Self { rank, received }
    }

    /// The rank, to read and to [`synchronize`](Communicator::synchronize).
    pub const fn expert_parallel(&self) -> &Communicator {
        &self.rank
    }

    /// The rank, whose round stays open.
    pub fn into_expert_parallel(self) -> Communicator {
        self.rank
    }

    /// [`Dispatched::combine`]: ends the round, and gives the rank back. Enqueues only. Collective.
    ///
    /// # Errors
    /// As [`Dispatched::combine`], with the rank.
    pub fn combine(
        mut self,
        stream: Stream,
        input: &CombineInput,
        output: &CombineOutput,
    ) -> Result<Communicator, RoundError> {
        match Dispatched::of(&mut self.rank, self.received).combine(stream, input, output) {
            Ok(()) => Ok(self.rank),
            Err(error) => Err(RoundError::of(error, self.rank)),
        }
    }

    /// [`Dispatched::combine_async`]. Enqueues only. Collective.
    ///
    /// # Errors
    /// As [`Dispatched::combine_async`], with the rank.
    pub fn combine_async(
        mut self,
        stream: Stream,
        input: &CombineInput,
        output: &CombineOutput,
    ) -> Result<CombinePendingOwned, RoundError> {
        let dispatched = Dispatched::of(&mut self.rank, self.received);
        let called = dispatched.combine_async(stream, input, output);
        match called.map(|pending| pending.returned) {
            Ok(returned) => Ok(CombinePendingOwned::of(self.rank, returned)),
            Err(error) => Err(RoundError::of(error, self.rank)),
        }
    }
}

/// A [`CombinePending`] that has its rank. Dropped, it [tears the rank down](Communicator#dropped).
#[must_use = "a combine that is not waited for blocks its communicator"]
#[derive(Debug)]
pub struct CombinePendingOwned {
    rank: Communicator,
    returned: Returned,
}

impl CombinePendingOwned {
    /// After the kernel was enqueued.
    const fn of(rank: Communicator, returned: Returned) -> Self {
        Self { rank, returned }
    }

    /// The rank, to read and to [`synchronize`](Communicator::synchronize).
    pub const fn expert_parallel(&self) -> &Communicator {
        &self.rank
    }

    /// The rank, whose round stays open.
    pub fn into_expert_parallel(self) -> Communicator {
        self.rank
    }

    /// [`CombinePending::wait`]: ends the round, and gives the rank back. Enqueues only. Collective.
    ///
    /// # Errors
    /// As [`CombinePending::wait`], with the rank.
    pub fn wait(mut self, stream: Stream) -> Result<Communicator, RoundError> {
        match CombinePending::of(&mut self.rank, self.returned).wait(stream) {
            Ok(()) => Ok(self.rank),
            Err(error) => Err(RoundError::of(error, self.rank)),
        }
    }
}
