//! Graphs and timing, which the simulator has no counterpart of.

use std::any::Any;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::CudaDevice;
use super::device::{Core, raw};
use super::error::check;
use super::sys::{self, CUevent, CUgraph, CUgraphExec, CUstream};
use crate::{Error, Stream};

/// A captured sequence of launches that can be replayed. Its kernels see what their tensors
/// hold at the time of the replay.
pub struct CudaGraph {
    core: Arc<Core>,
    executable: CUgraphExec,
    /// The communicators whose calls it has: they are not closed before.
    _held: Vec<Held>,
}

/// Something that a graph needs.
type Held = Arc<dyn Any + Send + Sync>;

/// The captures of this process. Not of a device: the driver numbers captures throughout the
/// process, and the stream of one may be launched into by way of another [`CudaDevice`] of the same
/// GPU.
pub(super) static CAPTURES: Captures = Captures::new();

/// Captures in progress, by the driver's number, and what their graphs will hold.
pub(super) struct Captures {
    /// How many: launches look at this alone while there are none.
    count: AtomicUsize,
    held: Mutex<Vec<(u64, Vec<Held>)>>,
}

impl Captures {
    const fn new() -> Self {
        Self {
            count: AtomicUsize::new(0),
            held: Mutex::new(Vec::new()),
        }
    }

    /// Whether no capture is in progress.
    pub(super) fn are_none(&self) -> bool {
        self.count.load(Ordering::Acquire) == 0
    }

    /// Gives `held` to the graph that `stream` is being captured to, if it is. The context is current.
    pub(super) fn hold(&self, stream: CUstream, held: &Held) -> Result<(), Error> {
        let Some(id) = capture_id(stream)? else {
            return Ok(());
        };
        self.add(id, held);
        Ok(())
    }

    fn add(&self, id: u64, held: &Held) {
        let mut all = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let capture = all.iter_mut().find(|(of, _)| *of == id);
        if let Some((_, list)) = capture
            && !list.iter().any(|other| Arc::ptr_eq(other, held))
        {
            list.push(held.clone());
        }
    }

    fn begin(&self, id: u64) {
        let mut all = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        all.push((id, Vec::new()));
    }

    /// What the graph holds.
    fn end(&self, id: u64) -> Vec<Held> {
        let mut all = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let at = all.iter().position(|(of, _)| *of == id);
        at.map(|at| all.swap_remove(at).1).unwrap_or_default()
    }
}

/// The driver's number of the capture that `stream` is in. The context is current.
fn capture_id(stream: CUstream) -> Result<Option<u64>, Error> {
    if stream.is_null() {
        // The default stream cannot be captured, and must not be asked while others are.
        return Ok(None);
    }
    let (mut status, mut id) = (0, 0);
    // SAFETY: the stream lives ([`Stream::new`]); both numbers are live, and the driver takes null
    // for what is not wanted.
    let code = unsafe {
        sys::cuStreamGetCaptureInfo_v2(
            stream,
            &mut status,
            &mut id,
            ptr::null_mut(),
            ptr::null_mut(),
            ptr::null_mut(),
        )
    };
    check("cuStreamGetCaptureInfo", code)?;
    Ok((status == sys::CAPTURE_ACTIVE).then_some(id))
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
    /// [`Error::Cuda`].
    pub fn launch(&mut self, stream: Stream) -> Result<(), Error> {
        let _current = self.core.context.enter()?;
        // SAFETY: the graph was instantiated in the current context.
        check("cuGraphLaunch", unsafe {
            sys::cuGraphLaunch(self.executable, raw(stream))
        })
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
    /// The driver's number.
    id: u64,
}

impl Capture {
    /// Starts it. The stream's context is current and stays so.
    fn begin(stream: CUstream) -> Result<Self, Error> {
        // Other threads go on as usual: only what this one does is captured or forbidden.
        // SAFETY: the stream lives ([`Stream::new`]); one that cannot be captured is an error.
        check("cuStreamBeginCapture", unsafe {
            sys::cuStreamBeginCapture_v2(stream, sys::CAPTURE_THREAD_LOCAL)
        })?;
        CAPTURES.count.fetch_add(1, Ordering::AcqRel);
        let mut capture = Self {
            stream,
            id: u64::MAX,
        };
        capture.id = capture_id(stream)?.unwrap_or(u64::MAX);
        CAPTURES.begin(capture.id);
        Ok(capture)
    }

    /// Ends it: the graph, and what it holds.
    fn end(self) -> Result<(Template, Vec<Held>), Error> {
        let mut graph = ptr::null_mut();
        // SAFETY: this thread began the capture; `graph` is a live pointer to write to.
        let code = unsafe { sys::cuStreamEndCapture(self.stream, &mut graph) };
        let template = Template(graph);
        let held = self.forget();
        check("cuStreamEndCapture", code)?;
        Ok((template, held))
    }

    /// After the driver has ended it.
    fn forget(self) -> Vec<Held> {
        let capture = std::mem::ManuallyDrop::new(self);
        capture.leave()
    }

    fn leave(&self) -> Vec<Held> {
        let held = CAPTURES.end(self.id);
        CAPTURES.count.fetch_sub(1, Ordering::AcqRel);
        held
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        let mut graph = ptr::null_mut();
        // SAFETY: as in `end`. A capture that went wrong gives an error, and is over, too.
        let _ = unsafe { sys::cuStreamEndCapture(self.stream, &mut graph) };
        drop(Template(graph));
        drop(self.leave());
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
    /// # Errors
    /// What `work` returns; [`Error::Cuda`]. The capture has ended in any case.
    pub fn capture(
        &self,
        stream: Stream,
        work: impl FnOnce() -> Result<(), Error>,
    ) -> Result<CudaGraph, Error> {
        let _current = self.enter()?;
        let capture = Capture::begin(raw(stream))?;
        work()?;
        let (template, held) = capture.end()?;
        let mut executable = ptr::null_mut();
        // SAFETY: the template is a whole graph; `executable` is a live pointer to write to.
        check("cuGraphInstantiate", unsafe {
            sys::cuGraphInstantiateWithFlags(&mut executable, template.0, 0)
        })?;
        Ok(CudaGraph {
            core: self.core().clone(),
            executable,
            _held: held,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_graph_holds_what_its_own_capture_launched_once() {
        let captures = Captures::new();
        let [one, two]: [Held; 2] = [Arc::new(1), Arc::new(2)];
        captures.begin(7);
        captures.begin(8);
        for (id, held) in [(7, &one), (7, &one), (8, &two), (9, &two)] {
            captures.add(id, held);
        }
        let graph = captures.end(7);
        assert_eq!((graph.len(), Arc::strong_count(&one)), (1, 2));
        assert!(Arc::ptr_eq(&graph[0], &one));
        drop((graph, captures.end(8), captures.end(9)));
        assert_eq!((Arc::strong_count(&one), Arc::strong_count(&two)), (1, 1));
    }
}
