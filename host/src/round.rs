//! A round under way: what may be called next, as types.

use ferry_layout::{DispatchOptions, DispatchWith, Kernel};

use crate::arguments::{Received, Sent};
use crate::device::Args;
use crate::expert_parallel::Round;
use crate::{
    CombineInput, CombineOutput, DispatchInput, DispatchOutput, Error, ExpertParallel, Stream,
};

impl ExpertParallel {
    /// Sends this rank's tokens to their experts' ranks and receives those for its own experts,
    /// in one kernel. Enqueues only; `input` and `output` are in use until `stream` has passed
    /// the kernel. Collective.
    ///
    /// # Errors
    /// [`Error::TooManyTokens`], [`Error::TooManyScales`], [`Error::NoRoomForShared`], [`Error::Tensor`];
    /// [`Error::WithoutOptions`];
    /// [`Error::DispatchWithoutCombine`], [`Error::DispatchNotWaited`], [`Error::CombineNotWaited`]
    /// where the round before has not ended; [`Error::GreenContext`]; [`Error::Poisoned`]; or what
    /// the launch reports. Nothing is enqueued then.
    pub fn dispatch(
        &mut self,
        stream: Stream,
        input: &DispatchInput,
        output: &DispatchOutput,
    ) -> Result<Dispatched<'_>, Error> {
        self.require_idle()?;
        let args = input.args(&self.common, &self.plan)?;
        let (kernel, args) = match self.plan.config().skip_a2a {
            true => (Kernel::LocalDispatch, self.local(args)),
            false => (Kernel::Dispatch, args),
        };
        let args = output.add_to(args, &self.plan)?;
        self.launch(stream, kernel, Args::Dispatch(args))?;
        Ok(Dispatched::of(self, Received::of(&input.sent(), output)))
    }

    /// The first half of [`dispatch`](Self::dispatch): sends. It waits until every rank has read
    /// what the round before brought, which is usually so when it begins, and for nothing else that
    /// a peer does. Enqueues only; `input` is in use until `stream` has passed the kernel; with a
    /// [shared expert](crate::Config::shared_expert), its `x` and `input_scale` until `stream` has passed the
    /// kernel of the wait. Collective.
    ///
    /// # Errors
    /// As [`dispatch`](Self::dispatch); [`Error::SplitWithoutTravel`] with
    /// [`skip_a2a`](crate::Config::skip_a2a).
    pub fn dispatch_async(
        &mut self,
        stream: Stream,
        input: &DispatchInput,
    ) -> Result<DispatchPending<'_>, Error> {
        self.require_split("dispatch_async")?;
        self.require_idle()?;
        let args = input.args(&self.common, &self.plan)?;
        self.launch(stream, Kernel::DispatchAsync, Args::Dispatch(args))?;
        Ok(DispatchPending::of(self, input.sent()))
    }

    /// The round that stands open because its [`Dispatched`] or pending half was dropped, or
    /// because its next call was refused. Not collective.
    pub fn unfinished(&mut self) -> Unfinished<'_> {
        match self.round {
            Round::Idle => Unfinished::Nothing,
            Round::Sent(sent) => Unfinished::DispatchWait(DispatchPending::of(self, sent)),
            Round::Received(received) => Unfinished::Combine(Dispatched::of(self, received)),
            Round::Returned {
                received,
                input,
                output,
            } => Unfinished::CombineWait(CombinePending::of(self, received, input, output)),
        }
    }
}

impl ExpertParallel {
    /// That sending and waiting are two things.
    const fn require_split(&self, call: &'static str) -> Result<(), Error> {
        match self.plan.config().skip_a2a {
            true => Err(Error::SplitWithoutTravel { call }),
            false => Ok(()),
        }
    }

    /// A dispatch where nothing travels.
    fn local(&self, with: DispatchWith) -> DispatchWith {
        let options = DispatchOptions {
            first_expert: self.rank().0 * self.plan.shape().experts,
            all_experts: self.plan.config().experts as u32,
            shared_index: self.rank().0,
            ..with.options
        };
        DispatchWith { options, ..with }
    }
}

/// What is left to do in an open round; see [`ExpertParallel::unfinished`].
#[derive(Debug)]
pub enum Unfinished<'a> {
    /// No round is open.
    Nothing,
    /// The wait of a `dispatch_async`.
    DispatchWait(DispatchPending<'a>),
    /// The combine of a dispatch.
    Combine(Dispatched<'a>),
    /// The wait of a `combine_async`.
    CombineWait(CombinePending<'a>),
}

/// A dispatch that was sent and not received; [`wait`](Self::wait) receives it. Until the round
/// has ended, its [`ExpertParallel`] cannot be used for another.
#[must_use = "a dispatch that is not waited for blocks its communicator"]
#[derive(Debug)]
pub struct DispatchPending<'a> {
    rank: &'a mut ExpertParallel,
    sent: Sent,
}

impl<'a> DispatchPending<'a> {
    /// After the kernel was enqueued.
    pub(crate) const fn of(rank: &'a mut ExpertParallel, sent: Sent) -> Self {
        rank.round = Round::Sent(sent);
        Self { rank, sent }
    }

    /// The rank, to read and to [`synchronize`](ExpertParallel::synchronize).
    pub const fn expert_parallel(&self) -> &ExpertParallel {
        self.rank
    }

    /// Receives the tokens for this rank's experts. Enqueues only; `output` is in use until
    /// `stream` has passed the kernel, which must come after that of the `dispatch_async`. The inputs of that
    /// are not used; with a [shared expert](crate::Config::shared_expert), `x` and `input_scale`
    /// are. Collective.
    ///
    /// # Errors
    /// [`Error::TooManyScales`], [`Error::NoRoomForShared`], [`Error::Tensor`],
    /// [`Error::GreenContext`], [`Error::Poisoned`], or what the launch reports. Nothing is
    /// enqueued then, and [`ExpertParallel::unfinished`] gives the wait back.
    pub fn wait(self, stream: Stream, output: &DispatchOutput) -> Result<Dispatched<'a>, Error> {
        let Self { rank, sent } = self;
        let args = output.add_to(sent.args(&rank.common, &rank.plan), &rank.plan)?;
        rank.launch(stream, Kernel::DispatchWait, Args::Dispatch(args))?;
        Ok(Dispatched::of(rank, Received::of(&sent, output)))
    }
}

