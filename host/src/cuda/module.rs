//! The kernels on a device: the choice of its PTX, and the driver's compiler.

#[cfg(feature = "nvshmem")]
use std::ffi::CStr;
use std::ffi::{CString, c_void};
use std::{ptr, slice};

use ferry_layout::{Kernel, MAX_REGISTERS, Shape};
use ferry_ptx::Module as Text;

use super::context::{PrimaryContext, driver_version};
use super::error::{check_about, error};
use super::sys::{self, CUfunction, CUmodule};
use crate::device::kernels;
use crate::device::kernels::specialize::{KERNELS, specialised};
use crate::device::kernels::{KernelSet, Kernels, Ptx, Target};
#[cfg(feature = "nvshmem")]
use crate::error::kernels::KernelsError;
use crate::error::{DriverError, Error};
#[cfg(feature = "nvshmem")]
use crate::tensor::handles::DevicePtr;

/// Bytes for each of the compiler's logs.
const LOG_BYTES: usize = 16 << 10;

/// Embedded PTX of a set of kernels, the most special first, from the variables of `ferry_build::embed`.
macro_rules! embedded {
    ($sm_100a:literal, $sm_90a:literal, $sm_80:literal) => {
        [
            Ptx::embedded(Target::SM_100A, concat!(include_str!(env!($sm_100a)), "\0")),
            Ptx::embedded(Target::SM_90A, concat!(include_str!(env!($sm_90a)), "\0")),
            Ptx::embedded(Target::SM_80, concat!(include_str!(env!($sm_80)), "\0")),
        ]
    };
}

static EMBEDDED: [Ptx; 3] = embedded!("FERRY_PTX_SM_100A", "FERRY_PTX_SM_90A", "FERRY_PTX_SM_80");

static EMBEDDED_WITH_OPTIONS: [Ptx; 3] = embedded!(
    "FERRY_OPTIONS_PTX_SM_100A",
    "FERRY_OPTIONS_PTX_SM_90A",
    "FERRY_OPTIONS_PTX_SM_80"
);

static EMBEDDED_WITH_ROWS: [Ptx; 3] = embedded!(
    "FERRY_ROWS_PTX_SM_100A",
    "FERRY_ROWS_PTX_SM_90A",
    "FERRY_ROWS_PTX_SM_80"
);

/// Requirements of a kernel's launch, read from its text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Needs {
    /// Shared memory for the rings of a block's warps, in bytes.
    pipeline_bytes: u32,
    /// Whether it waits by itself for its predecessors in its stream.
    waits_for_earlier: bool,
}

impl Needs {
    fn of(text: &Text, kernel: Kernel, shmem: bool) -> Self {
        let entry = text.kernel(kernel.entry(shmem));
        let body = entry.map_or("", |entry| text.body(entry));
        // A kernel may also use the ring in a function, and unused memory does no harm.
        let functions = text.functions.iter().filter(|function| !function.is_kernel);
        let mut bodies = functions.map(|function| text.body(function));
        let has_ring = body.contains(RING) || bodies.any(|body| body.contains(RING));
        Self {
            pipeline_bytes: if has_ring { kernel.pipeline_bytes() } else { 0 },
            waits_for_earlier: body.contains("griddepcontrol.wait;"),
        }
    }
}

/// The variable of the rings.
const RING: &str = "ferry_ring";

/// Name of PTX in messages: "PTX 8.3 for sm_90a".
pub(super) fn title(text: &Text) -> String {
    format!("PTX {} for {}", text.version, text.target)
}

/// A device's module and its kernels. It stays loaded: the end of its last kernel is unknown, as enqueued
/// work and graphs may outlive their communicators.
pub(crate) struct Module {
    raw: CUmodule,
    ptx: Ptx,
    kernels: [[Loaded; 2]; Kernel::ALL.len()],
}

/// A kernel that was looked up.
#[derive(Clone, Copy)]
struct Loaded {
    function: CUfunction,
    needs: Needs,
}

