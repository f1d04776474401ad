//! A GPU.

use std::any::Any;
use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use ferry_layout::{Kernel, Shape};

use super::captures::{CAPTURES, capture_number};
use super::context::{Current, PrimaryContext};
use super::core::{Core, OwnedStream, raw};
use super::error::{check, check_about, error};
use super::module::Module;
use super::page::PinnedPage;
use super::sys::{self, CUfunction, CUstream, LaunchAttribute, LaunchConfig};
use crate::device::Device;
use crate::device::kernels::KernelSet;
use crate::device::kernels::Kernels;
use crate::device::loaded_kernels::LoadedKernels;
use crate::device::sharing::own_gpu::Terms;
use crate::device::{Args, InGraph, Launch, SharedPage};
use crate::error::Error;
use crate::tensor::handles::{DevicePtr, Stream};

/// A GPU with its kernels loaded, in the device's primary context.
///
/// Every method makes the context current for its own duration, so any thread may call any of
/// them, and a thread's own context is left as it was.
///
/// Dropping it waits for nothing, and ends no enqueued work. Its kernels and its primary context
/// stay for the life of the process, and so do its streams and memory that was not freed:
/// their values are plain numbers, and graphs have the kernels, so all may outlive it. A device that is
/// opened again with the same kernels finds those that are loaded: do not reset the primary context
/// (`cudaDeviceReset`) in between.
pub struct CudaDevice {
    core: Arc<Core>,
}

impl CudaDevice {
    /// Opens device number `ordinal`: retains its primary context and compiles the kernels for
    /// it, unless they are loaded or the driver has kept an earlier result. Not collective. Synchronizes.
    ///
    /// # Errors
    /// [`Error::NoSuchDevice`], [`Error::Driver`], [`Error::LibraryMissing`] if there is no driver,
    /// [`Error::Cuda`].
    pub fn open(ordinal: usize) -> Result<Self, Error> {
        Self::open_with(ordinal, &Kernels::default())
    }

    /// [`open`](Self::open) with other kernels. Not collective. Synchronizes.
    ///
    /// # Errors
    /// Those of [`open`](Self::open); [`Error::Driver`] if the kernels are for other devices.
    pub fn open_with(ordinal: usize, kernels: &Kernels) -> Result<Self, Error> {
        let core = Arc::new(Core::open(ordinal, kernels)?);
        tracing::debug!(device = core.name, sms = core.multiprocessors, "opened");
        Ok(Self { core })
    }

    /// The device's number.
    pub fn ordinal(&self) -> usize {
        self.core.ordinal
    }

    /// Number of streaming multiprocessors that the context reports: under MPS with a limit for the process,
    /// its share.
    pub fn multiprocessors(&self) -> u32 {
        self.core.multiprocessors
    }

    /// Unique identifier of the device.
    pub(crate) fn uuid(&self) -> Result<[u8; 16], Error> {
        self.core.context.uuid()
    }

    /// Order in which this device sees the writes of a network:
    /// `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING`.
    #[cfg(feature = "nvshmem")]
    pub(crate) fn rdma_writes_ordering(&self) -> Result<u32, Error> {
        self.core.context.attribute(sys::RDMA_WRITES_ORDERING)
    }

    /// Terms of a rank on this GPU. `shares`: whether it may share it with others.
    pub(crate) fn terms(&self, shares: bool) -> Result<Terms, Error> {
        Ok(Terms {
            multiprocessors: self.core.multiprocessors,
            shares,
            runs_beside_others: shares && self.core.context.is_mps_client()?,
        })
    }

    pub(super) fn core(&self) -> &Arc<Core> {
        &self.core
    }

    pub(crate) fn context(&self) -> &PrimaryContext {
        &self.core.context
    }

