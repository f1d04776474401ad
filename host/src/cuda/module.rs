//! The embedded kernels: which PTX a device gets, and its way through the driver's compiler.

use std::ffi::{CString, c_void};
use std::ptr;

use cust::device::DeviceAttribute;
use ferry_layout::{Kernel, MAX_REGISTERS, Shape};

use super::context::{PrimaryContext, driver_version};
use super::error::{check_about, error};
use super::sys::{self, CUfunction, CUjit_option, CUmodule};
use crate::Error;
use crate::specialise::{KERNELS, specialised};

/// Bytes for each of the compiler's logs.
const LOG_BYTES: usize = 16 << 10;

/// One embedded PTX file.
struct Ptx {
    /// What it was compiled for: "sm_90a".
    target: &'static str,
    /// The text, with a zero byte at its end.
    text: &'static str,
}

/// What `build.rs` made of the device crate, the most special first.
const EMBEDDED: [Ptx; 3] = [
    Ptx {
        target: "sm_100a",
        text: concat!(include_str!(env!("FERRY_PTX_SM_100A")), "\0"),
    },
    Ptx {
        target: "sm_90a",
        text: concat!(include_str!(env!("FERRY_PTX_SM_90A")), "\0"),
    },
    Ptx {
        target: "sm_80",
        text: concat!(include_str!(env!("FERRY_PTX_SM_80")), "\0"),
    },
];

impl Ptx {
    /// Whether a device of compute capability `capability` runs it. What ends in `a` runs on
    /// that very capability alone, the rest on later ones as well.
    fn runs_on(&self, capability: (u32, u32)) -> bool {
        match self.target {
            "sm_100a" => capability == (10, 0),
            "sm_90a" => capability == (9, 0),
            _ => capability >= (8, 0),
        }
    }

    /// Shared memory that a kernel's blocks need at launch, in bytes: their warps' rings.
    fn pipeline_bytes(&self, kernel: Kernel, shmem: bool) -> u32 {
        // Kernels that reach other nodes load without. Some are the same with and without such peers.
        let reaches_far = kernel.entry(shmem) != kernel.entry(false);
        match self.target == "sm_80" || reaches_far {
            true => 0,
            false => kernel.pipeline_bytes(),
        }
    }

    /// Whether a kernel says itself where it waits for those before it in its stream.
    fn waits_for_earlier(&self, kernel: Kernel) -> bool {
        self.target != "sm_80" && kernel != Kernel::FusedSilu
    }

    /// For people: "PTX 8.3 for sm_90a".
    fn title(&self) -> String {
        let version = self
            .text
            .lines()
            .find_map(|line| line.strip_prefix(".version "))
            .unwrap_or("of unknown version");
        format!("PTX {} for {}", version.trim(), self.target)
    }
}

/// A device's module and its kernels. Not unloaded by itself: whoever owns it calls
/// [`unload`](Self::unload) with the context current.
pub(super) struct Module {
    raw: CUmodule,
    ptx: &'static Ptx,
    functions: [[CUfunction; 2]; Kernel::ALL.len()],
}

// SAFETY: the driver's module and function handles may be used from any thread.
unsafe impl Send for Module {}
// SAFETY: as above; nothing here changes after loading.
unsafe impl Sync for Module {}

impl Module {
    /// Compiles the PTX that fits the device best and looks its kernels up. The context is
    /// current. Compiles only if the driver has not kept an earlier result; synchronises.
    ///
    /// # Errors
    /// [`Error::NoKernelFor`], [`Error::PtxTooNew`], [`Error::Cuda`] with the compiler's log.
    pub(super) fn load(context: &PrimaryContext) -> Result<Self, Error> {
        let ptx = choose(context)?;
        let kernels = Kernel::ALL.map(|kernel| [(kernel, false), (kernel, true)]);
        Self::of(ptx, ptx.text, kernels.as_flattened())
    }

    /// As [`load`](Self::load), the kernels for `shape` alone, without peers on other nodes.
    pub(super) fn load_for(context: &PrimaryContext, shape: &Shape) -> Result<Self, Error> {
        let ptx = choose(context)?;
        let mut text = specialised(ptx.text.trim_end_matches('\0'), shape);
        text.push('\0');
        Self::of(ptx, &text, &KERNELS.map(|kernel| (kernel, false)))
    }

