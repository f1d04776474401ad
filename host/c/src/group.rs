//! Groups.

use std::ffi::c_char;
use std::ptr;
use std::time::Duration;

use ferry::Group;
use ferry::simulator::Options as SimulatorOptions;

#[cfg(feature = "cuda")]
use crate::bootstrap::open::open;
use crate::bootstrap::{ferry_bootstrap, require_ranks};
use crate::handle::{Opaque, get, make, store, take, values};
use crate::kernels::{Given, ferry_group_options};
use crate::status::{Failure, ferry_status, guard};
use crate::structs::{read, sized};

/// A group of ranks that exchange tokens. Any thread may use it.
pub struct ferry_group(());

impl Opaque for ferry_group {
    type Value = Group;
    const NAME: &'static str = "ferry_group";
    const MAGIC: u64 = u64::from_le_bytes(*b"ferry/gr");
}

/// Options of a simulated group: ranks without GPUs, all in this process.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ferry_simulator {
    /// sizeof(ferry_simulator).
    pub size: usize,
    /// Seed of every random choice of the simulation.
    pub seed: u64,
    /// Time that ranks wait for a rank that launches nothing, in nanoseconds of wall time, before their
    /// deadline passes. 0: as long as the deadline.
    pub patience_ns: u64,
    /// Number of ranks, 1 to 64.
    pub ranks: u32,
    /// Must be 0.
    pub reserved: u32,
}
sized!(ferry_simulator, 32);

/// Makes a group of simulated ranks in this process. The simulation runs while some thread waits in
/// ferry_synchronize or ferry_device_synchronize, and only until that rank is done: wait for each rank. One
/// thread may drive all ranks: enqueue on all of them, then wait for each. Available in every build. Not
/// collective. Does not synchronise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_group_simulated(
    options: *const ferry_simulator,
    group: *mut *mut ferry_group,
) -> ferry_status {
    guard("ferry_group_simulated", || {
        let simulated = || {
            // SAFETY: the rule of pointers.
            let given = unsafe { read(options, "options")? };
            require_ranks("options->ranks", given.ranks)?;
            if given.reserved != 0 {
                let rule = "it must be 0";
                return Err(Failure::value("options->reserved", given.reserved, rule));
            }
            let mut options = SimulatorOptions::new(given.ranks, given.seed);
            if given.patience_ns != 0 {
                options.patience = Some(Duration::from_nanos(given.patience_ns));
            }
            Ok(Group::simulated_with(options)?)
        };
        // SAFETY: the rule of pointers.
        unsafe { make(group, "group", simulated) }
    })
}

/// Makes a group of `count` GPUs driven by this process, over peer access: rank r is `devices[r]`, a CUDA
/// device number. Needs the feature cuda. Not collective. Synchronises the devices.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_group_local(
    devices: *const i32,
    count: usize,
    group: *mut *mut ferry_group,
) -> ferry_status {
    guard("ferry_group_local", || {
        // SAFETY: the rule of pointers.
        unsafe { make_local(devices, count, ptr::null(), group) }
    })
}

/// Same as ferry_group_local, with `options` (NULL: the default). Not collective. Synchronises the devices.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_group_local_with(
    devices: *const i32,
    count: usize,
    options: *const ferry_group_options,
    group: *mut *mut ferry_group,
) -> ferry_status {
    guard("ferry_group_local_with", || {
        // SAFETY: the rules of pointers and handles.
        unsafe { make_local(devices, count, options, group) }
    })
}

/// Joins a group with one process per GPU, all on one node, over peer access. Needs the feature cuda, and no
/// library but the driver. `device` is a CUDA device number of this process. Setup is all-or-nothing: if one
/// rank fails, it returns the cause, and every other rank returns an error that names it. Collective.
/// Synchronises.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_group_node(
    bootstrap: *const ferry_bootstrap,
    device: i32,
    group: *mut *mut ferry_group,
) -> ferry_status {
    guard("ferry_group_node", || {
        // SAFETY: the rule of pointers.
        unsafe { make_node(bootstrap, device, ptr::null(), group) }
    })
}

/// Same as ferry_group_node, with `options` (NULL: the default). Collective. Synchronises.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_group_node_with(
    bootstrap: *const ferry_bootstrap,
    device: i32,
    options: *const ferry_group_options,
    group: *mut *mut ferry_group,
) -> ferry_status {
    guard("ferry_group_node_with", || {
        // SAFETY: the rules of pointers and handles.
        unsafe { make_node(bootstrap, device, options, group) }
    })
}

