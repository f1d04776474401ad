//! Graphs and timing. The simulator has no counterpart.

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

/// A captured sequence of launches that can be replayed. Its kernels see the contents of their tensors
/// at the time of the replay.
pub struct CudaGraph {
    core: Arc<Core>,
    executable: CUgraphExec,
    /// The communicators whose calls it has: they cannot be closed before it is dropped.
    _held: Arc<HeldList>,
    /// Waits of its calls, for communicators whose ranks share a GPU.
    recorded: Vec<Recorded>,
}

// SAFETY: a driver's handle may be used from any thread.
unsafe impl Send for CudaGraph {}
// SAFETY: a shared reference has no methods. The driver requires that no two threads launch one graph
// at once; `launch` takes `&mut self`.
unsafe impl Sync for CudaGraph {}

impl CudaGraph {
    /// Enqueues the whole sequence on `stream`. A replay starts after the preceding one has ended,
    /// also in another stream. Not collective, but a round in it is. Does not synchronize.
    ///
    /// # Errors
    /// [`Error::Cuda`]; [`Error::SharedGpu`] if it would follow a kernel of a rank that shares the
    /// GPU and waits for the graph's kernels. Nothing is enqueued then.
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
            // SAFETY: only this drop destroys it; the driver keeps it until a running replay ends.
            let _ = unsafe { sys::cuGraphExecDestroy(self.executable) };
        }
    }
}

/// A capture in progress. A drop ends it and discards its graph.
struct Capture {
    stream: CUstream,
    /// The driver's number of the capture.
    number: Option<u64>,
    /// Communicators that its graph holds.
    held: Arc<HeldList>,
    is_over: bool,
}

/// Result of a capture.
struct Captured {
    template: Template,
    held: Arc<HeldList>,
    recorded: Vec<Recorded>,
}

impl Capture {
    /// Begins a capture. The stream's context is current and stays so.
    fn begin(stream: CUstream) -> Result<Self, Error> {
        let held = CAPTURES.begin();
        // Other threads are not restricted; their launches into the stream are captured, too.
        // SAFETY: the stream is live (documented on `Stream::new`); one that cannot be captured is an error.
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

    /// Ends the capture.
    fn end(mut self) -> Result<Captured, Error> {
        let (captured, code) = self.leave();
        check("cuStreamEndCapture", code)?;
        Ok(captured)
    }

    /// Ends the capture; to be called once. A capture that went wrong returns an error, and is over, too.
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
            // SAFETY: the capture returned the graph to this value alone, which destroys it once.
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
    /// synchronize. May be called again; the last one counts.
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
    /// about half a microsecond. Synchronizes: waits for this event.
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
        // SAFETY: both events are live, as their values are borrowed; `milliseconds` is a live number.
        check("cuEventElapsedTime", unsafe {
            sys::cuEventElapsedTime(&mut milliseconds, start.raw, self.raw)
        })?;
        Ok(milliseconds)
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        if let Ok(_current) = self.core.context.enter() {
            // SAFETY: only this drop destroys it; the driver keeps it until it has happened.
            let _ = unsafe { sys::cuEventDestroy_v2(self.raw) };
        }
    }
}

impl CudaDevice {
    /// Captures the work that `work` enqueues on `stream` from this thread, as a graph. None of it
    /// runs before the first [`CudaGraph::launch`]. Not collective, but a captured round is:
    /// every rank replays it as often as the others. `stream` is not the default stream. A
    /// communicator cannot be closed while a graph has calls of it. The [module](crate::cuda) has an example.
    ///
    /// `work` may fail with an error of yours that ours converts to. If the compiler cannot infer it,
    /// name it: `capture::<Error>(..)`, or give the closure its type.
    ///
    /// A round may be captured in parts, each a graph of its own, which are launched in the order of a
    /// round. The device refuses one that is launched [out of turn](crate::FaultKind::OutOfTurn), and
    /// this rank gives up.
    ///
    /// Make buffers and streams before, and look for faults after: `work` only enqueues. A
    /// [`synchronize`](crate::Communicator::synchronize) of `stream` would end the capture with an error;
    /// [`check`](crate::Communicator::check) does not access the device, and may be called.
    ///
    /// # If `work` fails in the middle of a round
    ///
    /// The capture is discarded: no kernel of it has run or will. The host's state of the
    /// round remains, so a dispatch that was captured before the failure leaves its
    /// communicator with an open round. Another dispatch is then refused. End that round in a
    /// capture that is discarded, too; a combine that runs would be refused on the device
    /// ([`OutOfTurn`](crate::FaultKind::OutOfTurn)), as its dispatch never ran:
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
    /// A call of one is refused in a capture as it is elsewhere ([`Error::Poisoned`]), and is not in
    /// the graph. A graph that was captured before may still be launched: its kernels
    /// end at once, and do not write their outputs. So look for faults between replays.
    ///
    /// # Graphs that others make
    ///
    /// Calls only enqueue, so any capture of their stream has them: cudarc's
    /// `CudaStream::begin_capture`, say, or torch's `torch.cuda.graph`. A call detects such a capture,
    /// but Ferry cannot know when its graph is gone. So from then on closing the communicator is
    /// refused ([`Error::ForeignGraphs`]), and if it is dropped, its memory is leaked and its group cannot be
    /// closed any more, until
    /// [`assume_no_foreign_graphs`](crate::Communicator::assume_no_foreign_graphs) says that the graph is
    /// gone. Tensors must outlive its last launch. A capture that fails and communicators that gave up behave
    /// as above.
    ///
    /// A graph cannot be launched into a captured stream: the driver refuses it.
    ///
    /// # Errors
    /// Those of `work`; [`Error::Cuda`]. The capture has ended in any case.
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

    /// Creates an event that has not been recorded. Not collective; does not synchronize.
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

    /// Measures the time on the device, in milliseconds, of the work that `work` enqueues on `stream`.
    /// Synchronizes.
    ///
    /// # Errors
    /// Those of `work`; [`Error::Cuda`].
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