    /// Compiles `text`, which was made of `ptx`, and looks up `kernels`.
    fn of(ptx: &'static Ptx, text: &str, kernels: &[(Kernel, bool)]) -> Result<Self, Error> {
        let raw = compile(ptx, text)?;
        let mut module = Self {
            raw,
            ptx,
            functions: [[ptr::null_mut(); 2]; Kernel::ALL.len()],
        };
        for &(kernel, shmem) in kernels {
            match function((raw, ptx), kernel, shmem) {
                Ok(found) => module.functions[kernel as usize][usize::from(shmem)] = found,
                Err(error) => {
                    module.unload();
                    return Err(error);
                }
            }
        }
        Ok(module)
    }

    /// The driver's handle.
    pub(super) const fn raw(&self) -> CUmodule {
        self.raw
    }

    /// A kernel; null if it is not among those that were looked up.
    pub(super) const fn function(&self, kernel: Kernel, shmem: bool) -> CUfunction {
        self.functions[kernel as usize][shmem as usize]
    }

    /// Shared memory that a kernel's blocks need at launch, in bytes.
    pub(super) fn pipeline_bytes(&self, kernel: Kernel, shmem: bool) -> u32 {
        self.ptx.pipeline_bytes(kernel, shmem)
    }

    /// Whether a kernel says itself where it waits for those before it in its stream.
    pub(super) fn waits_for_earlier(&self, kernel: Kernel) -> bool {
        self.ptx.waits_for_earlier(kernel)
    }

    /// Unloads the module. The context is current, and no kernel of it runs or will be launched.
    pub(super) fn unload(&self) {
        // SAFETY: the module was loaded in the current context. It fails only where the context
        // is broken already, and its memory with it.
        let _ = unsafe { sys::cuModuleUnload(self.raw) };
    }
}

/// The best embedded PTX for a device.
fn choose(context: &PrimaryContext) -> Result<&'static Ptx, Error> {
    let capability = (
        context.attribute(DeviceAttribute::ComputeCapabilityMajor)?,
        context.attribute(DeviceAttribute::ComputeCapabilityMinor)?,
    );
    if let Some(ptx) = EMBEDDED.iter().find(|ptx| ptx.runs_on(capability)) {
        return Ok(ptx);
    }
    let available = EMBEDDED.iter().rev().map(|ptx| ptx.target);
    Err(Error::NoKernelFor {
        device: context.device_name()?,
        capability: format!("{}.{}", capability.0, capability.1),
        available: available.collect::<Vec<_>>().join(", "),
    })
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

/// Loads `text`, which was made of `ptx` and ends with a zero byte, into the current context, with so few
/// registers that a block fits.
fn compile(ptx: &Ptx, text: &str) -> Result<CUmodule, Error> {
    let (mut info, mut errors) = (Log::new(), Log::new());
    let mut names = [
        CUjit_option::CU_JIT_MAX_REGISTERS,
        CUjit_option::CU_JIT_INFO_LOG_BUFFER,
        CUjit_option::CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES,
        CUjit_option::CU_JIT_ERROR_LOG_BUFFER,
        CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
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
    // SAFETY: the text ends with a zero byte; both arrays have as many entries as is said, and
    // both buffers, which outlive the call, as many bytes.
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
        tracing::debug!(ptx = ptx.title(), log = info.text(), "kernels loaded");
        return Ok(module);
    }
    Err(refused(ptx, code, &errors.text())?)
}

/// Why the driver did not take `ptx`. The outer error is that of asking for its version.
fn refused(ptx: &Ptx, code: sys::Code, log: &str) -> Result<Error, Error> {
    if is_too_new(code, log) {
        return Ok(Error::PtxTooNew {
            ptx: ptx.title(),
            driver: driver_version()?,
        });
    }
    let detail = format!("{}; the driver's compiler says: {log}", ptx.title());
    Ok(error("cuModuleLoadDataEx", code, detail))
}

