//! How a kernel of a communicator is launched: first every check, then the launch.

use ferry_layout::{Kernel, Rank};

use super::{ExpertParallel, Poison};
use crate::device::{Args, Launch};
use crate::{Error, Stream};

/// Most streams that a communicator remembers; with more, it asks again.
const MAX_STREAMS: usize = 16;

/// A call whose checks were all made, and that was not launched. Dropped, it leaves the communicator as it
/// was.
#[must_use]
pub(crate) struct Prepared<'a, Next> {
    rank: &'a mut ExpertParallel,
    launch: Launch,
    /// What the round is then.
    next: Next,
}

impl<'a, Next> Prepared<'a, Next> {
    /// Enqueues the kernel; `then` opens what comes after it.
    pub(crate) fn launch<T>(
        self,
        then: impl FnOnce(&'a mut ExpertParallel, Next) -> T,
    ) -> Result<T, Error> {
        self.enqueue()?;
        Ok(then(self.rank, self.next))
    }

    /// Enqueues the kernels of one call of several ranks, one after another. Where one cannot be enqueued,
    /// all ranks are poisoned, and the error comes with the rank.
    pub(crate) fn launch_all<T>(
        calls: Vec<Self>,
        mut then: impl FnMut(&'a mut ExpertParallel, Next) -> T,
    ) -> Result<Vec<T>, (Rank, Error)> {
        for call in &calls {
            if let Err(error) = call.enqueue() {
                let rank = call.rank.rank();
                for call in &calls {
                    call.rank.poison(Poison::Launch(rank));
                }
                return Err((rank, error));
            }
        }
        let each = calls.into_iter();
        Ok(each.map(|call| then(call.rank, call.next)).collect())
    }

    fn enqueue(&self) -> Result<(), Error> {
        // SAFETY: the tensors were found to have memory for every element when `args` was made of
        // them; what else it names is this communicator's, allocated in the plan's sizes and kept
        // until it is closed, and the kernels are what its device gave.
        unsafe {
            let device = self.rank.device();
            device.launch_held(&self.launch, &self.rank.member)
        }
    }
}

impl ExpertParallel {
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
            max_sms: self.plan.config().max_sms,
            stream,
        };
        self.require_room(stream)?;
        Ok(Prepared {
            rank: self,
            launch,
            next,
        })
    }

    /// Whether `stream` has as many multiprocessors as a launch takes. A stream is asked once.
    fn require_room(&mut self, stream: Stream) -> Result<(), Error> {
        let known = self.streams.iter().find(|(of, _)| *of == stream);
        let multiprocessors = match known {
            Some(&(_, multiprocessors)) => multiprocessors,
            None => {
                let multiprocessors = self.device().stream_multiprocessors(stream);
                if self.streams.len() == MAX_STREAMS {
                    self.streams.clear();
                }
                self.streams.push((stream, multiprocessors));
                multiprocessors
            }
        };
        let max_sms = self.plan.config().max_sms;
        match multiprocessors {
            Some(multiprocessors) if max_sms.is_none_or(|most| most > multiprocessors) => {
                // Another stream may have this one's handle by now: the next call asks again.
                self.streams.retain(|(of, _)| *of != stream);
                Err(Error::GreenContext {
                    max_sms,
                    multiprocessors,
                })
            }
            _ => Ok(()),
        }
    }
}