/// Joins a group with one process per GPU, on one or more nodes, over NVLink and NVSHMEM. Needs the feature
/// nvshmem. `library` is the path of libnvshmem_host.so.3, or NULL to search the loader's usual places. A
/// process can be in one such group at a time. Collective. Synchronises.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_group_nvshmem(
    bootstrap: *const ferry_bootstrap,
    device: i32,
    library: *const c_char,
    group: *mut *mut ferry_group,
) -> ferry_status {
    guard("ferry_group_nvshmem", || {
        // SAFETY: the rule of pointers.
        unsafe { make_nvshmem(bootstrap, device, library, ptr::null(), group) }
    })
}

/// Same as ferry_group_nvshmem, with `options` (NULL: the default). Kernels in `options` must be linked with
/// NVSHMEM's device code, as Ferry's are. Collective. Synchronises.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_group_nvshmem_with(
    bootstrap: *const ferry_bootstrap,
    device: i32,
    library: *const c_char,
    options: *const ferry_group_options,
    group: *mut *mut ferry_group,
) -> ferry_status {
    guard("ferry_group_nvshmem_with", || {
        // SAFETY: the rules of pointers and handles.
        unsafe { make_nvshmem(bootstrap, device, library, options, group) }
    })
}

/// Stores the number of ranks in the whole group. Not collective. Does not synchronise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_group_ranks(
    group: *const ferry_group,
    ranks: *mut u32,
) -> ferry_status {
    guard("ferry_group_ranks", || {
        // SAFETY: the rule of handles.
        let group = unsafe { get(group, "group")? };
        // SAFETY: the rule of pointers.
        unsafe { store(ranks, "ranks", group.ranks()) }
    })
}

/// Stores the number of ranks that this process drives in `count`, and the ranks, in ascending order, in
/// `ranks`, an array of `room` elements, or NULL for the count alone. Fails if `room` is less than `count`.
/// Not collective. Does not synchronise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_group_local_ranks(
    group: *const ferry_group,
    ranks: *mut u32,
    room: usize,
    count: *mut usize,
) -> ferry_status {
    guard("ferry_group_local_ranks", || {
        // SAFETY: the rule of handles.
        let local = unsafe { get(group, "group")? }.local_ranks();
        // SAFETY: the rule of pointers.
        unsafe { store(count, "count", local.len())? };
        if ranks.is_null() {
            return Ok(());
        }
        if room < local.len() {
            let rule = format!("this process drives {} ranks", local.len());
            return Err(Failure::value("room", room, &rule));
        }
        for (index, rank) in local.into_iter().enumerate() {
            // SAFETY: the rule of pointers: `ranks` has `room` elements.
            unsafe { store(ranks.add(index), "ranks", rank.0)? };
        }
        Ok(())
    })
}

/// Leaves the group and sets `*group` to NULL. Close its communicators and free its graphs first: while any
/// exists, this returns FERRY_IN_USE, does nothing, and `*group` is unchanged. A group of several processes
/// waits for kernels that dropped communicators left running. After any other failure the group was left as
/// far as possible, and `*group` is NULL. Collective. Synchronises.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_group_close(group: *mut *mut ferry_group) -> ferry_status {
    guard("ferry_group_close", || {
        // SAFETY: the rules of pointers and handles.
        let closed = unsafe { get(read_place(group)?, "*group")? }.close();
        if let Err(ferry::Error::CommunicatorsOpen { .. }) = closed {
            return Ok(closed?);
        }
        // SAFETY: the rules of pointers and handles.
        drop(unsafe { take(group, "*group")? });
        Ok(closed?)
    })
}

/// Frees the handle without leaving the group and sets `*group` to NULL, for a process that cannot wait for
/// the others. Communicators and graphs stay, and running work goes on. Not collective. Does not synchronise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_group_drop(group: *mut *mut ferry_group) -> ferry_status {
    guard("ferry_group_drop", || {
        // SAFETY: the rules of pointers and handles.
        unsafe { take(group, "*group") }.map(drop)
    })
}

/// Reads the handle at a place.
///
/// # Safety
/// The rule of pointers.
pub(crate) unsafe fn read_place<T>(place: *mut *mut T) -> Result<*mut T, Failure> {
    crate::handle::require(place, "the address of the handle")?;
    // SAFETY: the rule of pointers.
    Ok(unsafe { place.read() })
}

/// Converts a CUDA device number, an int in C.
fn device_number(name: &str, number: i32) -> Result<usize, Failure> {
    usize::try_from(number)
        .map_err(|_| Failure::value(name, number, "a device number is at least 0"))
}

/// # Safety
/// The rules of pointers and handles.
unsafe fn make_local(
    devices: *const i32,
    count: usize,
    options: *const ferry_group_options,
    group: *mut *mut ferry_group,
) -> Result<(), Failure> {
    // SAFETY: the rules of pointers and handles.
    unsafe {
        make(group, "group", || {
            let given = ferry_group_options::read(options)?;
            let devices = values(devices, "devices", count)?
                .iter()
                .map(|&number| device_number("devices", number))
                .collect::<Result<Vec<_>, _>>()?;
            local(&devices, &given)
        })
    }
}