    /// Makes the device's context current on this thread until the guard is dropped: for other
    /// libraries that ask CUDA for the current device.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn enter(&self) -> Result<Current, Error> {
        self.core.context.enter()
    }

    /// Waits for everything that was enqueued in the device's context.
    pub(crate) fn synchronize_all(&self) -> Result<(), Error> {
        let _current = self.enter()?;
        // SAFETY: takes nothing; the device's context is current.
        check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })
    }

    /// The kernels' module.
    #[cfg(feature = "nvshmem")]
    pub(crate) fn module(&self) -> &Module {
        &self.core.module
    }

    /// The module of a set of kernels, for every shape, loaded unless it is already. Synchronizes.
    pub(crate) fn module_of(&self, set: KernelSet) -> Result<Arc<Module>, Error> {
        let _current = self.enter()?;
        let Core {
            modules,
            context,
            kernels,
            ..
        } = &*self.core;
        modules.general(context, kernels, set)
    }

    /// The kernels of a set, loaded unless they are already: for `shape` alone, or for all. Synchronizes.
    fn loaded(&self, set: KernelSet, shape: Option<&Shape>) -> Result<LoadedKernels, Error> {
        let general = self.module_of(set)?;
        let module = match shape.filter(|shape| !shape.spans_nodes()) {
            None => general,
            Some(shape) => {
                let _current = self.enter()?;
                self.core.modules.special(&general, set, shape)?
            }
        };
        Ok(LoadedKernels::of(module))
    }

    /// The module of the kernel to launch, and the kernel. Takes no lock: another communicator may be
    /// compiling.
    fn function<'a>(&'a self, launch: &'a Launch) -> Result<(&'a Module, CUfunction), Error> {
        let module = match launch.kernels.held() {
            None => Some(&*self.core.module),
            Some(held) => held.downcast_ref::<Module>(),
        };
        module
            .map(|module| (module, module.function(launch.kernel, launch.shmem)))
            .filter(|(_, function)| !function.is_null())
            .ok_or_else(|| {
                let detail = format!("{} is not among the kernels", launch.kernel.name());
                error("cuLaunchKernelEx", sys::INVALID_VALUE, detail)
            })
    }

    /// Runs `copy` on the stream for copies and waits for it.
    fn copy(
        &self,
        call: &'static str,
        about: impl FnOnce() -> String,
        copy: impl FnOnce(CUstream) -> sys::Code,
    ) -> Result<(), Error> {
        let _current = self.enter()?;
        let stream = self.core.copies.0;
        check_about(call, copy(stream), about)?;
        self.core.wait(stream)
    }
}

// SAFETY: memory, streams and fault pages are the driver's, of this device's primary context, in
// the requested sizes; streams are never destroyed. `copy` waits for the copy that it enqueues, whose
// length was checked. The kernels are of modules that were loaded on this device, for all shapes
// or for the requested one, and stay loaded.
unsafe impl Device for CudaDevice {
    fn as_any(&self) -> Option<&dyn Any> {
        Some(self)
    }

    fn name(&self) -> String {
        self.core.name.clone()
    }

    fn alloc(&self, bytes: u64) -> Result<DevicePtr, Error> {
        let _current = self.enter()?;
        let mut at = 0;
        // The driver refuses to allocate 0 bytes, the size of tensors of a rank without tokens.
        // SAFETY: `at` is a live integer.
        let code = unsafe { sys::cuMemAlloc_v2(&mut at, bytes.max(1) as usize) };
        check_about("cuMemAlloc", code, || {
            format!("{bytes} bytes on {}", self.core.name)
        })?;
        // SAFETY: the driver allocated at least `bytes` bytes, which stay until `free`: their context is
        // never released.
        Ok(unsafe { DevicePtr::new(at, bytes) })
    }