// SAFETY: the driver's module and function handles may be used from any thread.
unsafe impl Send for Module {}
// SAFETY: as above; nothing here changes after loading.
unsafe impl Sync for Module {}

impl Module {
    /// Compiles the PTX that fits the device best and looks its kernels up. The context is
    /// current. Compiles only if the driver has not kept an earlier result; synchronizes.
    ///
    /// # Errors
    /// [`Error::Driver`], [`Error::Cuda`] with the compiler's log.
    pub(super) fn load(
        context: &PrimaryContext,
        kernels: &Kernels,
        set: KernelSet,
    ) -> Result<Self, Error> {
        let ptx = choose(context, kernels, set)?;
        let text = kernels::read(ptx.text().trim_end_matches('\0'))?;
        let kernels = set.kernels().flat_map(|kernel| {
            kernels::reaches(&text)
                .iter()
                .map(move |&shmem| (kernel, shmem))
        });
        Self::of(ptx, &text, ptx.text(), &kernels.collect::<Vec<_>>())
    }

    /// Loads the kernels for `shape` alone, without peers on other nodes, from the same PTX. The context is
    /// current.
    pub(super) fn load_for(&self, shape: &Shape) -> Result<Self, Error> {
        let text = kernels::read(self.ptx.text().trim_end_matches('\0'))?;
        let mut special = specialised(&text, shape);
        special.push('\0');
        let has = |kernel: &Kernel| text.kernel(kernel.entry(false)).is_some();
        let kernels: Vec<_> = KERNELS
            .into_iter()
            .filter(has)
            .map(|kernel| (kernel, false))
            .collect();
        Self::of(&self.ptx, &text, &special, &kernels)
    }

    /// Compiles `compiled`, which was made from `ptx`, whose text is `text`, and looks up `kernels`.
    fn of(
        ptx: &Ptx,
        text: &Text,
        compiled: &str,
        kernels: &[(Kernel, bool)],
    ) -> Result<Self, Error> {
        let none = Loaded {
            function: ptr::null_mut(),
            needs: Needs::default(),
        };
        let mut module = Self {
            raw: compile(&title(text), compiled)?,
            ptx: ptx.clone(),
            kernels: [[none; 2]; Kernel::ALL.len()],
        };
        for &(kernel, shmem) in kernels {
            let needs = Needs::of(text, kernel, shmem);
            match kernel_of(module.raw, kernel, shmem, needs) {
                Ok(found) => module.kernels[kernel as usize][usize::from(shmem)] = found,
                Err(error) => {
                    unload(module.raw);
                    return Err(error);
                }
            }
        }
        Ok(module)
    }

    /// The driver's handle.
    #[cfg(feature = "nvshmem")]
    pub(crate) const fn raw(&self) -> CUmodule {
        self.raw
    }

    /// A variable of the module. The context is current.
    #[cfg(feature = "nvshmem")]
    pub(crate) fn variable(&self, name: &CStr) -> Result<DevicePtr, Error> {
        let (mut at, mut bytes) = (0, 0);
        // SAFETY: the module is loaded in the current context, and the name ends with a zero byte.
        let code =
            unsafe { sys::cuModuleGetGlobal_v2(&mut at, &mut bytes, self.raw, name.as_ptr()) };
        check_about("cuModuleGetGlobal", code, || {
            format!("the variable {}", name.to_string_lossy())
        })?;
        // SAFETY: the module's memory, which stays while it is loaded: modules are never unloaded.
        Ok(unsafe { DevicePtr::new(at, bytes as u64) })
    }

    /// A kernel; null if it is not among those that were looked up.
    pub(super) const fn function(&self, kernel: Kernel, shmem: bool) -> CUfunction {
        self.kernels[kernel as usize][shmem as usize].function
    }

    /// Shared memory that a kernel's blocks need at launch, in bytes.
    pub(super) const fn pipeline_bytes(&self, kernel: Kernel, shmem: bool) -> u32 {
        self.kernels[kernel as usize][shmem as usize]
            .needs
            .pipeline_bytes
    }

