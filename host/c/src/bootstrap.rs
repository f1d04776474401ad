//! Bootstraps of groups of several processes.

use std::ffi::{c_char, c_int, c_void};

use ferry::layout::MAX_RANKS;

use crate::status::Failure;
use crate::structs::sized;

#[cfg(any(feature = "cuda", test))]
mod gather;
#[cfg(any(feature = "cuda", test))]
pub(crate) mod open;

/// Refuses more ranks than a group may have; `name` is the field that gives them.
pub(crate) fn require_ranks(name: &str, ranks: u32) -> Result<(), Failure> {
    if ranks <= MAX_RANKS {
        return Ok(());
    }
    let rule = format!("no group has more than {MAX_RANKS} ranks");
    Err(Failure::value(name, ranks, &rule))
}

/// All-gather supplied by the caller, such as a wrapper of MPI_Allgather. It stores the `bytes` bytes of
/// every rank in `all`, in rank order, including this rank's (`mine`); `all` has room for `ranks * bytes`
/// bytes. `bytes` is the same on all ranks. It returns 0, or another number on failure; Ferry's call then
/// reports that number, and the function is not called again. It returns once all ranks have called it,
/// and must bound its wait. Ferry calls it from the thread that calls Ferry, one call at a time. It must
/// not use the group, free a handle, or throw.
pub type ferry_all_gather = Option<
    unsafe extern "C" fn(
        context: *mut c_void,
        mine: *const c_void,
        bytes: usize,
        all: *mut c_void,
    ) -> c_int,
>;

/// Way for the processes of a group to find each other: over TCP, or through your own all-gather. Set
/// either `address` or `all_gather`. The group uses it until it is closed or dropped, in these calls:
/// making the group, making and closing communicators, closing the group. Dispatch and combine never
/// use it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ferry_bootstrap {
    /// sizeof(ferry_bootstrap).
    pub size: usize,
    /// Rank of this process.
    pub rank: u32,
    /// Number of processes in the group, 1 to 64.
    pub ranks: u32,
    /// "host:port" where rank 0 listens and the others connect; copied. The host is an IP address, or a
    /// name that all ranks, including rank 0, resolve to the same address of rank 0. Anyone who can connect
    /// can take a rank's place: use it only on a network where that is acceptable, or set a `key`.
    pub address: *const c_char,
    /// Longest wait over TCP, in nanoseconds. 0: 60 seconds.
    pub timeout_ns: u64,
    /// Your all-gather.
    pub all_gather: ferry_all_gather,
    /// First argument of `all_gather`. Must live until the group and its communicators are closed or dropped.
    pub context: *mut c_void,
    /// Secret of `key_bytes` bytes for a rendezvous at `address`, the same on all ranks; not kept. 32 random
    /// bytes are plenty. NULL: no key. Rank 0 and each other rank prove to each other that they have the key
    /// as they meet. A connection without that proof is closed, and the others go on; a rank without a key,
    /// or with a different one from rank 0's, gets FERRY_PEER. Later messages are neither encrypted nor
    /// authenticated.
    pub key: *const c_void,
    /// Length of the key, at least 1 if there is one.
    pub key_bytes: usize,
}
sized!(ferry_bootstrap, 48);
