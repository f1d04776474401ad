//! Kernels of the caller's own.

use std::ffi::c_char;

use crate::handle::{Opaque, get, require_place, take};
use crate::status::{Failure, ferry_status, guard};
use crate::structs::{flag, read, sized};

/// Kernels that groups load in the place of the library's. Plans with options, a shared expert or
/// skip_a2a have others beside them: those stay the library's. Any thread may use it.
pub struct ferry_kernels(());

impl Opaque for ferry_kernels {
    #[cfg(feature = "cuda")]
    type Value = ferry::Kernels;
    /// There are none.
    #[cfg(not(feature = "cuda"))]
    type Value = std::convert::Infallible;
    const NAME: &'static str = "ferry_kernels";
    const MAGIC: u64 = u64::from_le_bytes(*b"ferry/ke");
}

/// What a group of GPUs is made with besides its ranks. All zeros: the default.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ferry_group_options {
    /// sizeof(ferry_group_options).
    pub size: usize,
    /// The kernels of this process's devices, not needed any more once the group is made. All
    /// processes give the same. NULL: those that the library was built with.
    pub kernels: *const ferry_kernels,
    /// 1: several ranks may be on one GPU, which is refused otherwise. All ranks on a GPU say so. Each
    /// takes its part of the multiprocessors, and has streams of its own: a call whose kernel would
    /// come behind one that waits for it is refused (FERRY_WRONG_ORDER). A process of several ranks
    /// on a GPU sets CUDA_DEVICE_MAX_CONNECTIONS=32 before anything uses the driver. NVSHMEM groups
    /// need MPS then (FERRY_PEER).
    pub share_gpus: u32,
    /// Must be 0.
    pub reserved: u32,
}
sized!(ferry_group_options, 16);

/// Checks kernels in a PTX text of `bytes` bytes, which is copied and needs no zero byte at its
/// end: that of a crate which has entries of the same names as Ferry's, of the same arguments, and
/// was linked with the ferry-gpu of this version. More entries are allowed. Names, sizes of
/// arguments and the layout of memory are compared; FERRY_INVALID_ARGUMENT names the first that
/// does not fit. The text is for one architecture, which each device compares with its own when a
/// group is made (FERRY_DEVICE); there the driver compiles it. ferry_group_nvshmem_with also needs
/// the entries that reach ranks of other nodes. You promise that the kernels touch no other memory
/// than Ferry's of the same names would, and end as those do. Needs the feature cuda, and no
/// device. Not collective. Does not synchronise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_kernels_from_ptx(
    text: *const c_char,
    bytes: usize,
    kernels: *mut *mut ferry_kernels,
) -> ferry_status {
    guard("ferry_kernels_from_ptx", || {
        // SAFETY: the rule of pointers.
        unsafe { require_place(kernels, "kernels", 1)? };
        // SAFETY: the rules of pointers and kernels; `kernels` was checked above.
        unsafe { from_ptx(text, bytes, kernels) }
    })
}

/// Gives the handle back, and sets `*kernels` to NULL. Groups that were made with it stay. Not
/// collective. Does not synchronise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_kernels_free(kernels: *mut *mut ferry_kernels) -> ferry_status {
    guard("ferry_kernels_free", || {
        // SAFETY: the rules of pointers and handles.
        unsafe { take(kernels, "*kernels") }.map(drop)
    })
}

/// Options that were read.
#[derive(Default)]
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "there are no GPUs"))]
pub(crate) struct Given<'a> {
    /// `None`: the library's.
    pub(crate) kernels: Option<&'a <ferry_kernels as Opaque>::Value>,
    pub(crate) share_gpus: bool,
}

#[cfg(feature = "cuda")]
impl Given<'_> {
    /// As the library takes them.
    pub(crate) fn options(&self) -> ferry::GroupOptions {
        ferry::GroupOptions {
            kernels: self.kernels.cloned().unwrap_or_default(),
            share_gpus: self.share_gpus,
            ..ferry::GroupOptions::default()
        }
    }
}

impl ferry_group_options {
    /// The options at a place, which may be null.
    ///
    /// # Safety
    /// The rules of pointers and handles.
    pub(crate) unsafe fn read<'a>(options: *const Self) -> Result<Given<'a>, Failure> {
        if options.is_null() {
            return Ok(Given::default());
        }
        // SAFETY: the caller's promise.
        let given = unsafe { read(options, "options")? };
        if given.reserved != 0 {
            let rule = "it must be 0";
            return Err(Failure::value("options->reserved", given.reserved, rule));
        }
        let kernels = match given.kernels.is_null() {
            true => None,
            // SAFETY: the caller's promise.
            false => Some(unsafe { get(given.kernels, "options->kernels") }?),
        };
        let share_gpus = flag("options->share_gpus", given.share_gpus)?;
        Ok(Given {
            kernels,
            share_gpus,
        })
    }
}

/// # Safety
/// The rules of pointers and kernels; `kernels` may be written.
#[cfg(feature = "cuda")]
unsafe fn from_ptx(
    text: *const c_char,
    bytes: usize,
    kernels: *mut *mut ferry_kernels,
) -> Result<(), Failure> {
    // SAFETY: the caller's promise.
    let text = unsafe { crate::handle::values(text.cast::<u8>(), "text", bytes)? };
    let text = std::str::from_utf8(text)
        .map_err(|error| Failure::value("text", "no PTX", &error.to_string()))?;
    // SAFETY: the caller's promise.
    let made = unsafe { ferry::Kernels::from_ptx(text) }.map_err(ferry::Error::from)?;
    // SAFETY: the caller's promise.
    unsafe { crate::handle::put(kernels, made) };
    Ok(())
}

/// # Safety
/// None is needed: nothing is read.
#[cfg(not(feature = "cuda"))]
unsafe fn from_ptx(_: *const c_char, _: usize, _: *mut *mut ferry_kernels) -> Result<(), Failure> {
    Err(Failure::not_built("cuda"))
}
