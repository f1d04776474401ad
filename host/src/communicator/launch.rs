//! How a kernel of a communicator is launched: first every check, then the launch.

use ferry_layout::Kernel;

use super::{Communicator, Poison};
use crate::device::sharing::one_stream::{Lane, Reserved};
use crate::device::{Args, InGraph, Launch};
use crate::error::{Error, LocalRanksError};
use crate::tensor::handles::Stream;

/// A call whose checks were all made, and that was not launched. Dropped, it leaves the communicator as it
/// was.
#[must_use]
pub(crate) struct Prepared<'a, Next> {
    rank: &'a mut Communicator,
    launch: Launch,
    /// What the round is then.
    next: Next,
}

impl<'a, Next> Prepared<'a, Next> {
    /// Enqueues the kernel; `then` opens what comes after it.
    pub(crate) fn launch<T>(
        mut self,
        then: impl FnOnce(&'a mut Communicator, Next) -> T,
    ) -> Result<T, Error> {
        let turn = self.reserve()?;
        self.enqueue(turn)?;
        Ok(then(self.rank, self.next))
    }

    /// Enqueues the kernels of one call of several ranks, one after another. Where the first cannot be
    /// enqueued, none is, and all ranks stay as they are; where a later one cannot, all are poisoned.
    pub(crate) fn launch_all<T>(
        mut calls: Vec<Self>,
        mut then: impl FnMut(&'a mut Communicator, Next) -> T,
    ) -> Result<Vec<T>, LocalRanksError> {
        let mut turns = Vec::new();
        for call in &calls {
            turns.push(call.reserve().map_err(|refused| {
                let (rank, source) = (call.rank.rank(), Box::new(refused));
                LocalRanksError::Refused { rank, source }
            })?);
        }
        for (at, (call, turn)) in calls.iter_mut().zip(turns).enumerate() {
            let Err(error) = call.enqueue(turn) else {
                continue;
            };
            let (rank, source) = (call.rank.rank(), Box::new(error));
            if at == 0 {
                return Err(LocalRanksError::Refused { rank, source });
            }
            for call in &calls {
                call.rank.poison(Poison::Launch(rank));
            }
            return Err(LocalRanksError::NotLaunched { rank, source });
        }
        let each = calls.into_iter();
        Ok(each.map(|call| then(call.rank, call.next)).collect())
    }

    /// Reserves the kernel's turn, of a rank that shares its GPU with others of this process: no kernel of
    /// another rank stands in the stream and waits for this one, nor will until it is launched.
    fn reserve(&self) -> Result<Option<Reserved>, Error> {
        let Some(turn) = &self.rank.turn else {
            return Ok(None);
        };
        let stream = self.launch.stream;
        let lane = Lane::of(stream, self.rank.device().capture(stream));
        Ok(Some(turn.reserve(self.launch.kernel, lane)?))
    }

    fn enqueue(&mut self, turn: Option<Reserved>) -> Result<(), Error> {
        self.rank.streams.enter(self.launch.stream);
        // SAFETY: the tensors were found to have memory for every element when `args` was made of
        // them; what else it names is this communicator's, allocated in the plan's sizes and kept
        // until it is closed, and the kernels are what its device gave.
        let in_graph = unsafe {
            let device = self.rank.device();
            device.launch_held(&self.launch, &self.rank.member)
        }?;
        self.rank.streams.launched(in_graph);
        if let Some(turn) = turn {
            turn.launched(in_graph == InGraph::Held);
        }
        Ok(())
    }
}

impl Communicator {
    /// Makes all checks of a launch: that the communicator has not given up, that the kernels are loaded,
    /// that there is room for them.
    pub(crate) fn prepare<Next>(
        &mut self,
        stream: Stream,
        kernel: Kernel,
        args: Args,
        next: Next,
    ) -> Result<Prepared<'_, Next>, Error> {
        self.require_alive()?;
        if let Some((fault, _)) = self.fault()?
            && !fault.kind.is_input()
        {
            return Err(self.poison(Poison::Fault(fault)));
        }
        let kernels = match args.has_options() || kernel.needs_options() {
            false => &self.memory.kernels,
            true => (self.memory.kernels_with_options.as_ref()).ok_or(Error::WithoutOptions)?,
        };
        let launch = Launch {
            kernel,
            kernels: kernels.clone(),
            args,
            shmem: self.plan.shape().spans_nodes(),
            max_sms: self.max_sms,
            stream,
        };
        self.require_room(stream)?;
        Ok(Prepared {
            rank: self,
            launch,
            next,
        })
    }

    /// Whether `stream` has as many multiprocessors as a launch takes. Asked each time: a handle is another
    /// stream's once its own was destroyed.
    fn require_room(&self, stream: Stream) -> Result<(), Error> {
        let max_sms = self.max_sms;
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
