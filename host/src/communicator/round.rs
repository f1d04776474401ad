//! A round under way: what may be called next, as types.

pub(crate) mod owned;

use ferry_layout::{DispatchOptions, DispatchWith, Kernel};

use crate::call::{CombineInput, CombineOutput, DispatchInput, DispatchOutput};
use crate::call::{Received, Returned, Sent};
use crate::communicator::Communicator;
use crate::communicator::Round;
use crate::communicator::launch::Prepared;
use crate::device::Args;
use crate::error::Error;
use crate::tensor::handles::Stream;

impl Communicator {
    /// Sends this rank's tokens to their experts' ranks and receives those for its own experts,
    /// in one kernel. Enqueues only; `input` and `output` are in use until `stream` has passed
    /// the kernel. Collective; not with [`skip_a2a`](crate::Config::skip_a2a), where it keeps the assignments
    /// of its own experts and waits for nobody.
    ///
    /// # Errors
    /// [`Error::TooManyTokens`], [`Error::TooManyScales`], [`Error::Capacity`], [`Error::Tensor`];
    /// [`Error::TensorsOverlap`]; [`Error::WithoutOptions`];
    /// [`Error::DispatchWithoutCombine`], [`Error::DispatchNotWaited`], [`Error::CombineNotWaited`]
    /// where the round before has not ended; [`Error::GreenContext`], [`Error::SharedGpu`];
    /// [`Error::Poisoned`]; or what the launch reports. Nothing is enqueued then.
    pub fn dispatch(
        &mut self,
        stream: Stream,
        input: &DispatchInput,
        output: &DispatchOutput,
    ) -> Result<Dispatched<'_>, Error> {
        self.prepare_dispatch(stream, input, output)?
            .launch(Dispatched::of)
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
        self.prepare_dispatch_async(stream, input)?
            .launch(DispatchPending::of)
    }

    /// The round that stands open because its [`Dispatched`] or pending half was dropped, or
    /// because its next call was refused. Not collective.
    ///
    /// What a call gives borrows the rank. A struct may keep the rank alone: it drops what a call
    /// gives, and takes it back here.
    ///
    /// ```
    /// # use ferry::*;
    /// struct Layer {
    ///     rank: Communicator,
    ///     rows: DispatchBuffers,
    ///     sums: CombineBuffers,
    ///     tokens: usize,
    /// }
    ///
    /// impl Layer {
    ///     fn dispatch(&mut self, stream: Stream, input: &DispatchInput) -> Result<(), Error> {
    ///         let _ = self.rank.dispatch(stream, input, self.rows.output())?;
    ///         Ok(())
    ///     }
    ///
    ///     fn combine(&mut self, stream: Stream, experts: &CombineInput) -> Result<(), Error> {
    ///         let Unfinished::Combine(dispatched) = self.rank.unfinished() else {
    ///             panic!("combine comes after dispatch");
    ///         };
    ///         dispatched.combine(stream, experts, &self.sums.output(self.tokens)?)?;
    ///         Ok(())
    ///     }
    /// }
    /// ```
    ///
    /// The owned forms have the rank within them, so that the type says how far a round is:
    /// [`dispatch_owned`](Self::dispatch_owned), [`dispatch_async_owned`](Self::dispatch_async_owned) and
    /// [`unfinished_owned`](Self::unfinished_owned); [`UnfinishedOwned`](crate::UnfinishedOwned) has an
    /// example.
    pub fn unfinished(&mut self) -> Unfinished<'_> {
        match self.round {
            Round::Idle => Unfinished::Nothing,
            Round::Sent(sent) => Unfinished::DispatchWait(DispatchPending::of(self, sent)),
            Round::Received(received) => Unfinished::Combine(Dispatched::of(self, received)),
            Round::Returned(returned) => {
                Unfinished::CombineWait(CombinePending::of(self, returned))
            }
        }
    }

    /// [`dispatch`](Self::dispatch), but for the launch.
    pub(crate) fn prepare_dispatch(
        &mut self,
        stream: Stream,
        input: &DispatchInput,
        output: &DispatchOutput,
    ) -> Result<Prepared<'_, Received>, Error> {
        self.require_idle()?;
        let args = input.args(&self.common, &self.plan)?;
        let (kernel, args) = match self.plan.config().skip_a2a {
            true => (Kernel::LocalDispatch, self.local(args)),
            false => (Kernel::Dispatch, args),
        };
        let args = output.add_to(args, &self.plan)?;
        output.require_apart(input)?;
        let received = Received::of(&input.sent(), output);
        self.prepare(stream, kernel, Args::Dispatch(args), received)
    }

    /// [`dispatch_async`](Self::dispatch_async), but for the launch.
    pub(crate) fn prepare_dispatch_async(
        &mut self,
        stream: Stream,
        input: &DispatchInput,
    ) -> Result<Prepared<'_, Sent>, Error> {
        self.require_split("dispatch_async")?;
        self.require_idle()?;
        let (args, sent) = (input.args(&self.common, &self.plan)?, input.sent());
        self.prepare(stream, Kernel::DispatchAsync, Args::Dispatch(args), sent)
    }

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

    /// After the kernel that ends a round was enqueued.
    pub(crate) const fn end_round(&mut self, _: ()) {
        self.round = Round::Idle;
    }
}