    /// Whether a kernel waits by itself for its predecessors in its stream.
    pub(super) const fn waits_for_earlier(&self, kernel: Kernel, shmem: bool) -> bool {
        self.kernels[kernel as usize][shmem as usize]
            .needs
            .waits_for_earlier
    }

    /// Checks that some kernels reach ranks of other nodes.
    #[cfg(feature = "nvshmem")]
    pub(crate) fn require_shmem(&self) -> Result<(), Error> {
        let reaches = |kernel: &Kernel| !self.function(*kernel, true).is_null();
        if KERNELS.iter().any(reaches) {
            return Ok(());
        }
        Err(Error::Kernels(KernelsError::WithoutNvshmem {
            target: self.ptx.target.to_string(),
        }))
    }
}

/// Unloads a module. The context is current, and no kernel of it runs or will be launched.
pub(super) fn unload(module: CUmodule) {
    // SAFETY: the module was loaded in the current context, and no kernel of it runs or will be launched:
    // documented on this function. It fails only if the context is broken already, and its memory with it.
    let _ = unsafe { sys::cuModuleUnload(module) };
}

/// The embedded PTX of a set.
const fn embedded(set: KernelSet) -> &'static [Ptx; 3] {
    match set {
        KernelSet::Plain => &EMBEDDED,
        KernelSet::WithOptions => &EMBEDDED_WITH_OPTIONS,
        KernelSet::Rows => &EMBEDDED_WITH_ROWS,
    }
}

/// The first PTX that a device runs.
fn choose<'a>(
    context: &PrimaryContext,
    kernels: &'a Kernels,
    set: KernelSet,
) -> Result<&'a Ptx, Error> {
    let all = (kernels.given(set)).map_or(&embedded(set)[..], slice::from_ref);
    let targets: Vec<Target> = all.iter().map(|ptx| ptx.target).collect();
    Ok(&all[best(context, &targets)?])
}

/// The index of the first target that a device runs.
pub(super) fn best(context: &PrimaryContext, targets: &[Target]) -> Result<usize, Error> {
    let major = context.attribute(sys::COMPUTE_CAPABILITY_MAJOR)?;
    let minor = context.attribute(sys::COMPUTE_CAPABILITY_MINOR)?;
    let mut all = targets.iter();
    if let Some(found) = all.position(|target| target.runs_on(major, minor)) {
        return Ok(found);
    }
    let available = targets.iter().rev().map(Target::to_string);
    Err(DriverError::NoKernelFor {
        device: context.device_name()?,
        capability: format!("{major}.{minor}"),
        available: available.collect::<Vec<_>>().join(", "),
    }
    .into())
}

/// A buffer that the driver's compiler writes text into.
struct Log(Vec<u8>);

impl Log {
    fn new() -> Self {
        Self(vec![0; LOG_BYTES])
    }

    fn text(&self) -> String {
        let end = self.0.iter().position(|&byte| byte == 0);
        let written = &self.0[..end.unwrap_or(self.0.len())];
        String::from_utf8_lossy(written).trim().to_owned()
    }
}

/// Loads `text`, which ends with a zero byte, into the current context, with so few registers that a block of
/// the kernels fits. `title` is its name in messages.
pub(super) fn compile(title: &str, text: &str) -> Result<CUmodule, Error> {
    let (mut info, mut errors) = (Log::new(), Log::new());
    let mut names = [
        sys::JIT_MAX_REGISTERS,
        sys::JIT_INFO_LOG_BUFFER,
        sys::JIT_INFO_LOG_BYTES,
        sys::JIT_ERROR_LOG_BUFFER,
        sys::JIT_ERROR_LOG_BYTES,
    ];
    // The driver takes numbers in the place of pointers.
    let number = |value: usize| ptr::without_provenance_mut::<c_void>(value);
    let mut values = [
        number(MAX_REGISTERS as usize),
        info.0.as_mut_ptr().cast(),
        number(LOG_BYTES),
        errors.0.as_mut_ptr().cast(),
        number(LOG_BYTES),
    ];
    let mut module = ptr::null_mut();
    // SAFETY: the text ends with a zero byte; both arrays have `names.len()` entries, and
    // both buffers, which outlive the call, `LOG_BYTES` bytes.
    let code = unsafe {
        sys::cuModuleLoadDataEx(
            &mut module,
            text.as_ptr().cast(),
            names.len() as u32,
            names.as_mut_ptr(),
            values.as_mut_ptr(),
        )
    };
    if code == sys::SUCCESS {
        tracing::debug!(ptx = title, log = info.text(), "kernels loaded");
        return Ok(module);
    }
    Err(refused(title, code, &errors.text())?)
}

