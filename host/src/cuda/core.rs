//! What a device owns: its context, its kernels, its stream for copies.

use std::ptr;

use super::context::PrimaryContext;
use super::error::{check, check_about};
use super::green::GreenContexts;
use super::module::Module;
use super::sys::{self, CUstream};
use crate::kernels::KernelSet;
use crate::loaded_kernels::PerShape;
use crate::{Error, Kernels, Stream};

/// What a device owns.
pub(super) struct Core {
    pub(super) ordinal: usize,
    pub(super) name: String,
    pub(super) multiprocessors: u32,
    pub(super) module: Module,
    /// What the kernels are made of.
    pub(super) kernels: Kernels,
    /// Kernels for one shape each.
    pub(super) special: PerShape<Module>,
    /// Kernels that take options, for one shape each or for all.
    pub(super) with_options: PerShape<Module>,
    /// For copies and fills: the legacy default stream would wait for other streams, and so for
    /// kernels that wait for other ranks.
    pub(super) copies: OwnedStream,
    /// What asks for the multiprocessors of a stream.
    pub(super) green: GreenContexts,
    /// Last, because what is above needs it.
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

    /// Destroys the stream; what is enqueued still runs. The context is current.
    fn destroy(&self) {
        // SAFETY: the stream was created in the current context, was given to nobody, and is
        // destroyed once, by its owner, who is being dropped. It fails only where the context is
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
        let copies = OwnedStream::create()?;
        let module =
            Module::load(&context, kernels, KernelSet::Plain).inspect_err(|_| copies.destroy())?;
        drop(current);
        Ok(Self {
            ordinal,
            name,
            multiprocessors,
            module,
            kernels: kernels.clone(),
            special: PerShape::new(),
            with_options: PerShape::new(),
            green: GreenContexts::find(),
            copies,
            context,
        })
    }

    /// Waits for `stream`. The context is current.
    pub(super) fn wait(&self, stream: CUstream) -> Result<(), Error> {
        // SAFETY: the stream lives by [`Stream::new`], or is that for copies.
        check_about(
            "cuStreamSynchronize",
            unsafe { sys::cuStreamSynchronize(stream) },
            || self.name.clone(),
        )
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        let Ok(_current) = self.context.enter() else {
            return;
        };
        self.copies.destroy();
        self.module.unload();
        for modules in [&self.special, &self.with_options] {
            for (_, module) in modules.all().iter() {
                module.unload();
            }
        }
    }
}
