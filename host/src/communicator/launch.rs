//! Launches of a communicator's kernels: first every check, then the launch.

use ferry_layout::Kernel;

use super::open::Open;
use super::{Communicator, Poison};
use crate::device::sharing::one_stream::{Lane, Reserved};
use crate::device::{Args, InGraph, Launch};
use crate::error::Error;
use crate::tensor::handles::Stream;

/// A call whose checks were all made, and which was not launched yet.
#[must_use]
pub(crate) struct Prepared {
    launch: Launch,
    turn: Option<Reserved>,
    /// The round after the launch.
    next: Open,
}

impl Communicator {
    /// Enqueues the kernel of a call of this rank.
    pub(crate) fn launch(&mut self, call: Prepared) -> Result<(), Error> {
        let Prepared { launch, turn, next } = call;
        self.streams.enter(launch.stream);
        // SAFETY: the tensors have memory for every element (checked when `args` was made of
        // them, with lifetimes promised to `DevicePtr::new`); everything else that it names is this
        // communicator's, allocated in the plan's sizes and kept until it is closed; and its device
        // returned the kernels for the plan's shape and for options of the plan's kind.
        let in_graph = unsafe { self.device().launch_held(&launch, &self.member) }?;
        self.streams.launched(in_graph);
        let progress = &self.windows.progress;
        progress.enqueued(self.rank(), launch.kernel, in_graph);
        if let Some(turn) = turn {
            turn.launched(in_graph == InGraph::Held);
        }
        self.open = next;
        Ok(())
    }

    /// Reserves the kernel's turn, if the rank shares its GPU with others of this process: no kernel of
    /// another rank that waits for this one is in the stream, nor will be until this one is launched.
    fn reserve(&self, launch: &Launch) -> Result<Option<Reserved>, Error> {
        let Some(turn) = &self.turn else {
            return Ok(None);
        };
        let lane = Lane::of(launch.stream, self.device().capture(launch.stream));
        Ok(Some(turn.reserve(launch.kernel, lane)?))
    }

    /// Makes all checks of a launch: that no kernel has given up, that the kernels are loaded, that there is
    /// room for them and that it is their turn.
    pub(super) fn prepare_launch(
        &self,
        stream: Stream,
        kernel: Kernel,
        args: Args,
        next: Open,
    ) -> Result<Prepared, Error> {
        if let Some((fault, _)) = self.fault()?
            && !fault.kind.is_input()
        {
            return Err(self.poison(Poison::Fault(fault)));
        }
        let keeps_rows = self.plan.config().receive.keeps_rows();
        debug_assert_eq!(args.keeps_rows(), keeps_rows, "options of the plan's kind");
        let kernels = if args.has_options() || kernel.needs_options() {
            let with_options = self.memory.kernels_with_options.as_ref();
            with_options.ok_or_else(|| Error::WithoutOptions {
                option: args.first_option(),
            })?
        } else {
            &self.memory.kernels
        };
        let max_sms = match (kernel, &args) {
            // One block, in every layout.
            (Kernel::DispatchCounts, _) => Some(1),
            // One warp has the only row.
            (_, Args::Links(args)) if args.has_one_row() => Some(1),
            _ => self.max_sms,
        };
        self.require_room(stream, max_sms)?;
        let launch = Launch {
            kernel,
            kernels: kernels.clone(),
            args,
            shmem: self.plan.shape().spans_nodes(),
            max_sms,
            stream,
        };
        let turn = self.reserve(&launch)?;
        Ok(Prepared { launch, turn, next })
    }

    /// Bytes of the user's epilogue in combines, rounded up to 8; `None` for Ferry's steps, which the kernels
    /// for rows that stay as they came always have.
    pub(crate) fn epilogue_bytes(&self) -> Option<usize> {
        if self.plan.config().receive.keeps_rows() {
            return None;
        }
        self.device().epilogue_bytes()
    }

    /// Checks that `stream` has as many multiprocessors as a launch takes. Repeated for each launch, as a
    /// handle may be another stream's after its own was destroyed.
    fn require_room(&self, stream: Stream, max_sms: Option<u32>) -> Result<(), Error> {
        match self.device().stream_multiprocessors(stream) {
            Some(multiprocessors) if max_sms.is_none_or(|most| most > multiprocessors) => {
                Err(Error::GreenContext {
                    max_sms,
                    multiprocessors,
                })
            }
            _ => Ok(()),
        }
    }
}
