//! NCCL, loaded at run time: all-gather and reduce-scatter.
//!
//! cudarc's binding would look for `libnccl.so`, which only NCCL's headers come with, and end the process if
//! it finds none.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr;

use anyhow::{Context, Result, bail};
use ferry::{Device, DevicePtr, Stream};
use libloading::{Library, Symbol};

use super::rig::{Gpu, Repeats, Rig, Stage, Timed};

const LIBRARY: &str = "libnccl.so.2";
/// `ncclInt8` (nccl.h): bytes that are only carried.
const BYTE: c_int = 0;
/// `ncclBfloat16` (nccl.h).
const BF16: c_int = 9;
/// `ncclSum` (nccl.h).
const SUM: c_int = 0;
/// Calls of each size before it is timed: the first one sets connections up.
const UNTIMED: usize = 3;

/// A communicator's handle.
type Handle = *mut c_void;
type CommInitAll = unsafe extern "C" fn(*mut Handle, c_int, *const c_int) -> c_int;
type CommInitRank = unsafe extern "C" fn(*mut Handle, c_int, UniqueId, c_int) -> c_int;
type GetUniqueId = unsafe extern "C" fn(*mut UniqueId) -> c_int;
type CommDestroy = unsafe extern "C" fn(Handle) -> c_int;
type GetVersion = unsafe extern "C" fn(*mut c_int) -> c_int;
type GetErrorString = unsafe extern "C" fn(c_int) -> *const c_char;
type Group = unsafe extern "C" fn() -> c_int;
type AllGather =
    unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, Handle, *mut c_void) -> c_int;
type ReduceScatter = unsafe extern "C" fn(
    *const c_void,
    *mut c_void,
    usize,
    c_int,
    c_int,
    Handle,
    *mut c_void,
) -> c_int;

/// `ncclUniqueId` (nccl.h): the name of a communicator that spans processes.
#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([u8; 128]);

/// NCCL with a communicator for each GPU of this process.
pub struct Nccl<'a> {
    rig: &'a Rig<'a>,
    library: Library,
    comms: Vec<Comm>,
}

/// NCCL's functions that are called again and again.
#[derive(Clone, Copy)]
struct Calls {
    start: Group,
    end: Group,
    all_gather: AllGather,
    reduce_scatter: ReduceScatter,
    error: GetErrorString,
}

impl Calls {
    fn check(self, call: &str, code: c_int) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: returns a static string for any code.
        let text = unsafe { CStr::from_ptr((self.error)(code)) };
        bail!("{call}: {} ({code})", text.to_string_lossy())
    }

    /// Lets all calls of `enqueue` go together.
    fn grouped(self, enqueue: impl FnOnce() -> Result<()>) -> Result<()> {
        // SAFETY: takes nothing.
        self.check("ncclGroupStart", unsafe { (self.start)() })?;
        enqueue()?;
        // SAFETY: takes nothing.
        self.check("ncclGroupEnd", unsafe { (self.end)() })
    }
}

/// One rank's communicator, used by one thread at a time. It lives as long as its [`Nccl`] is not closed.
#[derive(Clone, Copy)]
pub struct Comm {
    calls: Calls,
    handle: Handle,
}

// SAFETY: NCCL's communicators may be used from any thread, by one at a time.
unsafe impl Send for Comm {}

impl Comm {
    /// Lets all calls of `enqueue` go together.
    #[cfg(feature = "cudarc")]
    pub fn grouped(self, enqueue: impl FnOnce() -> Result<()>) -> Result<()> {
        self.calls.grouped(enqueue)
    }

    /// Enqueues an all-gather of as many bytes of each rank as `own` has. Collective.
    ///
    /// # Safety
    /// `all` has the bytes of `own` for every rank, of this rank's device, whose stream it is; nothing else
    /// uses either until the stream has passed the call.
    pub unsafe fn all_gather(self, own: DevicePtr, all: DevicePtr, stream: Stream) -> Result<()> {
        let (from, to, bytes) = (at(own), at(all), own.bytes() as usize);
        // SAFETY: the memory has so many bytes, by this function's contract; the communicator lives.
        let code =
            unsafe { (self.calls.all_gather)(from, to, bytes, BYTE, self.handle, raw(stream)) };
        self.calls.check("ncclAllGather", code)
    }

