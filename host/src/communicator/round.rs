//! The calls of a round, in order.

use bytemuck::Zeroable;
use ferry_layout::{DispatchOptions, DispatchWith, GiveUpArgs, Kernel, ReceiveLayout};

use crate::call::combine::Returned;
use crate::call::dispatch::Received;
use crate::call::{Call, CombineInput, CombineOutput, DispatchInput, DispatchOutput};
use crate::communicator::Communicator;
use crate::communicator::launch::Prepared;
use crate::communicator::open::Open;
use crate::device::Args;
use crate::error::Error;
use crate::error::round::Round;
use crate::tensor::handles::Stream;

impl Communicator {
    /// Returns the state of this rank's round, as its calls left it: launches of graphs do not count. Not
    /// collective; does not synchronize.
    pub const fn round(&self) -> Round {
        self.open.round()
    }

    /// Sends this rank's tokens to their experts' ranks and receives those for its own experts, in one
    /// kernel; [`combine`](Self::combine), [`combine_async`](Self::combine_async) or
    /// [`give_up`](Self::give_up) comes next. Enqueues only; `input` and `output` are in use until `stream`
    /// has passed the kernel, [`kept_ids`](DispatchInput::kept_ids) until the round has ended. Collective;
    /// not with [`skip_a2a`](crate::Config::skip_a2a), which keeps the assignments of this rank's own experts
    /// and waits for nobody.
    ///
    /// # Errors
    /// [`Error::WrongOrder`] if a round is open;
    /// [`Error::TooManyTokens`], [`Error::TooManyScales`], [`Error::Capacity`], [`Error::Tensor`];
    /// [`Error::TensorsOverlap`]; [`Error::WithoutOptions`]; [`Error::GreenContext`],
    /// [`Error::SharedGpu`]; [`Error::Poisoned`]; or the launch's own. Nothing is enqueued then, and the
    /// round stays as it was.
    pub fn dispatch(
        &mut self,
        stream: Stream,
        input: &DispatchInput,
        output: &DispatchOutput,
    ) -> Result<(), Error> {
        self.enqueue(stream, &Call::Dispatch(*input, *output))
    }

    /// The first half of [`dispatch`](Self::dispatch): sends; [`dispatch_wait`](Self::dispatch_wait) comes
    /// next. The kernel waits until every rank has read the rows of the round before, which is usually the
    /// case when it begins, and for nothing else from its peers. Enqueues only; `input` is in use until
    /// `stream` has passed the kernel; with a [shared expert](crate::Config::shared_expert), its `x`,
    /// `input_scale` and `x_scales` until `stream` has passed the kernel of the wait, and
    /// [`kept_ids`](DispatchInput::kept_ids) until the round has ended. Collective.
    ///
    /// # Errors
    /// Those of [`dispatch`](Self::dispatch) about inputs; [`Error::SplitWithoutTravel`] with
    /// [`skip_a2a`](crate::Config::skip_a2a).
    pub fn dispatch_async(&mut self, stream: Stream, input: &DispatchInput) -> Result<(), Error> {
        self.enqueue(stream, &Call::DispatchAsync(*input))
    }

    /// The second half of [`dispatch`](Self::dispatch): receives the tokens for this rank's experts;
    /// [`combine`](Self::combine), [`combine_async`](Self::combine_async) or [`give_up`](Self::give_up) comes
    /// next. Enqueues only; `output` is in use until `stream` has passed the kernel, which must come after
    /// that of [`dispatch_async`](Self::dispatch_async). The inputs of that call are not read again, except
    /// `x`, `input_scale` and `x_scales` with a [shared expert](crate::Config::shared_expert). Collective.
    ///
    /// # Errors
    /// [`Error::WrongOrder`] if no `dispatch_async` waits for this; [`Error::TooManyScales`],
    /// [`Error::Capacity`], [`Error::Tensor`], [`Error::TensorsOverlap`], [`Error::GreenContext`],
    /// [`Error::Poisoned`], or the launch's own. Nothing is enqueued then, and it can be called again.
    pub fn dispatch_wait(&mut self, stream: Stream, output: &DispatchOutput) -> Result<(), Error> {
        self.enqueue(stream, &Call::DispatchWait(*output))
    }