/// What is left to do in an open round; see [`Communicator::unfinished`].
#[derive(Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "an epilogue is kept by value: no call allocates"
)]
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
/// has ended, its [`Communicator`] cannot be used for another.
#[must_use = "a dispatch that is neither waited for nor taken back (`unfinished`) blocks its communicator"]
#[derive(Debug)]
pub struct DispatchPending<'a> {
    rank: &'a mut Communicator,
    sent: Sent,
}

impl<'a> DispatchPending<'a> {
    /// After the kernel was enqueued.
    pub(crate) const fn of(rank: &'a mut Communicator, sent: Sent) -> Self {
        rank.round = Round::Sent(sent);
        Self { rank, sent }
    }

    /// The rank, to read and to [`synchronize`](Communicator::synchronize).
    pub const fn expert_parallel(&self) -> &Communicator {
        self.rank
    }

    /// Receives the tokens for this rank's experts. Enqueues only; `output` is in use until
    /// `stream` has passed the kernel, which must come after that of the `dispatch_async`. The inputs of that
    /// are not used; with a [shared expert](crate::Config::shared_expert), `x` and `input_scale`
    /// are. Collective.
    ///
    /// # Errors
    /// [`Error::TooManyScales`], [`Error::Capacity`], [`Error::Tensor`], [`Error::TensorsOverlap`],
    /// [`Error::GreenContext`], [`Error::Poisoned`], or what the launch reports. Nothing is
    /// enqueued then, and [`Communicator::unfinished`] gives the wait back.
    pub fn wait(self, stream: Stream, output: &DispatchOutput) -> Result<Dispatched<'a>, Error> {
        self.prepare_wait(stream, output)?.launch(Dispatched::of)
    }

    /// [`wait`](Self::wait), but for the launch.
    pub(crate) fn prepare_wait(
        self,
        stream: Stream,
        output: &DispatchOutput,
    ) -> Result<Prepared<'a, Received>, Error> {
        let Self { rank, sent } = self;
        let args = output.add_to(sent.args(&rank.common, &rank.plan), &rank.plan)?;
        output.require_apart_from_sent(&sent, &rank.plan)?;
        let received = Received::of(&sent, output);
        rank.prepare(stream, Kernel::DispatchWait, Args::Dispatch(args), received)
    }
}

/// A dispatch whose tokens are (or, in stream order, will be) in its outputs, and whose combine
/// is due. Until the round has ended, its [`Communicator`] cannot be used for another.
#[must_use = "a dispatch that is neither combined nor taken back (`unfinished`) blocks its communicator"]
#[derive(Debug)]
pub struct Dispatched<'a> {
    rank: &'a mut Communicator,
    received: Received,
}

impl<'a> Dispatched<'a> {
    /// After the kernel was enqueued.
    pub(crate) const fn of(rank: &'a mut Communicator, received: Received) -> Self {
        rank.round = Round::Received(received);
        Self { rank, received }
    }

    /// The rank, to read and to [`synchronize`](Communicator::synchronize).
    pub const fn expert_parallel(&self) -> &Communicator {
        self.rank
    }