/// A dispatch whose tokens are (or, in stream order, will be) in its outputs, and whose combine
/// is due. Until the round has ended, its [`ExpertParallel`] cannot be used for another.
#[must_use = "a dispatch that is not combined blocks its communicator"]
#[derive(Debug)]
pub struct Dispatched<'a> {
    rank: &'a mut ExpertParallel,
    received: Received,
}

impl<'a> Dispatched<'a> {
    /// After the kernel was enqueued.
    pub(crate) const fn of(rank: &'a mut ExpertParallel, received: Received) -> Self {
        rank.round = Round::Received(received);
        Self { rank, received }
    }

    /// The rank, to read and to [`synchronize`](ExpertParallel::synchronize).
    pub const fn expert_parallel(&self) -> &ExpertParallel {
        self.rank
    }

    /// Sends the experts' outputs back to their tokens' ranks and sums those of this rank's
    /// tokens, in one kernel; ends the round. Enqueues only; `input` and `output` are in use
    /// until `stream` has passed the kernel. Collective.
    ///
    /// # Errors
    /// [`Error::Tensor`], [`Error::TensorsOverlap`]; [`Error::WeightsInReducedMode`],
    /// [`Error::ApartInReducedMode`], [`Error::WrongCombineOutput`] where weights, output and mode
    /// do not fit together; [`Error::GreenContext`]; [`Error::Poisoned`]; or what the launch
    /// reports. Nothing is enqueued then, and [`ExpertParallel::unfinished`] gives the dispatch
    /// back.
    pub fn combine(
        self,
        stream: Stream,
        input: &CombineInput,
        output: &CombineOutput,
    ) -> Result<(), Error> {
        let Self { rank, received } = self;
        let mut args = input.args(output, &rank.common, &rank.plan, received)?;
        let kernel = match rank.plan.config().skip_a2a {
            true => {
                args.options.shared_index = rank.rank().0;
                Kernel::LocalCombine
            }
            false => Kernel::Combine,
        };
        rank.launch(stream, kernel, Args::Combine(args))?;
        rank.round = Round::Idle;
        Ok(())
    }

    /// The first half of [`combine`](Self::combine): sends, and waits for no peer. Enqueues
    /// only; `input` and `output` are in use until `stream` has passed the kernel of the wait.
    /// Collective.
    ///
    /// # Errors
    /// As [`combine`](Self::combine); [`Error::SplitWithoutTravel`] with
    /// [`skip_a2a`](crate::Config::skip_a2a).
    pub fn combine_async(
        self,
        stream: Stream,
        input: &CombineInput,
        output: &CombineOutput,
    ) -> Result<CombinePending<'a>, Error> {
        let Self { rank, received } = self;
        rank.require_split("combine_async")?;
        let args = input.args(output, &rank.common, &rank.plan, received)?;
        rank.launch(stream, Kernel::CombineAsync, Args::Combine(args))?;
        Ok(CombinePending::of(rank, received, *input, *output))
    }
}

/// A combine that was sent and not received; [`wait`](Self::wait) receives it.
#[must_use = "a combine that is not waited for blocks its communicator"]
#[derive(Debug)]
pub struct CombinePending<'a> {
    rank: &'a mut ExpertParallel,
    received: Received,
    input: CombineInput,
    output: CombineOutput,
}

impl<'a> CombinePending<'a> {
    /// After the kernel was enqueued.
    pub(crate) const fn of(
        rank: &'a mut ExpertParallel,
        received: Received,
        input: CombineInput,
        output: CombineOutput,
    ) -> Self {
        rank.round = Round::Returned {
            received,
            input,
            output,
        };
        Self {
            rank,
            received,
            input,
            output,
        }
    }

    /// The rank, to read and to [`synchronize`](ExpertParallel::synchronize).
    pub const fn expert_parallel(&self) -> &ExpertParallel {
        self.rank
    }

    /// Receives and sums what comes back for this rank's tokens, into the output that was given
    /// to `combine_async`; ends the round. Enqueues only; the kernel must come after that of the
    /// `combine_async`. Collective.
    ///
    /// # Errors
    /// [`Error::GreenContext`], [`Error::Poisoned`], or what the launch reports. Nothing is
    /// enqueued then, and [`ExpertParallel::unfinished`] gives the wait back.
    pub fn wait(self, stream: Stream) -> Result<(), Error> {
        let Self {
            rank,
            received,
            input,
            output,
        } = self;
        let args = input.args(&output, &rank.common, &rank.plan, received)?;
        rank.launch(stream, Kernel::CombineWait, Args::Combine(args))?;
        rank.round = Round::Idle;
        Ok(())
    }
}
