//! Graphs and timing, which the simulator has no counterpart of.

use std::ptr;
use std::sync::Arc;

use super::captures::{CAPTURES, capture_number};
use super::core::{Core, raw};
use super::device::CudaDevice;
use super::error::check;
use super::sys::{self, CUevent, CUgraph, CUgraphExec, CUstream};
use crate::device::captures::HeldList;
use crate::device::sharing::one_stream::Lane;
use crate::device::sharing::one_stream::graphs::{Recorded, take};
use crate::error::Error;
use crate::tensor::handles::Stream;

/// A captured sequence of launches that can be replayed. Its kernels see what their tensors
/// hold at the time of the replay.
pub struct CudaGraph {
    core: Arc<Core>,
    executable: CUgraphExec,
    /// The communicators whose calls it has: they are not closed before.
    _held: Arc<HeldList>,
    /// Of those whose ranks share a GPU, what their calls wait for.
    recorded: Vec<Recorded>,
}

// SAFETY: a driver's handle may be used from any thread.
unsafe impl Send for CudaGraph {}
// SAFETY: nothing can be done through a shared reference. The driver asks that one graph is not
// launched by two threads at once; `launch` takes `&mut self`.
unsafe impl Sync for CudaGraph {}

impl CudaGraph {
    /// Enqueues the whole sequence on `stream`. A replay starts after the one before has ended,
    /// also in another stream. Does not synchronise.
    ///
    /// # Errors
    /// [`Error::Cuda`]; [`Error::SharedGpu`] where it would come behind a kernel of a rank that shares the
    /// GPU, and waits for what the graph has. Nothing is enqueued then.
    pub fn launch(&mut self, stream: Stream) -> Result<(), Error> {
        let _current = self.core.context.enter()?;
        // The driver refuses a stream that is captured.
        let lane = Lane::of(stream, None);
        let turns = self.recorded.iter().map(|of| of.reserve(lane));
        let turns = turns.collect::<Result<Vec<_>, _>>()?;
        // SAFETY: the graph was instantiated in the current context.
        check("cuGraphLaunch", unsafe {
            sys::cuGraphLaunch(self.executable, raw(stream))
        })?;
        turns.into_iter().for_each(|turn| turn.launched(false));
        Ok(())
    }
}

impl Drop for CudaGraph {
    fn drop(&mut self) {
        if let Ok(_current) = self.core.context.enter() {
            // SAFETY: nobody else destroys it; the driver keeps it until a running replay ends.
            let _ = unsafe { sys::cuGraphExecDestroy(self.executable) };
        }
    }
}

/// A capture in progress. Dropped, it is ended and what it has is thrown away.
struct Capture {
    stream: CUstream,
    /// The driver's.
    number: Option<u64>,
    /// What its graph holds.
    held: Arc<HeldList>,
    is_over: bool,
}

/// What a capture gives.
struct Captured {
    template: Template,
    held: Arc<HeldList>,
    recorded: Vec<Recorded>,
}

impl Capture {
    /// Starts it. The stream's context is current and stays so.
    fn begin(stream: CUstream) -> Result<Self, Error> {
        let held = CAPTURES.begin();
        // Other threads are not forbidden anything; what they launch into the stream is captured.
        // SAFETY: the stream lives ([`Stream::new`]); one that cannot be captured is an error.
        let code = unsafe { sys::cuStreamBeginCapture_v2(stream, sys::CAPTURE_THREAD_LOCAL) };
        if let Err(error) = check("cuStreamBeginCapture", code) {
            CAPTURES.end(&held);
            return Err(error);
        }
        let mut capture = Self {
            stream,
            number: None,
            held,
            is_over: false,
        };
        capture.number = capture_number(stream)?;
        if let Some(number) = capture.number {
            CAPTURES.begun(&capture.held, number);
        }
        Ok(capture)
    }

    /// Ends it.
    fn end(mut self) -> Result<Captured, Error> {
        let (captured, code) = self.leave();
        check("cuStreamEndCapture", code)?;
        Ok(captured)
    }

