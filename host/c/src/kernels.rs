//! Custom kernels.

use std::ffi::c_char;

use crate::handle::{Opaque, get, make, take};
use crate::status::{Failure, ferry_status, guard};
use crate::structs::{flag, read, sized};

/// Kernels that groups load instead of the library's. Additional kernels for plans with options, a shared
/// expert or skip_a2a are always the library's. Any thread may use them.
pub struct ferry_kernels(());

impl Opaque for ferry_kernels {
    #[cfg(feature = "cuda")]
    type Value = ferry::Kernels;
    /// No value: custom kernels need CUDA.
    #[cfg(not(feature = "cuda"))]
    type Value = std::convert::Infallible;
    const NAME: &'static str = "ferry_kernels";
    const MAGIC: u64 = u64::from_le_bytes(*b"ferry/ke");
}

/// Options of a group of GPUs. All zeros: the default.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ferry_group_options {
    /// sizeof(ferry_group_options).
    pub size: usize,
    /// Kernels for this process's devices, the same in all processes. May be freed once the group is made.
    /// NULL: those that the library was built with.
    pub kernels: *const ferry_kernels,
    /// 1: several ranks may be on one GPU, which is refused otherwise. All ranks of that GPU must set it.
    /// Each uses its part of the multiprocessors and needs streams of its own: a call whose kernel would
    /// be queued after one that waits for it is refused (FERRY_WRONG_ORDER). A process with several ranks
    /// on a GPU should set CUDA_DEVICE_MAX_CONNECTIONS=32 before anything uses the driver. NVSHMEM groups
    /// need MPS then (FERRY_PEER).
    pub share_gpus: u32,
    /// 1: the links between all ranks are checked when the group is made: every rank stores into the memory
    /// of every other one as ferry_dispatch does. A group with a bad link is refused, and the text names
    /// the link (FERRY_DEVICE). All processes must set it alike.
    pub check_links: u32,
}
sized!(ferry_group_options, 16);

/// Checks kernels in a PTX text of `bytes` bytes, which is copied and needs no terminating zero byte. The PTX
/// must come from a crate that defines entries with the names and arguments of Ferry's and is linked with
/// ferry-gpu of this version; more entries are allowed. Names, sizes of arguments and the memory layout are
/// compared; FERRY_INVALID_ARGUMENT names the first mismatch. The PTX is for one architecture, which each
/// device compares with its own when a group is made (FERRY_DEVICE), before the driver compiles it.
/// ferry_group_nvshmem_with also needs the entries that reach ranks of other nodes. The caller promises that
/// the kernels touch no other memory than Ferry's kernels of the same names, and end as they do. Needs the
/// feature cuda but no device. Not collective. Does not synchronise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_kernels_from_ptx(
    text: *const c_char,
    bytes: usize,
    kernels: *mut *mut ferry_kernels,
) -> ferry_status {
    guard("ferry_kernels_from_ptx", || {
        // SAFETY: the rules of pointers and kernels.
        unsafe { make(kernels, "kernels", || from_ptx(text, bytes)) }
    })
}

/// Frees the handle and sets `*kernels` to NULL. Groups made with the kernels keep them. Not collective. Does
/// not synchronise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_kernels_free(kernels: *mut *mut ferry_kernels) -> ferry_status {
    guard("ferry_kernels_free", || {
        // SAFETY: the rules of pointers and handles.
        unsafe { take(kernels, "*kernels") }.map(drop)
    })
}

/// Options of a [`ferry_group_options`].
#[derive(Default)]
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "there are no GPUs"))]
pub(crate) struct Given<'a> {
    /// `None`: the library's.
    pub(crate) kernels: Option<&'a <ferry_kernels as Opaque>::Value>,
    pub(crate) share_gpus: bool,
    pub(crate) check_links: bool,
}

#[cfg(feature = "cuda")]
impl Given<'_> {
    /// Converts to the library's options.
    pub(crate) fn options(&self) -> ferry::GroupOptions {
        ferry::GroupOptions {
            kernels: self.kernels.cloned().unwrap_or_default(),
            share_gpus: self.share_gpus,
            check_links: self.check_links,
            ..ferry::GroupOptions::default()
        }
    }
}

impl ferry_group_options {
    /// Reads options; the default if the pointer is null.
    ///
    /// # Safety
    /// The rules of pointers and handles.
    pub(crate) unsafe fn read<'a>(options: *const Self) -> Result<Given<'a>, Failure> {
        if options.is_null() {
            return Ok(Given::default());
        }
        // SAFETY: the rule of pointers.
        let given = unsafe { read(options, "options")? };
        let kernels = if given.kernels.is_null() {
            None
        } else {
            // SAFETY: the rule of handles.
            Some(unsafe { get(given.kernels, "options->kernels") }?)
        };
        Ok(Given {
            kernels,
            share_gpus: flag("options->share_gpus", given.share_gpus)?,
            check_links: flag("options->check_links", given.check_links)?,
        })
    }
}

/// # Safety
/// The rules of pointers and kernels.
#[cfg(feature = "cuda")]
unsafe fn from_ptx(text: *const c_char, bytes: usize) -> Result<ferry::Kernels, Failure> {
    // SAFETY: the rule of pointers.
    let text = unsafe { crate::handle::values(text.cast::<u8>(), "text", bytes)? };
    let text = std::str::from_utf8(text)
        .map_err(|error| Failure::value("text", "not PTX", &error.to_string()))?;
    // SAFETY: the rule of kernels.
    let made = unsafe { ferry::Kernels::from_ptx(text) };
    Ok(made.map_err(ferry::Error::from)?)
}

/// # Safety
/// Nothing is required: no pointer is read through.
#[cfg(not(feature = "cuda"))]
unsafe fn from_ptx(_: *const c_char, _: usize) -> Result<std::convert::Infallible, Failure> {
    Err(Failure::not_built("cuda"))
}
