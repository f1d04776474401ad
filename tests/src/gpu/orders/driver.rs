//! Calls of the driver that users make, and Ferry does not.

use std::ffi::{CStr, c_void};
use std::ptr;

use anyhow::Result;
use cudarc::driver::{result, sys};
use ferry::Stream;

/// A kernel that does nothing.
const NOTHING: &CStr = c"ferry_test_nothing";
const PTX: &CStr = c".version 7.0
.target sm_80
.address_size 64
.visible .entry ferry_test_nothing() { ret; }
";

/// The driver's handle.
pub(super) const fn raw(stream: Stream) -> sys::CUstream {
    ptr::without_provenance_mut(stream.handle() as usize)
}

/// A module with a kernel that does nothing, of the current context. It is never unloaded: that waits for
/// kernels, too.
#[derive(Clone, Copy)]
pub(super) struct Module(sys::CUmodule);

impl Module {
    pub(super) fn load() -> Result<Self> {
        // SAFETY: the image is PTX that ends with a zero.
        let module = unsafe { result::module::load_data(PTX.as_ptr().cast::<c_void>()) };
        Ok(Self(module?))
    }

    /// Finds its kernel and launches it.
    pub(super) fn launch(self, stream: Stream) -> Result<()> {
        // SAFETY: the module stays loaded, its kernel takes no arguments and touches no memory, and a stream
        // lives for as long as the process.
        unsafe {
            let kernel = result::module::get_function(self.0, NOTHING.to_owned())?;
            result::launch_kernel(kernel, (1, 1, 1), (32, 1, 1), 0, raw(stream), &mut [])?;
        }
        Ok(())
    }
}

/// Device memory of the current context, which nothing is enqueued for.
pub(super) struct Memory(sys::CUdeviceptr);

impl Memory {
    pub(super) fn alloc(bytes: usize) -> Result<Self> {
        // SAFETY: nobody reads it before it was written.
        Ok(Self(unsafe { result::malloc_sync(bytes) }?))
    }

    pub(super) fn free(self) -> Result<()> {
        // SAFETY: it was allocated here, is freed once, and no copy of it is at work.
        Ok(unsafe { result::free_sync(self.0) }?)
    }

    /// Copies from pageable memory in the default stream, which waits for streams that are not made to be
    /// without order with it.
    pub(super) fn write(&self, bytes: &[u8]) -> Result<()> {
        // SAFETY: every caller gives as many bytes as it allocated; the call returns after it has read them.
        Ok(unsafe { result::memcpy_htod_sync(self.0, bytes) }?)
    }

    /// Copies from pageable memory in a stream, and waits for that.
    pub(super) fn write_in(&self, stream: Stream, bytes: &[u8]) -> Result<()> {
        // SAFETY: every caller gives as many bytes as it allocated; they are borrowed until the stream has
        // passed the copy.
        unsafe {
            result::memcpy_htod_async(self.0, bytes, raw(stream))?;
            result::stream::synchronize(raw(stream))?;
        }
        Ok(())
    }
}

/// Allocates and frees device memory in the order of a stream.
pub(super) fn alloc_in(stream: Stream, bytes: usize) -> Result<()> {
    // SAFETY: the memory is freed behind its allocation, in the same stream, and nothing uses it.
    unsafe {
        let at = result::malloc_async(raw(stream), bytes)?;
        result::free_async(at, raw(stream))?;
    }
    Ok(())
}

/// Allocates and frees pinned memory.
pub(super) fn alloc_pinned(bytes: usize) -> Result<()> {
    // SAFETY: nothing uses the memory.
    unsafe {
        let at = result::malloc_host(bytes, 0)?;
        result::free_host(at)?;
    }
    Ok(())
}

/// Waits for all that the current context has.
pub(super) fn synchronize_context() -> Result<()> {
    Ok(result::ctx::synchronize()?)
}

/// A point in a stream that other streams wait for.
struct Event(sys::CUevent);

impl Event {
    fn record(stream: Stream) -> Result<Self> {
        let event = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)?;
        let event = Self(event);
        // SAFETY: event and stream live.
        unsafe { result::event::record(event.0, raw(stream)) }?;
        Ok(event)
    }

    fn is_waited_for_by(&self, stream: Stream) -> Result<()> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: event and stream live.
        Ok(unsafe { result::stream::wait_event(raw(stream), self.0, flags) }?)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: it was created here and is destroyed once; the driver keeps it while something waits.
        let _ = unsafe { result::event::destroy(self.0) };
    }
}

/// One graph of what `enqueue` does on all these streams, a branch each. Its communicators are kept by
/// whoever launches it.
pub(super) struct Graph(sys::CUgraphExec);

impl Graph {
    pub(super) fn capture(
        streams: &[Stream],
        enqueue: impl FnOnce() -> Result<()>,
    ) -> Result<Self> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        let (first, others) = (streams[0], &streams[1..]);
        // SAFETY: the stream lives.
        unsafe { result::stream::begin_capture(raw(first), mode) }?;
        let branches = || -> Result<()> {
            let begin = Event::record(first)?;
            (others.iter()).try_for_each(|&other| begin.is_waited_for_by(other))?;
            enqueue()?;
            (others.iter()).try_for_each(|&other| Event::record(other)?.is_waited_for_by(first))
        };
        let enqueued = branches();
        // SAFETY: its capture was begun above.
        let graph = unsafe { result::stream::end_capture(raw(first)) };
        enqueued?;
        let graph = graph?;
        // SAFETY: 0 is no flag at all, a value that the driver takes; the graph is whole, and destroyed once.
        let executable = unsafe {
            let executable = result::graph::instantiate(graph, std::mem::zeroed());
            result::graph::destroy(graph)?;
            executable
        };
        Ok(Self(executable?))
    }

    pub(super) fn launch(&self, stream: Stream) -> Result<()> {
        // SAFETY: both live; what the graph uses is kept by the caller until the stream has passed it.
        Ok(unsafe { result::graph::launch(self.0, raw(stream)) }?)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: it was made here and is destroyed once; the driver keeps it until a launch has ended.
        let _ = unsafe { result::graph::exec_destroy(self.0) };
    }
}