    /// To be called once. A capture that went wrong gives an error, and is over, too.
    fn leave(&mut self) -> (Captured, sys::Code) {
        self.is_over = true;
        let mut graph = ptr::null_mut();
        CAPTURES.ending(&self.held);
        // SAFETY: this thread began the capture; `graph` is a live pointer to write to.
        let code = unsafe { sys::cuStreamEndCapture(self.stream, &mut graph) };
        CAPTURES.end(&self.held);
        let captured = Captured {
            template: Template(graph),
            held: self.held.clone(),
            recorded: self.number.map(take).unwrap_or_default(),
        };
        (captured, code)
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        if !self.is_over {
            drop(self.leave());
        }
    }
}

/// A captured graph that cannot be launched yet.
struct Template(CUgraph);

impl Drop for Template {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: the capture gave the graph to nobody else.
            let _ = unsafe { sys::cuGraphDestroy(self.0) };
        }
    }
}

/// A point in a stream, for measuring time.
pub struct CudaEvent {
    core: Arc<Core>,
    raw: CUevent,
}

// SAFETY: the driver's event handles may be used from any thread.
unsafe impl Send for CudaEvent {}
// SAFETY: as above.
unsafe impl Sync for CudaEvent {}

impl CudaEvent {
    /// Enqueues the event: it happens when everything before it in `stream` has ended. Does not
    /// synchronise. May be called again; the last one counts.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn record(&self, stream: Stream) -> Result<(), Error> {
        let _current = self.core.context.enter()?;
        // SAFETY: the event was created in the current context.
        check("cuEventRecord", unsafe {
            sys::cuEventRecord(self.raw, raw(stream))
        })
    }

    /// Milliseconds on the device from `start` to this event, both recorded on this device, to
    /// about half a microsecond. Synchronises: waits for this event.
    ///
    /// # Errors
    /// [`Error::Cuda`]; `CUDA_ERROR_INVALID_HANDLE` if one was never recorded.
    pub fn elapsed_ms_since(&self, start: &Self) -> Result<f32, Error> {
        let _current = self.core.context.enter()?;
        // SAFETY: the event was created in the current context.
        check("cuEventSynchronize", unsafe {
            sys::cuEventSynchronize(self.raw)
        })?;
        let mut milliseconds = 0.0;
        // SAFETY: both events live; `milliseconds` is a live number.
        check("cuEventElapsedTime", unsafe {
            sys::cuEventElapsedTime(&mut milliseconds, start.raw, self.raw)
        })?;
        Ok(milliseconds)
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        if let Ok(_current) = self.core.context.enter() {
            // SAFETY: nobody else destroys it; the driver keeps it until it has happened.
            let _ = unsafe { sys::cuEventDestroy_v2(self.raw) };
        }
    }
}