    fn free_memory(&self) -> Result<Option<u64>, Error> {
        let _current = self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both are live integers.
        let code = unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) };
        check_about("cuMemGetInfo", code, || self.core.name.clone())?;
        Ok(Some(free as u64))
    }

    unsafe fn free(&self, at: DevicePtr) -> Result<(), Error> {
        let _current = self.enter()?;
        // SAFETY: `alloc` got `at` from the driver, and nothing uses it any more: documented on
        // `Device::free`.
        check("cuMemFree", unsafe { sys::cuMemFree_v2(at.address()) })
    }

    fn upload(&self, to: DevicePtr, bytes: &[u8]) -> Result<(), Error> {
        if bytes.is_empty() {
            return Ok(());
        }
        to.require("upload", bytes.len() as u64)?;
        let about = || format!("{} bytes to {}", bytes.len(), self.core.name);
        self.copy("cuMemcpyHtoDAsync", about, |stream| {
            let (to, from) = (to.address(), bytes.as_ptr().cast());
            // SAFETY: `bytes` outlives the copy, which `copy` waits for; `to` has at least as many bytes
            // (`require`), which are this device's (documented on `DevicePtr::new`).
            unsafe { sys::cuMemcpyHtoDAsync_v2(to, from, bytes.len(), stream) }
        })
    }

    fn download(&self, from: DevicePtr, bytes: &mut [u8]) -> Result<(), Error> {
        if bytes.is_empty() {
            return Ok(());
        }
        let count = bytes.len();
        from.require("download", count as u64)?;
        let about = || format!("{count} bytes from {}", self.core.name);
        self.copy("cuMemcpyDtoHAsync", about, |stream| {
            let (to, from) = (bytes.as_mut_ptr().cast(), from.address());
            // SAFETY: `bytes` outlives the copy, which `copy` waits for, and is borrowed for
            // writing; `from` has at least `count` bytes (`require`), which are this device's (documented
            // on `DevicePtr::new`).
            unsafe { sys::cuMemcpyDtoHAsync_v2(to, from, count, stream) }
        })
    }

    fn fill(&self, at: DevicePtr, value: u8, bytes: u64) -> Result<(), Error> {
        if bytes == 0 {
            return Ok(());
        }
        at.require("fill", bytes)?;
        let about = || format!("{bytes} bytes on {}", self.core.name);
        self.copy("cuMemsetD8Async", about, |stream| {
            // SAFETY: `at` has at least `bytes` bytes (`require`), which are this device's (documented on
            // `DevicePtr::new`).
            unsafe { sys::cuMemsetD8Async(at.address(), value, bytes as usize, stream) }
        })
    }

    fn stream(&self) -> Result<Stream, Error> {
        let _current = self.enter()?;
        let stream = OwnedStream::create()?;
        // SAFETY: it was created in this device's context, and neither is ever destroyed.
        Ok(unsafe { Stream::new(stream.0.addr() as u64) })
    }

    fn synchronize(&self, stream: Stream) -> Result<(), Error> {
        let _current = self.enter()?;
        self.core.wait(raw(stream))
    }

    fn kernels(&self, shape: &Shape) -> Result<LoadedKernels, Error> {
        if shape.spans_nodes() {
            return Ok(LoadedKernels::GENERAL);
        }
        let _current = self.enter()?;
        let Core {
            modules, module, ..
        } = &*self.core;
        let module = modules.special(module, KernelSet::Plain, shape)?;
        Ok(LoadedKernels::of(module))
    }

    fn kernels_with_options(&self, shape: Option<&Shape>) -> Result<LoadedKernels, Error> {
        self.loaded(KernelSet::WithOptions, shape)
    }

    fn kernels_with_rows(&self, shape: Option<&Shape>) -> Result<LoadedKernels, Error> {
        self.loaded(KernelSet::Rows, shape)
    }

    fn epilogue_bytes(&self) -> Option<usize> {
        self.core.kernels.epilogue_bytes()
    }

    fn stream_multiprocessors(&self, stream: Stream) -> Option<u32> {
        // Called before each launch, so it skips the query if it can: the default stream is the
        // primary context's.
        if stream == Stream::DEFAULT || !self.core.green.exist() {
            return None;
        }
        let _current = self.enter().ok()?;
        let multiprocessors = self.core.green.multiprocessors(raw(stream))?;
        (multiprocessors < self.core.multiprocessors).then_some(multiprocessors)
    }

    fn capture(&self, stream: Stream) -> Option<u64> {
        let _current = self.enter().ok()?;
        capture_number(raw(stream)).ok()?
    }

    unsafe fn launch(&self, launch: &Launch) -> Result<(), Error> {
        let parameter = parameter(launch)?;
        let _current = self.enter()?;
        let (module, function) = self.function(launch)?;
        let blocks = Kernel::blocks(launch.max_sms, self.core.multiprocessors);
        let threads = launch.kernel.threads(launch.args.most_tokens());
        let shared_bytes = module.pipeline_bytes(launch.kernel, launch.shmem);
        let attributes = [LaunchAttribute::PROGRAMMATIC];
        let waits = module.waits_for_earlier(launch.kernel, launch.shmem);
        let config = LaunchConfig {
            grid: [blocks, 1, 1],
            block: [threads, 1, 1],
            shared_bytes,
            stream: raw(launch.stream),
            attributes: attributes.as_ptr(),
            attribute_count: u32::from(waits),
        };
        // SAFETY: the kernel takes one parameter, of the type that `parameter` points to, which
        // the driver copies before it returns; its addresses are memory of the sizes in it (documented on
        // `Device::launch`). A block of the most threads that it may have fits on a multiprocessor (checked
        // when the kernels were loaded), and the stream is live (documented on `Stream::new`).
        let code = unsafe {
            sys::cuLaunchKernelEx(
                &config,
                function,
                [parameter.cast_mut()].as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        check_about("cuLaunchKernelEx", code, || {
            format!("{} on {}", launch.kernel.name(), self.core.name)
        })
    }

    unsafe fn launch_held(
        &self,
        launch: &Launch,
        held: &Arc<dyn Any + Send + Sync>,
    ) -> Result<InGraph, Error> {
        let _current = self.enter()?;
        let mark = CAPTURES.mark();
        // SAFETY: the rules of `Device::launch_held` are those of `Device::launch`.
        unsafe { self.launch(launch) }?;
        Ok(CAPTURES.hold(mark, held, capture_number(raw(launch.stream))))
    }

    fn fault_page(&self, words: usize) -> Result<Box<dyn SharedPage>, Error> {
        Ok(Box::new(PinnedPage::alloc(self.core.clone(), words)?))
    }
}

/// Address of the kernel's only parameter, if the kernel takes one of its type.
fn parameter(launch: &Launch) -> Result<*const c_void, Error> {
    let kernel = launch.kernel;
    if !launch.args.are_of(kernel) {
        let detail = format!("{} was given another kernel's arguments", kernel.name());
        return Err(error("cuLaunchKernelEx", sys::INVALID_VALUE, detail));
    }
    Ok(match &launch.args {
        Args::Dispatch(args) => ptr::from_ref(args).cast(),
        Args::Combine(args) => ptr::from_ref(args).cast(),
        Args::Counts(args) => ptr::from_ref(args).cast(),
        Args::GiveUp(args) => ptr::from_ref(args).cast(),
        Args::Links(args) => ptr::from_ref(args).cast(),
        Args::Silu(args) => ptr::from_ref(args).cast(),
    })
}
