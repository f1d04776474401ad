//! The parts of a device: its context, its kernels, its stream for copies.

use std::ptr;
use std::sync::Arc;

use super::context::PrimaryContext;
use super::error::{check, check_about};
use super::green::GreenContexts;
use super::module::Module;
use super::modules::Modules;
use super::sys::{self, CUstream};
use crate::device::kernels::KernelSet;
use crate::device::kernels::Kernels;
use crate::error::Error;
use crate::tensor::handles::Stream;

/// The parts of a device.
pub(super) struct Core {
    pub(super) ordinal: usize,
    pub(super) name: String,
    pub(super) multiprocessors: u32,
    /// The kernels without options, for all shapes.
    pub(super) module: Arc<Module>,
    /// All modules that were loaded, including `module`.
    pub(super) modules: Arc<Modules>,
    /// Source of the kernels.
    pub(super) kernels: Kernels,
    /// Stream of copies and fills: the legacy default stream would wait for other streams, and so for
    /// kernels that wait for other ranks.
    pub(super) copies: OwnedStream,
    /// Functions that return the multiprocessors of a stream.
    pub(super) green: GreenContexts,
    /// Last, because the fields above need it when they are dropped.
    pub(super) context: PrimaryContext,
}

/// The handle of a stream that was created here.
pub(super) struct OwnedStream(pub(super) CUstream);

// SAFETY: the driver's stream handles may be used from any thread.
unsafe impl Send for OwnedStream {}
// SAFETY: as above.
unsafe impl Sync for OwnedStream {}

impl OwnedStream {
    /// Creates a stream without implicit order with the default stream. The context is current.
    pub(super) fn create() -> Result<Self, Error> {
        let mut stream = ptr::null_mut();
        // SAFETY: `stream` is a live pointer to write to.
        check("cuStreamCreate", unsafe {
            sys::cuStreamCreate(&mut stream, sys::STREAM_NON_BLOCKING)
        })?;
        Ok(Self(stream))
    }

    /// Destroys the stream; enqueued work still runs. The context is current.
    fn destroy(&self) {
        // SAFETY: the stream was created in the current context, was passed to nobody, and is
        // destroyed once, by its owner's drop. It fails only if the context is
        // broken already.
        let _ = unsafe { sys::cuStreamDestroy_v2(self.0) };
    }
}

/// The driver's handle of a stream.
pub(super) const fn raw(stream: Stream) -> CUstream {
    ptr::without_provenance_mut(stream.handle() as usize)
}

impl Core {
    pub(super) fn open(ordinal: usize, kernels: &Kernels) -> Result<Self, Error> {
        let context = PrimaryContext::retain(ordinal)?;
        let current = context.enter()?;
        let name = format!("{} (cuda:{ordinal})", context.device_name()?);
        let multiprocessors = context.attribute(sys::MULTIPROCESSOR_COUNT)?.max(1);
        let modules = Modules::of(ordinal, kernels)?;
        let module = modules.general(&context, kernels, KernelSet::Plain)?;
        let copies = OwnedStream::create()?;
        drop(current);
        Ok(Self {
            ordinal,
            name,
            multiprocessors,
            module,
            modules,
            kernels: kernels.clone(),
            green: GreenContexts::find(),
            copies,
            context,
        })
    }

    /// Waits for `stream`. The context is current.
    pub(super) fn wait(&self, stream: CUstream) -> Result<(), Error> {
        // SAFETY: the stream is live (documented on `Stream::new`), or that for copies, which `self` owns.
        check_about(
            "cuStreamSynchronize",
            unsafe { sys::cuStreamSynchronize(stream) },
            || self.name.clone(),
        )
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.enter() {
            self.copies.destroy();
        }
    }
}