/// The error of PTX that the driver refused. The outer error is that of asking for its version.
fn refused(title: &str, code: sys::Code, log: &str) -> Result<Error, Error> {
    if is_too_new(code, log) {
        return Ok(DriverError::PtxTooNew {
            ptx: title.to_owned(),
            driver: driver_version()?,
        }
        .into());
    }
    let detail = format!("{title}; the driver's compiler says: {log}");
    Ok(error("cuModuleLoadDataEx", code, detail))
}

/// Whether PTX is too new for the driver. Drivers before 11.1 have no code of its own for that.
fn is_too_new(code: sys::Code, log: &str) -> bool {
    code == sys::UNSUPPORTED_PTX_VERSION
        || (code == sys::INVALID_PTX && log.contains("Unsupported .version"))
}

/// Looks a kernel up and makes sure that its blocks fit on a multiprocessor.
fn kernel_of(module: CUmodule, kernel: Kernel, shmem: bool, needs: Needs) -> Result<Loaded, Error> {
    let (entry, threads) = (kernel.entry(shmem), kernel.threads_per_block());
    let about = || format!("the kernel {entry} with blocks of {threads} threads");
    let function = find(module, entry)?;
    let (attribute, bytes) = (
        sys::FUNC_MAX_DYNAMIC_SHARED_BYTES,
        needs.pipeline_bytes as i32,
    );
    // SAFETY: the function was found in a module of the current context.
    let code = unsafe { sys::cuFuncSetAttribute(function, attribute, bytes) };
    check_about("cuFuncSetAttribute", code, about)?;
    if blocks_that_fit(function, threads, needs.pipeline_bytes, about)? < 1 {
        let detail = format!("{}: no block fits on a multiprocessor", about());
        return Err(error(OCCUPANCY, sys::LAUNCH_OUT_OF_RESOURCES, detail));
    }
    Ok(Loaded { function, needs })
}

/// Looks a kernel up. The context is current.
pub(super) fn find(module: CUmodule, entry: &str) -> Result<CUfunction, Error> {
    let name = CString::new(entry).unwrap_or_default();
    let mut function = ptr::null_mut();
    // SAFETY: the module is loaded in the current context, and `name` ends with a zero byte.
    let code = unsafe { sys::cuModuleGetFunction(&mut function, module, name.as_ptr()) };
    check_about("cuModuleGetFunction", code, || {
        format!("the kernel {entry}")
    })?;
    Ok(function)
}

const OCCUPANCY: &str = "cuOccupancyMaxActiveBlocksPerMultiprocessor";

/// Blocks that fit on a multiprocessor. The query also loads the kernel, which the driver may put
/// off otherwise: the first launch, for which other kernels may already wait, must not have to. The context
/// is current.
pub(super) fn blocks_that_fit(
    function: CUfunction,
    threads: u32,
    shared_bytes: u32,
    about: impl FnOnce() -> String,
) -> Result<u32, Error> {
    let mut blocks = 0;
    // SAFETY: the function was found in a module of the current context; `blocks` is live.
    let code = unsafe {
        sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(
            &mut blocks,
            function,
            threads as i32,
            shared_bytes as usize,
        )
    };
    check_about(OCCUPANCY, code, about)?;
    Ok(blocks.max(0) as u32)
}

#[cfg(test)]
#[path = "module_tests.rs"]
mod tests;