/// Drivers before 11.1 have no code of its own for it.
fn is_too_new(code: sys::Code, log: &str) -> bool {
    code == sys::UNSUPPORTED_PTX_VERSION
        || (code == sys::INVALID_PTX && log.contains("Unsupported .version"))
}

/// Looks a kernel up and makes sure that its blocks fit on a multiprocessor. Asking for
/// that loads it, where the driver would put that off: the first launch, which may find other
/// kernels waiting for it, must not have to.
fn function(
    (module, ptx): (CUmodule, &Ptx),
    kernel: Kernel,
    shmem: bool,
) -> Result<CUfunction, Error> {
    let (entry, threads) = (kernel.entry(shmem), kernel.threads_per_block());
    let about = || format!("the kernel {entry} with blocks of {threads} threads");
    let name = CString::new(entry).unwrap_or_default();
    let mut function = ptr::null_mut();
    // SAFETY: the module is loaded in the current context, and `name` ends with a zero byte.
    let code = unsafe { sys::cuModuleGetFunction(&mut function, module, name.as_ptr()) };
    check_about("cuModuleGetFunction", code, about)?;
    let pipeline_bytes = ptx.pipeline_bytes(kernel, shmem);
    let (attribute, bytes) = (sys::FUNC_MAX_DYNAMIC_SHARED_BYTES, pipeline_bytes as i32);
    // SAFETY: the function was found in a module of the current context.
    let code = unsafe { sys::cuFuncSetAttribute(function, attribute, bytes) };
    check_about("cuFuncSetAttribute", code, about)?;
    let mut blocks = 0;
    // SAFETY: the function was found in a module of the current context; `blocks` is live.
    let code = unsafe {
        sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(
            &mut blocks,
            function,
            threads as i32,
            pipeline_bytes as usize,
        )
    };
    let call = "cuOccupancyMaxActiveBlocksPerMultiprocessor";
    check_about(call, code, about)?;
    if blocks < 1 {
        let detail = format!("{}: no block fits on a multiprocessor", about());
        return Err(error(call, sys::LAUNCH_OUT_OF_RESOURCES, detail));
    }
    Ok(function)
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use std::mem::offset_of;

    use ferry_layout::{COMMON_OFFSET, CombineArgs, Common, DispatchArgs, SiluArgs};

    use super::*;
    use crate::specialise::SHAPE;

    #[test]
    fn the_most_special_ptx_that_a_device_runs_is_chosen() {
        let chosen = |capability| {
            let ptx = EMBEDDED.iter().find(|ptx| ptx.runs_on(capability));
            ptx.map(|ptx| ptx.target)
        };
        assert_eq!(chosen((7, 5)), None);
        assert_eq!(chosen((8, 0)), Some("sm_80"));
        assert_eq!(chosen((8, 9)), Some("sm_80"));
        assert_eq!(chosen((9, 0)), Some("sm_90a"));
        assert_eq!(chosen((10, 0)), Some("sm_100a"));
        assert_eq!(chosen((10, 3)), Some("sm_80"));
        assert_eq!(chosen((12, 0)), Some("sm_80"));
    }

    /// A kernel's text, up to the next kernel.
    fn body(ptx: &Ptx, kernel: Kernel, shmem: bool) -> &'static str {
        let entry = format!(".entry {}(", kernel.entry(shmem));
        let (_, body) = ptx.text.split_once(&entry).expect(&entry);
        body.split(".entry ").next().unwrap_or(body)
    }

    #[test]
    fn kernels_that_load_through_rings_are_given_them() {
        for ptx in EMBEDDED {
            for (kernel, shmem) in Kernel::ALL
                .into_iter()
                .flat_map(|k| [(k, false), (k, true)])
            {
                let given = ptx.pipeline_bytes(kernel, shmem) > 0;
                let (entry, body) = (kernel.entry(shmem), body(&ptx, kernel, shmem));
                assert_eq!(given, body.contains("ferry_ring"), "{entry} {}", ptx.target);
            }
        }
    }

    #[test]
    fn kernels_that_may_begin_early_wait_for_those_before() {
        for ptx in EMBEDDED {
            for kernel in Kernel::ALL {
                for shmem in [false, true] {
                    let (entry, body) = (kernel.entry(shmem), body(&ptx, kernel, shmem));
                    let waits = body.matches("griddepcontrol.wait;").count();
                    let wanted = usize::from(ptx.waits_for_earlier(kernel));
                    assert_eq!(waits, wanted, "{entry} {}", ptx.target);
                }
            }
        }
    }

    #[test]
    fn every_ptx_says_its_target_and_ends_with_its_only_zero_byte() {
        for ptx in EMBEDDED {
            assert!(CStr::from_bytes_with_nul(ptx.text.as_bytes()).is_ok());
            let target = format!(".target {}", ptx.target);
            assert!(ptx.text.lines().any(|line| line.trim() == target));
            assert!(!ptx.title().contains("unknown"), "{}", ptx.title());
        }
    }

    #[test]
    fn every_kernel_takes_one_struct_of_the_hosts_size() {
        for ptx in EMBEDDED {
            for kernel in Kernel::ALL {
                let bytes = match kernel {
                    Kernel::DispatchAsync | Kernel::DispatchWait | Kernel::Dispatch => {
                        size_of::<DispatchArgs>()
                    }
                    Kernel::FusedSilu => size_of::<SiluArgs>(),
                    Kernel::CombineAsync | Kernel::CombineWait | Kernel::Combine => {
                        size_of::<CombineArgs>()
                    }
                };
                for shmem in [false, true] {
                    let entry = kernel.entry(shmem);
                    let start = format!(".visible .entry {entry}(");
                    let (_, rest) = ptx.text.split_once(&start).expect("the kernel is there");
                    let (parameters, _) = rest.split_once(')').expect("its parameters end");
                    let wanted = format!(".param .align 8 .b8 {entry}_param_0[{bytes}]");
                    assert_eq!(parameters.trim(), wanted, "{}", ptx.target);
                }
            }
        }
    }

    #[test]
    fn a_ptx_that_is_too_new_is_told_from_a_broken_one() {
        let log = "ptxas fatal : Unsupported .version 8.3; current version is '7.8'";
        assert!(is_too_new(sys::INVALID_PTX, log));
        assert!(is_too_new(sys::UNSUPPORTED_PTX_VERSION, ""));
        assert!(!is_too_new(sys::INVALID_PTX, "ptxas fatal : syntax error"));
    }

    #[test]
    fn no_embedded_kernel_loads_a_constant() {
        for ptx in EMBEDDED {
            let text = specialised(ptx.text, &SHAPE);
            let entries = text
                .lines()
                .filter_map(|line| line.strip_prefix(".visible .entry "))
                .map(|line| line.split('(').next().unwrap_or_default());
            let mut wanted = KERNELS.map(|kernel| kernel.entry(false));
            wanted.sort_unstable();
            assert_eq!(entries.collect::<Vec<_>>(), wanted, "{}", ptx.target);
            let left = text.lines().filter(|line| {
                let place = line.split_once("_param_0+").map(|(_, rest)| rest);
                let offset = place.map(|rest| rest.trim_end_matches("];").parse());
                let offset: usize = offset.unwrap_or(Ok(0)).expect("an offset");
                let constants = offset_of!(Common, shape)..size_of::<Common>();
                line.contains("ld.param::entry")
                    && constants.contains(&offset.wrapping_sub(COMMON_OFFSET))
            });
            assert_eq!(
                left.collect::<Vec<_>>(),
                Vec::<&str>::new(),
                "{}",
                ptx.target
            );
            let moves = text.matches("mov.b64 \t%rd").count();
            assert!(moves > 100, "{moves} moves in {}", ptx.target);
        }
    }

    #[test]
    fn no_kernel_for_a_shape_divides_by_what_the_shape_says() {
        for ptx in EMBEDDED {
            let text = specialised(ptx.text, &SHAPE);
            let divides = |line: &&str| line.contains("\tdiv.u32") || line.contains("\trem.u32");
            let divisions = text.lines().filter(divides).count();
            // Those by what is no constant. Where e4m3 is made by hand, that divides, too.
            let most = if ptx.target == "sm_80" { 100 } else { 16 };
            assert!(divisions <= most, "{divisions} divisions in {}", ptx.target);
        }
    }
}