    /// Enqueues a reduce-scatter: `own` gets this rank's part of the sums of all ranks' `all`, in BF16.
    /// Collective.
    ///
    /// # Safety
    /// As [`all_gather`](Self::all_gather).
    pub unsafe fn reduce_scatter(
        self,
        all: DevicePtr,
        own: DevicePtr,
        stream: Stream,
    ) -> Result<()> {
        let (from, to, elements) = (at(all), at(own), own.bytes() as usize / 2);
        let (call, comm) = (self.calls.reduce_scatter, self.handle);
        // SAFETY: as in `all_gather`.
        let code = unsafe { call(from, to, elements, BF16, SUM, comm, raw(stream)) };
        self.calls.check("ncclReduceScatter", code)
    }
}

fn at(address: DevicePtr) -> *mut c_void {
    ptr::without_provenance_mut(address.address() as usize)
}

fn raw(stream: Stream) -> *mut c_void {
    ptr::without_provenance_mut(stream.handle() as usize)
}

/// Returns NCCL, or why there is none. Collective.
pub fn open<'a>(rig: &'a Rig<'a>, given: Option<&Path>) -> Result<Result<Nccl<'a>, String>> {
    if rig.ranks_per_gpu > 1 {
        return Ok(Err("it refuses two ranks on a GPU".into()));
    }
    let library = load(given);
    // Those that have it would wait for those that have not.
    let missing = library.as_ref().err().map(|error| format!("{error:#}"));
    let missing = rig
        .processes
        .share(Ok(missing.unwrap_or_default().into()))?;
    if let Some(reason) = missing.iter().find(|reason| !reason.is_empty()) {
        let reason = String::from_utf8_lossy(reason);
        return Ok(Err(format!("there is none ({reason})")));
    }
    Ok(Ok(Nccl::new(rig, library?)?))
}

