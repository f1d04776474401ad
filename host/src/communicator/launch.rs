//! Launches of a communicator's kernels: first every check, then the launch.

use ferry_layout::Kernel;

use super::open::Open;
use super::{Communicator, Poison};
use crate::device::sharing::one_stream::{Lane, Reserved};
use crate::device::{Args, InGraph, Launch};
use crate::error::{Error, LocalRanksError};
use crate::tensor::handles::Stream;

/// A call whose checks were all made, and which was not launched yet.
#[must_use]
pub(crate) struct Prepared {
    launch: Launch,
    /// The round after the launch.
    next: Open,
}

impl Prepared {
    /// Enqueues the kernels of one call of several ranks, one after another. If the first cannot be
    /// enqueued, none is, and all ranks stay as they are; if a later one cannot, all are poisoned.
    pub(crate) fn launch_all(
        ranks: &mut [Communicator],
        calls: Vec<Self>,
    ) -> Result<(), LocalRanksError> {
        let mut turns = Vec::new();
        for (rank, call) in ranks.iter().zip(&calls) {
            turns.push(rank.reserve(&call.launch).map_err(|refused| {
                let (rank, source) = (rank.rank(), Box::new(refused));
                LocalRanksError::Refused { rank, source }
            })?);
        }
        for (at, (call, turn)) in calls.iter().zip(turns).enumerate() {
            let Err(error) = ranks[at].enqueue(&call.launch, turn) else {
                ranks[at].open = call.next;
                continue;
            };
            let (rank, source) = (ranks[at].rank(), Box::new(error));
            if at == 0 {
                return Err(LocalRanksError::Refused { rank, source });
            }
            for each in ranks {
                each.poison(Poison::Launch(rank));
            }
            return Err(LocalRanksError::NotLaunched { rank, source });
        }
        Ok(())
    }
}

impl Communicator {
    /// Enqueues the kernel of a call of this rank.
    pub(crate) fn launch(&mut self, call: Prepared) -> Result<(), Error> {
        let turn = self.reserve(&call.launch)?;
        self.enqueue(&call.launch, turn)?;
        self.open = call.next;
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

    fn enqueue(&mut self, launch: &Launch, turn: Option<Reserved>) -> Result<(), Error> {
        self.streams.enter(launch.stream);
        // SAFETY: the tensors have memory for every element (checked when `args` was made of
        // them, with lifetimes promised to `DevicePtr::new`); everything else that it names is this
        // communicator's, allocated in the plan's sizes and kept until it is closed; and its device
        // returned the kernels for the plan's shape and for options of the plan's kind.
        let in_graph = unsafe { self.device().launch_held(launch, &self.member) }?;
        self.streams.launched(in_graph);
        let progress = &self.windows.progress;
        progress.enqueued(self.rank(), launch.kernel, in_graph);
        if let Some(turn) = turn {
            turn.launched(in_graph == InGraph::Held);
        }
        Ok(())
    }

    /// Makes all checks of a launch: that the communicator has not given up, that the kernels are loaded,
    /// that there is room for them.
    pub(crate) fn prepare(
        &self,
        stream: Stream,
        kernel: Kernel,
        args: Args,
        next: Open,
    ) -> Result<Prepared, Error> {
        self.require_alive()?;
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
        let max_sms = match kernel {
            // One block, in every layout.
            Kernel::DispatchCounts => Some(1),
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
        Ok(Prepared { launch, next })
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
