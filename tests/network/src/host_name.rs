//! The name of this host, for NVSHMEM alone another one.
//!
//! NVSHMEM takes PEs for those of one node if their hosts have the same name. With a name for each node, one
//! machine is any number of them, with peer access inside each; the rest of the process, NCCL among it, sees
//! the machine as it is.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::ptr;
use std::env;

/// The variable with the name that NVSHMEM is told.
pub const VARIABLE: &str = "FERRY_NETWORK_HOST";

/// A part of the names of NVSHMEM's files.
const NVSHMEM: &[u8] = b"nvshmem";

/// Fields of `struct utsname`, of Linux.
#[repr(C)]
struct Names {
    system: [c_char; 65],
    node: [c_char; 65],
    others: [[c_char; 65]; 4],
}

/// The answer of `dladdr` about an address.
#[repr(C)]
struct Place {
    file: *const c_char,
    base: *mut c_void,
    symbol: *const c_char,
    address: *mut c_void,
}

unsafe extern "C" {
    fn uname(names: *mut Names) -> c_int;
    fn dladdr(address: *const c_void, place: *mut Place) -> c_int;
    fn _Unwind_Backtrace(
        each: extern "C" fn(*mut c_void, *mut c_void) -> c_int,
        data: *mut c_void,
    ) -> c_int;
    fn _Unwind_GetIP(frame: *mut c_void) -> usize;
}

/// Most frames from here to the caller of `gethostname`.
const MOST_FRAMES: usize = 8;
/// Goes on with the next frame.
const GO_ON: c_int = 0;
/// Ends a walk.
const END: c_int = 5;

/// Addresses of the frames above.
struct Frames {
    addresses: [usize; MOST_FRAMES],
    count: usize,
}

extern "C" fn note(frame: *mut c_void, data: *mut c_void) -> c_int {
    // SAFETY: `data` is the frames of `is_asked_by_nvshmem`, which nobody else has.
    let frames = unsafe { &mut *data.cast::<Frames>() };
    // SAFETY: the unwinder gives its own frame.
    frames.addresses[frames.count] = unsafe { _Unwind_GetIP(frame) };
    frames.count += 1;
    if frames.count < MOST_FRAMES {
        GO_ON
    } else {
        END
    }
}

/// The file that has an address.
fn file_of<'a>(address: usize) -> Option<&'a CStr> {
    let mut place = Place {
        file: ptr::null(),
        base: ptr::null_mut(),
        symbol: ptr::null(),
        address: ptr::null_mut(),
    };
    // SAFETY: `place` is a local variable of the function's type.
    let found = unsafe { dladdr(address as *const c_void, &raw mut place) };
    if found == 0 || place.file.is_null() {
        return None;
    }
    // SAFETY: the loader's name of a library that is loaded, as its code is on the stack.
    Some(unsafe { CStr::from_ptr(place.file) })
}

/// Whether the first frame above that is not of this library is one of NVSHMEM's.
fn is_asked_by_nvshmem() -> bool {
    let mut frames = Frames {
        addresses: [0; MOST_FRAMES],
        count: 0,
    };
    // SAFETY: `note` takes the frames, which outlive the walk.
    unsafe { _Unwind_Backtrace(note, (&raw mut frames).cast()) };
    let own = file_of(note as *const () as usize);
    let files = frames.addresses[..frames.count]
        .iter()
        .map(|address| file_of(*address));
    let mut above = files.skip_while(|file| *file == own).flatten();
    above.next().is_some_and(is_of_nvshmem)
}

fn is_of_nvshmem(file: &CStr) -> bool {
    let path = file.to_bytes();
    let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or(path);
    name.windows(NVSHMEM.len()).any(|part| part == NVSHMEM)
}

/// Writes a name with its zero, as much of it as there is room for.
///
/// # Safety
/// So many bytes can be written there.
unsafe fn write(name: &[u8], to: *mut c_char, length: usize) {
    if length == 0 {
        return;
    }
    let bytes = name.len().min(length - 1);
    // SAFETY: as the caller promises.
    unsafe {
        ptr::copy_nonoverlapping(name.as_ptr().cast(), to, bytes);
        *to.add(bytes) = 0;
    }
}

/// The C library's `gethostname`, except for NVSHMEM if [`VARIABLE`] is set.
///
/// # Safety
/// So many bytes can be written there.
pub unsafe fn get(to: *mut c_char, length: usize) -> c_int {
    if let Some(name) = env::var_os(VARIABLE).filter(|_| is_asked_by_nvshmem()) {
        // SAFETY: as the caller promises.
        unsafe { write(name.as_encoded_bytes(), to, length) };
        return 0;
    }
    let mut names = Names {
        system: [0; 65],
        node: [0; 65],
        others: [[0; 65]; 4],
    };
    // SAFETY: `names` has the fields that Linux writes.
    if unsafe { uname(&raw mut names) } != 0 {
        return -1;
    }
    // SAFETY: Linux ends the name with a zero.
    let node = unsafe { CStr::from_ptr(names.node.as_ptr()) };
    // SAFETY: as the caller promises.
    unsafe { write(node.to_bytes(), to, length) };
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn others_than_nvshmem_see_the_machine() {
        let mut name = [1 as c_char; 256];
        // SAFETY: there are 256 bytes.
        assert_eq!(unsafe { get(name.as_mut_ptr(), 256) }, 0);
        // SAFETY: it ends with a zero.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_str().unwrap();
        let expected = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
        assert_eq!(name, expected.trim());
        assert!(!is_asked_by_nvshmem());
    }

    #[test]
    fn nvshmem_is_known_by_its_files_and_a_name_is_cut_to_the_room() {
        assert!(is_of_nvshmem(c"lib/libnvshmem_host.so.3"));
        assert!(is_of_nvshmem(c"nvshmem_bootstrap_uid.so.3"));
        assert!(!is_of_nvshmem(c"/usr/nvshmem/libnccl.so.2"));
        let mut room = [7 as c_char; 4];
        // SAFETY: there are 4 bytes.
        unsafe { write(b"node0", room.as_mut_ptr(), 4) };
        assert_eq!(room, [b'n', b'o', b'd', 0].map(|byte| byte as c_char));
        // SAFETY: nothing is written.
        unsafe { write(b"node0", ptr::null_mut(), 0) };
    }
}
