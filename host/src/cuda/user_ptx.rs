//! PTX of yours on a device: loaded beside Ferry's kernels, and launched by name.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use ferry_ptx::Module;

use super::CudaDevice;
use super::core::{Core, raw};
use super::error::check_about;
use super::module::{best, blocks_that_fit, compile, find, title, unload};
use super::sys::{self, CUfunction, CUmodule, LaunchConfig};
use crate::device::kernels::{Target, read, require, target_of};
use crate::error::Error;
use crate::error::kernels::KernelsError;
use crate::tensor::handles::Stream;

/// PTX that a device has loaded. Cheap to clone. It is unloaded with the last clone and the last
/// [`CudaKernel`] of it.
#[derive(Clone)]
pub struct CudaModule(Arc<Loaded>);

struct Loaded {
    core: Arc<Core>,
    raw: CUmodule,
    text: Module,
}

// SAFETY: the driver's module handles may be used from any thread.
unsafe impl Send for Loaded {}
// SAFETY: as above; nothing here changes.
unsafe impl Sync for Loaded {}

impl Drop for Loaded {
    fn drop(&mut self) {
        if let Ok(_current) = self.core.context.enter() {
            unload(self.raw);
        }
    }
}

/// A kernel of a [`CudaModule`]. Cheap to clone.
#[derive(Clone)]
pub struct CudaKernel {
    module: Arc<Loaded>,
    name: String,
    function: CUfunction,
}

// SAFETY: the driver's function handles may be used from any thread.
unsafe impl Send for CudaKernel {}
// SAFETY: as above; nothing here changes.
unsafe impl Sync for CudaKernel {}

/// Number of threads of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Number of blocks.
    pub blocks: u32,
    /// Threads per block.
    pub threads: u32,
    /// Dynamic shared memory per block, in bytes.
    pub shared_bytes: u32,
}

impl Grid {
    /// A grid without dynamic shared memory.
    pub const fn new(blocks: u32, threads: u32) -> Self {
        Self {
            blocks,
            threads,
            shared_bytes: 0,
        }
    }
}

impl CudaDevice {
    /// Compiles the first of these PTX texts that is for this device, unless the driver has kept an earlier
    /// result: kernels of yours, to launch beside Ferry's. Not collective. Synchronizes.
    ///
    /// # Errors
    /// [`Error::Kernels`] if a text is not PTX, [`Error::Driver`], and
    /// [`Error::Cuda`] with the compiler's log.
    pub fn load_ptx(&self, texts: &[&str]) -> Result<CudaModule, Error> {
        let core = self.core().clone();
        let _current = core.context.enter()?;
        let mut all = Vec::new();
        for text in texts {
            let read = read(text)?;
            all.push((target_of(&read)?, read, text));
        }
        let targets: Vec<Target> = all.iter().map(|(target, ..)| *target).collect();
        let (_, read, text) = all.swap_remove(best(&core.context, &targets)?);
        let raw = compile(&title(&read), &format!("{text}\0"))?;
        let loaded = Loaded {
            core: core.clone(),
            raw,
            text: read,
        };
        Ok(CudaModule(Arc::new(loaded)))
    }
}

impl CudaModule {
    /// Whether there is a kernel with this name.
    pub fn has(&self, kernel: &str) -> bool {
        self.0.text.kernel(kernel).is_some()
    }

    /// The kernel with this name, loaded so that no launch has to. Synchronizes.
    ///
    /// # Errors
    /// [`Error::Kernels`] if there is none, [`Error::Cuda`].
    pub fn kernel(&self, name: &str) -> Result<CudaKernel, Error> {
        if !self.has(name) {
            return Err(Error::Kernels(KernelsError::Missing {
                kernel: name.to_owned(),
                target: self.0.text.target.clone(),
            }));
        }
        let _current = self.0.core.context.enter()?;
        let function = find(self.0.raw, name)?;
        blocks_that_fit(function, 32, 0, || format!("the kernel {name}"))?;
        Ok(CudaKernel {
            module: self.0.clone(),
            name: name.to_owned(),
            function,
        })
    }
}

impl CudaKernel {
    /// Enqueues the kernel. `arguments` are the bytes of each of its parameters, which are copied before this
    /// returns. Does not synchronize.
    ///
    /// # Errors
    /// [`Error::Kernels`] if the arguments have other sizes than the kernel's parameters, [`Error::Cuda`].
    ///
    /// # Safety
    /// Until `stream` has passed the kernel, and as long as a graph that it was captured to is launched, the
    /// module or this value is kept, and the kernel, with these arguments, touches only allocated memory
    /// that nothing else uses in conflict with it.
    pub unsafe fn launch(
        &self,
        stream: Stream,
        grid: Grid,
        arguments: &[&[u8]],
    ) -> Result<(), Error> {
        let sizes: Vec<u64> = arguments.iter().map(|bytes| bytes.len() as u64).collect();
        require(&self.module.text, &self.name, &sizes)?;
        let _current = self.module.core.context.enter()?;
        let config = LaunchConfig {
            grid: [grid.blocks, 1, 1],
            block: [grid.threads, 1, 1],
            shared_bytes: grid.shared_bytes,
            stream: raw(stream),
            attributes: ptr::null(),
            attribute_count: 0,
        };
        let pointers = arguments.iter().map(|bytes| bytes.as_ptr().cast_mut());
        let mut pointers: Vec<*mut c_void> = pointers.map(<*mut u8>::cast).collect();
        // SAFETY: `require` found as many pointers as the kernel has parameters, each to as many bytes, which
        // the driver copies before it returns and does not write. That the module stays, and that the kernel
        // may touch its memory, is documented on this function.
        let code = unsafe {
            let pointers = pointers.as_mut_ptr();
            sys::cuLaunchKernelEx(&config, self.function, pointers, ptr::null_mut())
        };
        check_about("cuLaunchKernelEx", code, || self.name.clone())
    }
}