    /// Sends the experts' outputs back to their tokens' ranks and sums those of this rank's
    /// tokens, in one kernel; ends the round. Enqueues only; `input` and `output` are in use
    /// until `stream` has passed the kernel. Collective; not with [`skip_a2a`](crate::Config::skip_a2a),
    /// where it sums the rows of this rank's experts alone.
    ///
    /// # Errors
    /// [`Error::Tensor`], [`Error::TensorsOverlap`], [`Error::Epilogue`], [`Error::WithoutOptions`];
    /// [`Error::WeightsInReducedMode`],
    /// [`Error::ApartInReducedMode`], [`Error::WrongCombineOutput`] where weights, output and mode
    /// do not fit together; [`Error::GreenContext`], [`Error::SharedGpu`]; [`Error::Poisoned`]; or what
    /// the launch reports. Nothing is enqueued then, and [`Communicator::unfinished`] gives the dispatch
    /// back.
    pub fn combine(
        self,
        stream: Stream,
        input: &CombineInput,
        output: &CombineOutput,
    ) -> Result<(), Error> {
        self.prepare_combine(stream, input, output)?
            .launch(Communicator::end_round)
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
        self.prepare_combine_async(stream, input, output)?
            .launch(CombinePending::of)
    }

    /// [`combine`](Self::combine), but for the launch.
    pub(crate) fn prepare_combine(
        self,
        stream: Stream,
        input: &CombineInput,
        output: &CombineOutput,
    ) -> Result<Prepared<'a, ()>, Error> {
        let Self { rank, received } = self;
        let mut args = input.args(
            output,
            &rank.common,
            &rank.plan,
            received,
            rank.device().epilogue_bytes(),
        )?;
        let kernel = match rank.plan.config().skip_a2a {
            true => {
                args.options.shared_index = rank.rank().0;
                Kernel::LocalCombine
            }
            false => Kernel::Combine,
        };
        rank.prepare(stream, kernel, Args::Combine(args), ())
    }

    /// [`combine_async`](Self::combine_async), but for the launch.
    pub(crate) fn prepare_combine_async(
        self,
        stream: Stream,
        input: &CombineInput,
        output: &CombineOutput,
    ) -> Result<Prepared<'a, Returned>, Error> {
        let Self { rank, received } = self;
        rank.require_split("combine_async")?;
        let args = input.args(
            output,
            &rank.common,
            &rank.plan,
            received,
            rank.device().epilogue_bytes(),
        )?;
        let returned = Returned {
            received,
            input: *input,
            output: *output,
        };
        rank.prepare(stream, Kernel::CombineAsync, Args::Combine(args), returned)
    }
}

/// A combine that was sent and not received; [`wait`](Self::wait) receives it.
#[must_use = "a combine that is neither waited for nor taken back (`unfinished`) blocks its communicator"]
#[derive(Debug)]
pub struct CombinePending<'a> {
    rank: &'a mut Communicator,
    returned: Returned,
}

impl<'a> CombinePending<'a> {
    /// After the kernel was enqueued.
    pub(crate) const fn of(rank: &'a mut Communicator, returned: Returned) -> Self {
        rank.round = Round::Returned(returned);
        Self { rank, returned }
    }

    /// The rank, to read and to [`synchronize`](Communicator::synchronize).
    pub const fn expert_parallel(&self) -> &Communicator {
        self.rank
    }

    /// Receives and sums what comes back for this rank's tokens, into the output that was given
    /// to `combine_async`; ends the round. Enqueues only; the kernel must come after that of the
    /// `combine_async`. Collective.
    ///
    /// # Errors
    /// [`Error::GreenContext`], [`Error::Poisoned`], or what the launch reports. Nothing is
    /// enqueued then, and [`Communicator::unfinished`] gives the wait back.
    pub fn wait(self, stream: Stream) -> Result<(), Error> {
        self.prepare_wait(stream)?.launch(Communicator::end_round)
    }

    /// [`wait`](Self::wait), but for the launch.
    pub(crate) fn prepare_wait(self, stream: Stream) -> Result<Prepared<'a, ()>, Error> {
        let Self { rank, returned } = self;
        let Returned {
            received,
            input,
            output,
        } = returned;
        let args = input.args(
            &output,
            &rank.common,
            &rank.plan,
            received,
            rank.device().epilogue_bytes(),
        )?;
        rank.prepare(stream, Kernel::CombineWait, Args::Combine(args), ())
    }
}