/// # Safety
/// The rules of pointers and handles; the bootstrap's `all_gather` keeps what `ferry_all_gather` documents.
unsafe fn make_node(
    bootstrap: *const ferry_bootstrap,
    device: i32,
    options: *const ferry_group_options,
    group: *mut *mut ferry_group,
) -> Result<(), Failure> {
    // SAFETY: the rules of pointers and handles; `all_gather` keeps what `ferry_all_gather` documents.
    unsafe {
        make(group, "group", || {
            let given = ferry_group_options::read(options)?;
            node(bootstrap, device_number("device", device)?, &given)
        })
    }
}

/// # Safety
/// As [`make_node`].
unsafe fn make_nvshmem(
    bootstrap: *const ferry_bootstrap,
    device: i32,
    library: *const c_char,
    options: *const ferry_group_options,
    group: *mut *mut ferry_group,
) -> Result<(), Failure> {
    // SAFETY: the rules of pointers and handles; `all_gather` keeps what `ferry_all_gather` documents.
    unsafe {
        make(group, "group", || {
            let given = ferry_group_options::read(options)?;
            let device = device_number("device", device)?;
            nvshmem(bootstrap, device, library, &given)
        })
    }
}

#[cfg(feature = "cuda")]
fn local(devices: &[usize], given: &Given<'_>) -> Result<Group, Failure> {
    Ok(Group::local(devices, &given.options())?)
}

#[cfg(not(feature = "cuda"))]
fn local(_: &[usize], _: &Given<'_>) -> Result<Group, Failure> {
    Err(Failure::not_built("cuda"))
}

/// # Safety
/// As [`open`].
#[cfg(feature = "cuda")]
unsafe fn node(
    bootstrap: *const ferry_bootstrap,
    device: usize,
    given: &Given<'_>,
) -> Result<Group, Failure> {
    // SAFETY: the promises of `open`, which this function asks for as well.
    let bootstrap = unsafe { open(bootstrap)? };
    Ok(Group::node(bootstrap, device, &given.options())?)
}

/// # Safety
/// Nothing is required: no pointer is read through.
#[cfg(not(feature = "cuda"))]
unsafe fn node(_: *const ferry_bootstrap, _: usize, _: &Given<'_>) -> Result<Group, Failure> {
    Err(Failure::not_built("cuda"))
}

/// # Safety
/// As [`open`], and the rule of pointers for `library`.
#[cfg(feature = "nvshmem")]
unsafe fn nvshmem(
    bootstrap: *const ferry_bootstrap,
    device: usize,
    library: *const c_char,
    given: &Given<'_>,
) -> Result<Group, Failure> {
    use std::ffi::{CStr, OsStr};
    use std::os::unix::ffi::OsStrExt as _;

    let library = if library.is_null() {
        None
    } else {
        // SAFETY: the rule of pointers: a text ends with a zero byte.
        let path = unsafe { CStr::from_ptr(library) };
        Some(OsStr::from_bytes(path.to_bytes()).into())
    };
    // SAFETY: the promises of `open`, which this function asks for as well.
    let bootstrap = unsafe { open(bootstrap)? };
    let options = ferry::GroupOptions {
        nvshmem_library: library,
        ..given.options()
    };
    Ok(Group::nvshmem(bootstrap, device, &options)?)
}

/// # Safety
/// Nothing is required: no pointer is read through.
#[cfg(not(feature = "nvshmem"))]
unsafe fn nvshmem(
    _: *const ferry_bootstrap,
    _: usize,
    _: *const c_char,
    _: &Given<'_>,
) -> Result<Group, Failure> {
    Err(Failure::not_built("nvshmem"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::{ferry_last_error, ferry_status::FERRY_INVALID_ARGUMENT};

    #[test]
    fn a_simulator_with_too_many_ranks_or_a_reserved_field_is_refused() {
        let said = |ranks, reserved| {
            let options = ferry_simulator {
                size: size_of::<ferry_simulator>(),
                seed: 1,
                patience_ns: 0,
                ranks,
                reserved,
            };
            let mut group = ptr::null_mut();
            // SAFETY: both live.
            let status = unsafe { ferry_group_simulated(&options, &mut group) };
            assert_eq!(status, FERRY_INVALID_ARGUMENT);
            assert!(group.is_null());
            // SAFETY: the text lives until this thread's next call.
            let text = unsafe { std::ffi::CStr::from_ptr(ferry_last_error()) };
            text.to_string_lossy().into_owned()
        };
        let text = said(u32::MAX, 0);
        assert!(text.contains("options->ranks is 4294967295"), "{text}");
        let text = said(65, 0);
        assert!(
            text.contains("options->ranks is 65: no group has more than 64"),
            "{text}"
        );
        let text = said(2, 7);
        assert!(text.contains("options->reserved is 7"), "{text}");
    }
}
