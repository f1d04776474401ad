//! CUDA graphs.

use std::ffi::{c_int, c_void};

use crate::device::ferry_device;
use crate::handle::{Opaque, get, make, take};
use crate::status::{Failure, ferry_status, guard};

/// A captured sequence of calls that can be replayed. Only one thread may launch it at a time; another
/// thread's call returns FERRY_BUSY.
pub struct ferry_graph(());

impl Opaque for ferry_graph {
    #[cfg(feature = "cuda")]
    type Value = std::sync::Mutex<ferry::cuda::CudaGraph>;
    /// No value: graphs need CUDA.
    #[cfg(not(feature = "cuda"))]
    type Value = std::convert::Infallible;
    const NAME: &'static str = "ferry_graph";
    const MAGIC: u64 = u64::from_le_bytes(*b"ferry/cg");
}

/// Enqueues calls on the stream that is being captured. Returns 0, or another number to abandon the
/// capture. Must not free a handle or throw.
pub type ferry_graph_work = Option<unsafe extern "C" fn(context: *mut c_void) -> c_int>;

/// Captures the calls that `work` enqueues on `stream` from this thread, as a graph. Nothing runs before the
/// first ferry_graph_launch. `stream` must not be the default stream. Captured rounds are collective: every
/// rank must replay them as often as the others. A communicator cannot be closed while a graph of its calls
/// exists. Needs the feature cuda and a CUDA device. Not collective. Does not synchronise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_graph_capture(
    device: *const ferry_device,
    stream: *mut c_void,
    work: ferry_graph_work,
    context: *mut c_void,
    graph: *mut *mut ferry_graph,
) -> ferry_status {
    guard("ferry_graph_capture", || {
        // SAFETY: the rules of pointers, handles and streams; `work` does what `ferry_graph_work` documents.
        unsafe {
            make(graph, "graph", || {
                let device = get(device, "device")?;
                let Some(work) = work else {
                    return Err(Failure::new(ferry_status::FERRY_NULL, "work is NULL"));
                };
                capture(device, stream, || work(context))
            })
        }
    })
}

/// Enqueues the whole sequence on a stream. A replay starts after the previous one has ended, even in another
/// stream. A graph may hold a part of a round, such as a dispatch; launched out of order, it is refused on
/// the device (FERRY_FAULT_OUT_OF_TURN). Returns FERRY_WRONG_ORDER, and enqueues nothing, if ranks share a
/// GPU and the stream already has another rank's kernel that would wait for this graph. Collective if rounds
/// were captured. Does not synchronise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_graph_launch(
    graph: *mut ferry_graph,
    stream: *mut c_void,
) -> ferry_status {
    guard("ferry_graph_launch", || {
        // SAFETY: the rules of handles and streams.
        unsafe { launch(get(graph, "graph")?, stream) }
    })
}

/// Frees a graph and sets `*graph` to NULL. A running replay goes on: close its communicators only after it
/// has ended. Not collective. Does not synchronise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_graph_free(graph: *mut *mut ferry_graph) -> ferry_status {
    guard("ferry_graph_free", || {
        // SAFETY: the rules of pointers and handles.
        unsafe { take(graph, "*graph") }.map(drop)
    })
}

type Device = <ferry_device as Opaque>::Value;
type Graph = <ferry_graph as Opaque>::Value;

/// # Safety
/// The rule of streams.
#[cfg(feature = "cuda")]
unsafe fn capture(
    device: &Device,
    stream: *mut c_void,
    work: impl FnOnce() -> c_int,
) -> Result<Graph, Failure> {
    let Some(cuda) = &device.cuda else {
        let rule = "graphs are captured on CUDA devices";
        return Err(Failure::value("device", device.device.name(), rule));
    };
    // SAFETY: the rule of streams.
    let stream = unsafe { crate::device::stream_of(stream) };
    let made = cuda.capture(stream, || match work() {
        0 => Ok(()),
        code => Err(ferry::Error::Io {
            doing: "work of ferry_graph_capture".into(),
            source: std::io::Error::other(format!("it returned {code}")),
        }),
    })?;
    Ok(std::sync::Mutex::new(made))
}

/// # Safety
/// Nothing is required: no pointer is read through.
#[cfg(not(feature = "cuda"))]
unsafe fn capture(_: &Device, _: *mut c_void, _: impl FnOnce() -> c_int) -> Result<Graph, Failure> {
    Err(Failure::not_built("cuda"))
}

/// # Safety
/// The rule of streams.
#[cfg(feature = "cuda")]
unsafe fn launch(graph: &Graph, stream: *mut c_void) -> Result<(), Failure> {
    let Ok(mut graph) = graph.try_lock() else {
        let text = "another thread is launching this graph";
        return Err(Failure::new(ferry_status::FERRY_BUSY, text));
    };
    // SAFETY: the rule of streams.
    Ok(graph.launch(unsafe { crate::device::stream_of(stream) })?)
}

/// # Safety
/// None is needed: there are no graphs.
#[cfg(not(feature = "cuda"))]
unsafe fn launch(graph: &Graph, _: *mut c_void) -> Result<(), Failure> {
    match *graph {}
}