/// The library: as given, or the first that loads.
fn load(given: Option<&Path>) -> Result<Library> {
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

/// Paths that Python's package of NCCL may have.
fn python_packages() -> Vec<PathBuf> {
    const ASK: &str = "import site, sys; print('\\n'.join(site.getsitepackages() + \
        [site.getusersitepackages()] + [p for p in sys.path if p.endswith('-packages')]))";
    let Ok(output) = Command::new("python3").args(["-c", ASK]).output() else {
        return Vec::new();
    };
    let folders = String::from_utf8_lossy(&output.stdout).into_owned();
    let paths = folders
        .lines()
        .map(|folder| Path::new(folder).join("nvidia/nccl/lib").join(LIBRARY));
    paths.filter(|path| path.is_file()).collect()
}

impl<'a> Nccl<'a> {
    /// Makes communicators. Collective.
    fn new(rig: &'a Rig<'a>, library: Library) -> Result<Self> {
        let mut nccl = Self {
            rig,
            library,
            comms: Vec::new(),
        };
        let handles = if rig.gpus.len() == rig.ranks() {
            nccl.init_all()
        } else {
            nccl.init_own()
        };
        // The calls of those that have one would wait for those that have not.
        let handles = rig.processes.agree(handles)?;
        let calls = nccl.calls()?;
        let comm = |handle| Comm { calls, handle };
        nccl.comms = handles.into_iter().map(comm).collect();
        Ok(nccl)
    }

    /// One for each rank of this process.
    #[cfg(feature = "cudarc")]
    pub fn comms(&self) -> &[Comm] {
        &self.comms
    }

    /// One process has all ranks.
    fn init_all(&self) -> Result<Vec<Handle>> {
        let gpus = self.rig.gpus.iter();
        let devices: Vec<c_int> = gpus.map(|gpu| gpu.device.ordinal() as c_int).collect();
        let mut comms = vec![ptr::null_mut(); devices.len()];
        let init: Symbol<CommInitAll> = self.symbol("ncclCommInitAll")?;
        // SAFETY: both arrays have as many entries as is said.
        let code = unsafe { init(comms.as_mut_ptr(), devices.len() as c_int, devices.as_ptr()) };
        self.calls()?.check("ncclCommInitAll", code)?;
        Ok(comms)
    }

    /// Every process has some of the ranks; the first process names the communicator.
    fn init_own(&self) -> Result<Vec<Handle>> {
        let processes = self.rig.processes;
        let name = if processes.is_first() {
            self.unique_id().map(|id| id.0.to_vec())
        } else {
            Ok(Vec::new())
        };
        let name = processes.share(name)?.swap_remove(0);
        let size = name.len();
        let id = name.try_into().ok().map(UniqueId);
        let id = id.with_context(|| format!("the communicator's name has {size} bytes"))?;
        let init: Symbol<CommInitRank> = self.symbol("ncclCommInitRank")?;
        let of_rank = |gpu: &Gpu| {
            let (mut comm, ranks) = (ptr::null_mut(), self.rig.ranks() as c_int);
            // NCCL takes the current device.
            let _current = gpu.device.enter()?;
            // SAFETY: `comm` is a live pointer; the rank is below the number of ranks.
            let code = unsafe { init(&mut comm, ranks, id, gpu.rank as c_int) };
            self.calls()?.check("ncclCommInitRank", code)?;
            Ok(comm)
        };
        self.rig.gpus.iter().map(of_rank).collect()
    }

    fn unique_id(&self) -> Result<UniqueId> {
        let get: Symbol<GetUniqueId> = self.symbol("ncclGetUniqueId")?;
        let mut id = UniqueId([0; 128]);
        // SAFETY: `id` is live, and of the size that nccl.h says.
        let code = unsafe { get(&mut id) };
        self.calls()?.check("ncclGetUniqueId", code)?;
        Ok(id)
    }

    /// "2.28.3".
    pub fn version(&self) -> Result<String> {
        let get: Symbol<GetVersion> = self.symbol("ncclGetVersion")?;
        let mut version = 0;
        // SAFETY: `version` is a live integer.
        let code = unsafe { get(&mut version) };
        self.calls()?.check("ncclGetVersion", code)?;
        let (major, minor) = (version / 10_000, version / 100 % 100);
        Ok(format!("{major}.{minor}.{}", version % 100))
    }

    fn symbol<T>(&self, name: &str) -> Result<Symbol<'_, T>> {
        // SAFETY: the types above are those of nccl.h.
        unsafe { self.library.get(name) }.with_context(|| format!("NCCL has no {name}"))
    }

    fn calls(&self) -> Result<Calls> {
        Ok(Calls {
            start: *self.symbol("ncclGroupStart")?,
            end: *self.symbol("ncclGroupEnd")?,
            all_gather: *self.symbol("ncclAllGather")?,
            reduce_scatter: *self.symbol("ncclReduceScatter")?,
            error: *self.symbol("ncclGetErrorString")?,
        })
    }

    /// Times all-gather and reduce-scatter of `tokens` tokens a rank, in BF16. Collective.
    pub fn time(&self, repeats: Repeats, tokens: usize, hidden: usize) -> Result<[Timed; 2]> {
        let bytes = (tokens * hidden * 2) as u64;
        let (mut ranks, mut memory) = (Vec::new(), Vec::new());
        for (gpu, &comm) in self.rig.gpus.iter().zip(&self.comms) {
            let own = filled(gpu, bytes)?;
            let all = filled(gpu, bytes * self.rig.ranks() as u64)?;
            let stream = gpu.stream;
            ranks.push(move |stage: usize, _iteration: u32| {
                // SAFETY: `all` has the bytes of `own` for every rank, of the GPU that has the stream.
                unsafe {
                    if stage == 0 {
                        comm.all_gather(own, all, stream)
                    } else {
                        comm.reduce_scatter(all, own, stream)
                    }
                }
            });
            memory.push((gpu, [own, all]));
        }
        for _ in 0..UNTIMED {
            for stage in 0..2 {
                let mut enqueue = ranks.iter_mut();
                self.calls()?
                    .grouped(|| enqueue.try_for_each(|rank| rank(stage, 0)))?;
            }
        }
        for gpu in &self.rig.gpus {
            gpu.device.synchronize(gpu.stream)?;
        }
        let timed = self.rig.time(repeats, &[Stage::Aligned; 2], ranks)?;
        for (gpu, at) in memory
            .into_iter()
            .flat_map(|(gpu, both)| both.map(|at| (gpu, at)))
        {
            // SAFETY: all processes have waited for what was timed, and nothing more is enqueued.
            unsafe { gpu.device.free(at) }?;
        }
        let mut timed = timed.into_iter();
        Ok([(); 2].map(|()| timed.next().unwrap_or_default()))
    }

    /// Frees everything, once no process has failed. Collective.
    pub fn close(self) -> Result<()> {
        self.rig.processes.meet()?;
        let destroy: Symbol<CommDestroy> = self.symbol("ncclCommDestroy")?;
        for comm in &self.comms {
            // SAFETY: nothing uses the communicator any more.
            let code = unsafe { destroy(comm.handle) };
            comm.calls.check("ncclCommDestroy", code)?;
        }
        Ok(())
    }
}

/// Memory full of 2^-127 or so: sums stay finite.
fn filled(gpu: &Gpu, bytes: u64) -> Result<DevicePtr> {
    let at = gpu.device.alloc(bytes)?;
    gpu.device.fill(at, 0x01, bytes)?;
    Ok(at)
}