    /// Sends the experts' outputs back to their tokens' ranks and sums those of this rank's
    /// tokens, in one kernel; ends the round. Enqueues only; `input` and `output` are in use
    /// until `stream` has passed the kernel. Collective; not with [`skip_a2a`](crate::Config::skip_a2a),
    /// which sums the rows of this rank's experts alone.
    ///
    /// # Errors
    /// [`Error::WrongOrder`] unless a dispatch is to be combined;
    /// [`Error::Tensor`], [`Error::TensorsOverlap`], [`Error::Epilogue`], [`Error::WithoutOptions`];
    /// [`Error::WeightsInReducedMode`],
    /// [`Error::ApartInReducedMode`], [`Error::WrongCombineOutput`] if weights, output and mode
    /// do not fit together; [`Error::GreenContext`], [`Error::SharedGpu`]; [`Error::Poisoned`]; or the
    /// launch's own. Nothing is enqueued then, and it can be called again.
    pub fn combine(
        &mut self,
        stream: Stream,
        input: &CombineInput,
        output: &CombineOutput,
    ) -> Result<(), Error> {
        self.enqueue(stream, &Call::Combine(*input, *output))
    }

    /// The first half of [`combine`](Self::combine): sends, and waits for no peer;
    /// [`combine_wait`](Self::combine_wait) comes next. Enqueues only; `input` and `output` are in use until
    /// `stream` has passed the kernel of the wait. Collective.
    ///
    /// # Errors
    /// Those of [`combine`](Self::combine); [`Error::SplitWithoutTravel`] with
    /// [`skip_a2a`](crate::Config::skip_a2a).
    pub fn combine_async(
        &mut self,
        stream: Stream,
        input: &CombineInput,
        output: &CombineOutput,
    ) -> Result<(), Error> {
        self.enqueue(stream, &Call::CombineAsync(*input, *output))
    }

    /// The second half of [`combine`](Self::combine): receives and sums the rows of this rank's tokens, into
    /// the output that was passed to [`combine_async`](Self::combine_async); ends the round. Enqueues only;
    /// the kernel must come after that of `combine_async`. Collective.
    ///
    /// # Errors
    /// [`Error::WrongOrder`] if no `combine_async` waits for this; [`Error::GreenContext`],
    /// [`Error::Poisoned`], or the launch's own. Nothing is enqueued then, and it can be called again.
    pub fn combine_wait(&mut self, stream: Stream) -> Result<(), Error> {
        self.enqueue(stream, &Call::CombineWait)
    }

    /// Ends the round without a combine, in one kernel: the next dispatch may follow. No row returns, and no
    /// tensor is read or written. Comes after [`dispatch`](Self::dispatch) or
    /// [`dispatch_wait`](Self::dispatch_wait), and a [view](Self::view) ends with it as with a combine. On
    /// one node the kernel waits for no peer, between nodes for all of them. Enqueues only. Collective: all
    /// ranks give up a round, or all combine it. If one combines what another gives up, no rank gets a wrong
    /// sum, but both end with a [`PeerTimeout`](ferry_layout::FaultKind::PeerTimeout) after their deadline,
    /// or with [`Error::PeerGaveUp`], in this round or in their next dispatch. Not collective with
    /// [`skip_a2a`](crate::Config::skip_a2a).
    ///
    /// In the numbers of rounds that a [`Fault`](ferry_layout::Fault) has, a round that was given up counts
    /// as two.
    ///
    /// ```
    /// use ferry::*;
    ///
    /// # fn main() -> Result<(), Error> {
    /// let group = Group::simulated(2, 7)?;
    /// let plan = Plan::new(&group, Config::new(4, 2, 8, 3))?;
    /// let mut ranks = Communicator::new(&group, &plan)?;
    /// for rank in &mut ranks {
    ///     let (device, stream) = (rank.device().clone(), rank.device().stream()?);
    ///     let mut rows = DispatchBuffers::new(&device, &plan)?;
    ///     let input = rows.upload(&[half::bf16::ONE; 8], &[1, 2], None)?;
    ///     rank.dispatch(stream, &input, rows.output())?;
    ///     rank.give_up(stream)?;
    ///     assert_eq!(rank.round(), Round::Idle);
    /// }
    /// for rank in &ranks {
    ///     assert_eq!(rank.synchronize(Stream::DEFAULT)?.fault(), None);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::WrongOrder`] unless a dispatch is to be combined: no round is open, or a half of a call was
    /// not waited for; [`Error::GreenContext`], [`Error::SharedGpu`]; [`Error::Poisoned`]; or the launch's
    /// own. Nothing is enqueued then, and it can be called again.
    pub fn give_up(&mut self, stream: Stream) -> Result<(), Error> {
        self.enqueue(stream, &Call::GiveUp)
    }

