//! How the processes of a group find each other.

use std::ffi::{c_char, c_int, c_void};

use ferry::layout::MAX_RANKS;

use crate::status::Failure;
use crate::structs::sized;

#[cfg(any(feature = "cuda", test))]
mod gather;
#[cfg(any(feature = "cuda", test))]
mod open;

#[cfg(feature = "cuda")]
pub(crate) use open::open;

/// That a group may have so many ranks, which `name` says.
pub(crate) fn require_ranks(name: &str, ranks: u32) -> Result<(), Failure> {
    if ranks <= MAX_RANKS {
        return Ok(());
    }
    let rule = format!("no group has more than {MAX_RANKS} ranks");
    Err(Failure::value(name, ranks, &rule))
}

/// An all-gather of yours: `all` has room for `ranks * bytes` bytes, and gets every rank's `bytes`
/// bytes, by rank, this one's (`mine`) among them. All ranks give the same `bytes`: MPI_Allgather
/// and its like fit. Returns 0, or any other number for a failure, which the call of Ferry reports;
/// the function is not called again then. It returns once all ranks have called it, and bounds its
/// wait. Ferry calls it from the thread that calls Ferry, one call at a time. It calls nothing of
/// the group itself, gives no handle back, and throws nothing.
pub type ferry_all_gather = Option<
    unsafe extern "C" fn(
        context: *mut c_void,
        mine: *const c_void,
        bytes: usize,
        all: *mut c_void,
    ) -> c_int,
>;

/// How the processes of a group find each other: over TCP, or through an all-gather of yours. Give
/// one of `address` and `all_gather`. The group uses it until it was closed or dropped, in these
/// calls: making the group, making and closing communicators, closing the group. No dispatch and no
/// combine uses it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ferry_bootstrap {
    /// sizeof(ferry_bootstrap).
    pub size: usize,
    /// This process.
    pub rank: u32,
    /// Processes of the group, 1 to 64.
    pub ranks: u32,
    /// "host:port" where rank 0 listens and the others connect, copied. The host is an IP address,
    /// or a name that all ranks, rank 0 too, resolve to the same address of rank 0. Whoever can
    /// connect can take a rank's place: use it where that is as it should be, or give a `key`.
    pub address: *const c_char,
    /// Longest wait over TCP, in nanoseconds. 0: 60 seconds.
    pub timeout_ns: u64,
    /// Your all-gather.
    pub all_gather: ferry_all_gather,
    /// What it is called with. Lives until the group and its communicators were closed or dropped.
    pub context: *mut c_void,
    /// With `address`: `key_bytes` bytes that nobody but the ranks knows, the same on all of them;
    /// not kept. 32 random ones are plenty. NULL: none. Rank 0 and each other rank prove to each
    /// other that they have the key, as they meet. Who cannot is sent away, and the others go on; a
    /// rank without a key, or with another one than rank 0's, gets FERRY_PEER. That is all: messages
    /// are neither encrypted nor authenticated one by one.
    pub key: *const c_void,
    /// At least 1 where there is a key.
    pub key_bytes: usize,
}
sized!(ferry_bootstrap, 48);
