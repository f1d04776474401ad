//! NCCL, loaded at run time: all-gather and reduce-scatter.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr;

use anyhow::{Context, Result, bail};
use libloading::{Library, Symbol};

const LIBRARY: &str = "libnccl.so.2";
/// `ncclInt8` (nccl.h): bytes that are only carried.
const BYTE: c_int = 0;
/// `ncclBfloat16` (nccl.h).
const BF16: c_int = 9;
/// `ncclSum` (nccl.h).
const SUM: c_int = 0;

type Comm = *mut c_void;
type CommInitAll = unsafe extern "C" fn(*mut Comm, c_int, *const c_int) -> c_int;
type Group = unsafe extern "C" fn() -> c_int;
type GetErrorString = unsafe extern "C" fn(c_int) -> *const c_char;
type AllGather =
    unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, Comm, *mut c_void) -> c_int;
type ReduceScatter = unsafe extern "C" fn(
    *const c_void,
    *mut c_void,
    usize,
    c_int,
    c_int,
    Comm,
    *mut c_void,
) -> c_int;

/// The library: as given, or the first that loads.
pub fn load(given: Option<&Path>) -> Result<Library> {
    let paths = match given {
        Some(path) => vec![path.to_owned()],
        None => [PathBuf::from(LIBRARY)]
            .into_iter()
            .chain(python_packages())
            .collect(),
    };
    let mut reasons = Vec::new();
    for path in &paths {
        // SAFETY: NCCL's constructors touch nothing of this program.
        match unsafe { Library::new(path) } {
            Ok(library) => return Ok(library),
            Err(error) => reasons.push(error.to_string()),
        }
    }
    bail!("{}", reasons.join("; "))
}

/// Where Python's package of NCCL may be.
fn python_packages() -> Vec<PathBuf> {
    const ASK: &str = "import site, sys; print('\\n'.join(site.getsitepackages() + \
        [p for p in sys.path if p.endswith('-packages')]))";
    let Ok(output) = Command::new("python3").args(["-c", ASK]).output() else {
        return Vec::new();
    };
    let folders = String::from_utf8_lossy(&output.stdout).into_owned();
    let paths = folders
        .lines()
        .map(|folder| Path::new(folder).join("nvidia/nccl/lib").join(LIBRARY));
    paths.filter(|path| path.is_file()).collect()
}

/// One rank's communicator.
pub struct Nccl {
    comm: Comm,
    start: Group,
    end: Group,
    all_gather: AllGather,
    reduce_scatter: ReduceScatter,
    error: GetErrorString,
}

// SAFETY: NCCL's communicators may be used from any thread, by one at a time.
unsafe impl Send for Nccl {}

impl Nccl {
    /// A communicator for each of the first `ranks` GPUs. The library stays loaded.
    pub fn all(library: Library, ranks: usize) -> Result<Vec<Self>> {
        let library: &'static Library = Box::leak(Box::new(library));
        let init: Symbol<CommInitAll> = symbol(library, "ncclCommInitAll")?;
        let error: GetErrorString = *symbol(library, "ncclGetErrorString")?;
        let (mut comms, devices) = (
            vec![ptr::null_mut(); ranks],
            (0..ranks as c_int).collect::<Vec<_>>(),
        );
        // SAFETY: both lists have as many entries as is said.
        let code = unsafe { init(comms.as_mut_ptr(), ranks as c_int, devices.as_ptr()) };
        check(error, "ncclCommInitAll", code)?;
        let of = |comm| {
            Ok(Self {
                comm,
                start: *symbol(library, "ncclGroupStart")?,
                end: *symbol(library, "ncclGroupEnd")?,
                all_gather: *symbol(library, "ncclAllGather")?,
                reduce_scatter: *symbol(library, "ncclReduceScatter")?,
                error,
            })
        };
        comms.into_iter().map(of).collect()
    }

    /// Enqueues all-gathers, together: of each, `bytes` bytes of this rank and the address for those of all.
    ///
    /// # Safety
    /// The addresses have so many bytes, of this rank's device, whose stream it is. Every rank does the same.
    pub unsafe fn all_gather(&self, of: &[(u64, u64, usize)], stream: *mut c_void) -> Result<()> {
        // SAFETY: takes nothing.
        check(self.error, "ncclGroupStart", unsafe { (self.start)() })?;
        for &(own, all, bytes) in of {
            // SAFETY: the caller's promise.
            let code =
                unsafe { (self.all_gather)(at(own), at(all), bytes, BYTE, self.comm, stream) };
            check(self.error, "ncclAllGather", code)?;
        }
        // SAFETY: as above.
        check(self.error, "ncclGroupEnd", unsafe { (self.end)() })
    }

    /// Enqueues a reduce-scatter of BF16: this rank's `elements` sums of all ranks' `all`.
    ///
    /// # Safety
    /// As [`all_gather`](Self::all_gather).
    pub unsafe fn reduce_scatter(
        &self,
        all: u64,
        own: u64,
        elements: usize,
        stream: *mut c_void,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        let code = unsafe {
            (self.reduce_scatter)(at(all), at(own), elements, BF16, SUM, self.comm, stream)
        };
        check(self.error, "ncclReduceScatter", code)
    }
}

fn at(address: u64) -> *mut c_void {
    ptr::without_provenance_mut(address as usize)
}

fn symbol<T>(library: &'static Library, name: &str) -> Result<Symbol<'static, T>> {
    // SAFETY: the types above are those of nccl.h.
    unsafe { library.get(name) }.with_context(|| format!("NCCL has no {name}"))
}

fn check(error: GetErrorString, call: &str, code: c_int) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    // SAFETY: gives a static string for any code.
    let text = unsafe { CStr::from_ptr(error(code)) };
    bail!("{call}: {} ({code})", text.to_string_lossy())
}