impl CudaDevice {
    /// Captures what `work` enqueues on `stream` from this thread, and makes it a graph. Nothing
    /// of it runs before the first [`CudaGraph::launch`]. Not collective, but a captured round is:
    /// every rank replays it as often as the others. `stream` is not the default stream. A
    /// communicator cannot be closed while a graph has calls of it.
    ///
    /// `work` may fail with an error of yours that ours converts to. Where nothing else tells the compiler
    /// which, name it: `capture::<Error>(..)`, or give the closure its type.
    ///
    /// A round may be captured in parts, each a graph of its own, which are launched in the order of a
    /// round. The device refuses one that is launched [out of turn](crate::FaultKind::OutOfTurn), and
    /// this rank gives up.
    ///
    /// Make buffers and streams before, and look for faults after: `work` only enqueues. A
    /// [`synchronize`](crate::Communicator::synchronize) of `stream` would end the capture with an error;
    /// [`check`](crate::Communicator::check) asks nothing of the device, and may be called.
    ///
    /// # Where `work` fails in the middle of a round
    ///
    /// What was captured is thrown away: no kernel of it has run or will. The host's side of a
    /// round stays where it was, so a dispatch that was captured before the failure leaves its
    /// communicator with an open round. Another dispatch is refused then. End that round in a
    /// capture that is thrown away, too; a combine that runs would be refused on the device
    /// ([`OutOfTurn`](crate::FaultKind::OutOfTurn)), as its dispatch never did:
    ///
    /// ```no_run
    /// # use ferry::*;
    /// # fn end(
    /// #     device: &cuda::CudaDevice, rank: &mut Communicator, stream: Stream,
    /// #     experts: &CombineInput, sums: &CombineOutput,
    /// # ) -> Result<(), Error> {
    /// device.capture(stream, || match rank.round() {
    ///     Round::Idle => Ok(()),
    ///     Round::DispatchSent => unreachable!("no call was split"),
    ///     Round::Dispatched => rank.combine(stream, experts, sums),
    ///     Round::CombineSent => rank.combine_wait(stream),
    /// })?; // Dropped, and never launched.
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Then capture anew. No other rank notices.
    ///
    /// # Communicators that gave up
    ///
    /// A call of one is refused in a capture as it is elsewhere ([`Error::Poisoned`]), and nothing
    /// of it is in the graph. A graph that was captured before may still be launched: its kernels
    /// end at once, and leave their outputs as they are. So look for faults between replays.
    ///
    /// # Graphs that others make
    ///
    /// Calls only enqueue, so any capture of their stream has them: cudarc's
    /// `CudaStream::begin_capture`, say, or torch's `torch.cuda.graph`. A call finds that it is captured
    /// so, but nobody tells Ferry when such a graph is gone. So from then on closing the communicator is
    /// refused ([`Error::ForeignGraphs`]), and if it is dropped, its memory is leaked and its group is not
    /// closed any more, until
    /// [`assume_no_foreign_graphs`](crate::Communicator::assume_no_foreign_graphs) says that the graph is
    /// gone. Tensors outlive its last launch. What is said above of a capture that fails and of communicators
    /// that gave up holds here, too.
    ///
    /// A graph is not launched into a captured stream: the driver refuses it.
    ///
    /// # Errors
    /// What `work` returns; [`Error::Cuda`]. The capture has ended in any case.
    pub fn capture<E: From<Error>>(
        &self,
        stream: Stream,
        work: impl FnOnce() -> Result<(), E>,
    ) -> Result<CudaGraph, E> {
        let _current = self.enter()?;
        let capture = Capture::begin(raw(stream))?;
        work()?;
        let Captured {
            template,
            held,
            recorded,
        } = capture.end()?;
        let mut executable = ptr::null_mut();
        // SAFETY: the template is a whole graph; `executable` is a live pointer to write to.
        let code = unsafe { sys::cuGraphInstantiateWithFlags(&mut executable, template.0, 0) };
        check("cuGraphInstantiate", code)?;
        Ok(CudaGraph {
            core: self.core().clone(),
            executable,
            _held: held,
            recorded,
        })
    }

    /// Creates an event that has not been recorded.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn event(&self) -> Result<CudaEvent, Error> {
        let _current = self.enter()?;
        let mut raw = ptr::null_mut();
        // SAFETY: `raw` is a live pointer to write to.
        check("cuEventCreate", unsafe {
            sys::cuEventCreate(&mut raw, sys::EVENT_DEFAULT)
        })?;
        Ok(CudaEvent {
            core: self.core().clone(),
            raw,
        })
    }

    /// Milliseconds that what `work` enqueues on `stream` takes on the device. Synchronises.
    ///
    /// # Errors
    /// What `work` returns; [`Error::Cuda`].
    pub fn time_ms(
        &self,
        stream: Stream,
        work: impl FnOnce() -> Result<(), Error>,
    ) -> Result<f32, Error> {
        let (start, end) = (self.event()?, self.event()?);
        start.record(stream)?;
        work()?;
        end.record(stream)?;
        end.elapsed_ms_since(&start)
    }
}