    /// Enqueues a call of a round, as the function of its name does: [`dispatch`](Self::dispatch) for
    /// [`Call::Dispatch`], and so on. Enqueues only. Collective as that function is.
    ///
    /// # Errors
    /// Those of that function. Nothing is enqueued then.
    pub fn enqueue(&mut self, stream: Stream, call: &Call) -> Result<(), Error> {
        let prepared = self.prepare(stream, call)?;
        self.launch(prepared)
    }

    /// Makes all checks of a call.
    pub(crate) fn prepare(&self, stream: Stream, call: &Call) -> Result<Prepared, Error> {
        self.require_alive()?;
        let (plan, common, skips_a2a) = (&self.plan, &self.common, self.plan.config().skip_a2a);
        if call.is_split() && skips_a2a {
            return Err(Error::SplitWithoutTravel { call: call.name() });
        }
        let combine = |input: &CombineInput, output: &CombineOutput, received| {
            input.args(output, common, plan, received, self.epilogue_bytes())
        };
        let (kernel, args, next) = match (call, &self.open) {
            (Call::Dispatch(input, output), Open::Idle) => {
                let mut args = input.args(common, plan)?;
                if skips_a2a {
                    args = self.local(args);
                }
                let args = output.add_to(args, plan)?;
                output.require_apart(input)?;
                let next = Open::Received(Received::of(&input.sent(&args), output));
                (Kernel::Dispatch, Args::Dispatch(args), next)
            }
            (Call::DispatchAsync(input), Open::Idle) => {
                let args = input.args(common, plan)?;
                let next = Open::Sent(input.sent(&args), None);
                (Kernel::DispatchAsync, Args::Dispatch(args), next)
            }
            (Call::DispatchCounts, &Open::Sent(sent, _)) => {
                let (args, ticket) = self.ask_for_counts(stream, sent)?;
                let next = Open::Sent(sent, Some(ticket));
                (Kernel::DispatchCounts, Args::Counts(args), next)
            }
            (Call::DispatchWait(output), Open::Sent(sent, _)) => {
                let args = output.add_to(sent.args(common, plan), plan)?;
                output.require_apart_from_sent(sent, plan)?;
                let next = Open::Received(Received::of(sent, output));
                (Kernel::DispatchWait, Args::Dispatch(args), next)
            }
            (Call::Combine(input, output), &Open::Received(received)) => {
                let mut args = combine(input, output, received)?;
                if skips_a2a {
                    args.options.shared_index = self.rank().0;
                }
                (Kernel::Combine, Args::Combine(args), Open::Idle)
            }
            (&Call::CombineAsync(input, output), &Open::Received(received)) => {
                let args = Args::Combine(combine(&input, &output, received)?);
                let returned = Returned {
                    received,
                    input,
                    output,
                };
                (Kernel::CombineAsync, args, Open::Returned(returned))
            }
            (Call::CombineWait, Open::Returned(sent)) => {
                let args = combine(&sent.input, &sent.output, sent.received)?;
                (Kernel::CombineWait, Args::Combine(args), Open::Idle)
            }
            (Call::GiveUp, Open::Received(_)) => {
                let args = Args::GiveUp(self.give_up_args());
                (Kernel::GiveUp, args, Open::Idle)
            }
            _ => return Err(self.wrong_order(call.name())),
        };
        let kernel = match kernel {
            Kernel::Dispatch if skips_a2a => Kernel::LocalDispatch,
            Kernel::Combine if skips_a2a => Kernel::LocalCombine,
            kernel => kernel,
        };
        self.prepare_launch(stream, kernel, args, next)
    }

    fn give_up_args(&self) -> GiveUpArgs {
        let config = self.plan.config();
        GiveUpArgs {
            layout: match config.receive.layout() {
                ReceiveLayout::Padded => ReceiveLayout::ByExpert.number().into(),
                layout => layout.number().into(),
            },
            is_local: config.skip_a2a.into(),
            common: self.common,
            ..GiveUpArgs::zeroed()
        }
    }

    /// The error of a call that does not come next.
    pub(super) const fn wrong_order(&self, call: &'static str) -> Error {
        let open = self.round();
        let rank = self.rank();
        Error::WrongOrder { call, rank, open }
    }

    /// Arguments of a dispatch with `skip_a2a`.
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
