//! NCCL, loaded at run time: all-gather and reduce-scatter of the same tokens.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr;

use anyhow::{Context, Result, bail};
use ferry::{Device, DevicePtr, Stream};
use libloading::{Library, Symbol};

use super::rig::{Gpu, Repeats, Rig, Stage, Timed};

const LIBRARY: &str = "libnccl.so.2";
/// `ncclBfloat16` (nccl.h).
const BF16: c_int = 9;
/// `ncclSum` (nccl.h).
const SUM: c_int = 0;
/// Calls of each size before it is timed: the first one sets connections up.
const UNTIMED: usize = 3;

/// A communicator's handle.
type Comm = *mut c_void;
type CommInitAll = unsafe extern "C" fn(*mut Comm, c_int, *const c_int) -> c_int;
type CommInitRank = unsafe extern "C" fn(*mut Comm, c_int, UniqueId, c_int) -> c_int;
type GetUniqueId = unsafe extern "C" fn(*mut UniqueId) -> c_int;
type CommDestroy = unsafe extern "C" fn(Comm) -> c_int;
type GetVersion = unsafe extern "C" fn(*mut c_int) -> c_int;
type GetErrorString = unsafe extern "C" fn(c_int) -> *const c_char;
type Group = unsafe extern "C" fn() -> c_int;
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

/// `ncclUniqueId` (nccl.h): the name of a communicator that spans processes.
#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([u8; 128]);

/// NCCL with a communicator for each GPU of this process, and buffers.
pub struct Nccl<'a> {
    rig: &'a Rig<'a>,
    library: Library,
    comms: Vec<SendComm>,
    /// By rank of this process: one rank's tokens, and those of all.
    buffers: Vec<(DevicePtr, DevicePtr)>,
    hidden: usize,
}

/// A communicator, used by one thread at a time.
#[derive(Clone, Copy)]
struct SendComm(Comm);

// SAFETY: NCCL's communicators may be used from any thread, by one at a time.
unsafe impl Send for SendComm {}

/// NCCL's functions that are called again and again.
#[derive(Clone, Copy)]
struct Calls {
    all_gather: AllGather,
    reduce_scatter: ReduceScatter,
    error: GetErrorString,
}

impl Calls {
    fn check(self, call: &str, code: c_int) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: gives a static string for any code.
        let text = unsafe { CStr::from_ptr((self.error)(code)) };
        bail!("{call}: {} ({code})", text.to_string_lossy())
    }
}

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
    /// Makes communicators, and buffers for `tokens` tokens a rank. Collective.
    pub fn new(rig: &'a Rig<'a>, library: Library, tokens: usize, hidden: usize) -> Result<Self> {
        let mut buffers = Vec::new();
        for gpu in &rig.gpus {
            let bytes = (tokens * hidden * 2) as u64;
            let pair = (
                gpu.device.alloc(bytes)?,
                gpu.device.alloc(bytes * rig.ranks() as u64)?,
            );
            // 2^-127 or so: sums stay finite.
            gpu.device.fill(pair.0, 0x01, bytes)?;
            gpu.device.fill(pair.1, 0x01, bytes * rig.ranks() as u64)?;
            buffers.push(pair);
        }
        let mut nccl = Self {
            rig,
            library,
            comms: Vec::new(),
            buffers,
            hidden,
        };
        let comms = match rig.gpus.len() == rig.ranks() {
            true => nccl.init_all(),
            false => nccl.init_own(),
        };
        // The calls of those that have one would wait for those that have not.
        let comms = rig.processes.agree(comms)?;
        nccl.comms = comms.into_iter().map(SendComm).collect();
        Ok(nccl)
    }

    /// One process has all ranks.
    fn init_all(&self) -> Result<Vec<Comm>> {
        let devices: Vec<c_int> = self
            .rig
            .gpus
            .iter()
            .map(|gpu| gpu.device.ordinal() as c_int)
            .collect();
        let mut comms = vec![ptr::null_mut(); devices.len()];
        let init: Symbol<CommInitAll> = self.symbol("ncclCommInitAll")?;
        // SAFETY: both arrays have as many entries as is said.
        let code = unsafe { init(comms.as_mut_ptr(), devices.len() as c_int, devices.as_ptr()) };
        self.calls()?.check("ncclCommInitAll", code)?;
        Ok(comms)
    }

    /// Every process has some of the ranks; the first process names the communicator.
    fn init_own(&self) -> Result<Vec<Comm>> {
        let processes = self.rig.processes;
        let name = match processes.is_first() {
            true => self.unique_id().map(|id| id.0.to_vec()),
            false => Ok(Vec::new()),
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
        Ok(format!(
            "{}.{}.{}",
            version / 10_000,
            version / 100 % 100,
            version % 100
        ))
    }

    fn symbol<T>(&self, name: &str) -> Result<Symbol<'_, T>> {
        // SAFETY: the types above are those of nccl.h.
        unsafe { self.library.get(name) }.with_context(|| format!("NCCL has no {name}"))
    }

    fn calls(&self) -> Result<Calls> {
        Ok(Calls {
            all_gather: *self.symbol("ncclAllGather")?,
            reduce_scatter: *self.symbol("ncclReduceScatter")?,
            error: *self.symbol("ncclGetErrorString")?,
        })
    }

    /// All-gather and reduce-scatter of `tokens` tokens a rank, in BF16.
    pub fn time(&self, repeats: Repeats, tokens: usize) -> Result<[Timed; 2]> {
        let calls = self.calls()?;
        let start: Symbol<Group> = self.symbol("ncclGroupStart")?;
        let end: Symbol<Group> = self.symbol("ncclGroupEnd")?;
        let rank = |index: usize| Rank {
            calls,
            comm: self.comms[index],
            buffers: self.buffers[index],
            stream: self.rig.gpus[index].stream,
            elements: tokens * self.hidden,
        };
        for _ in 0..UNTIMED {
            for stage in 0..2 {
                // SAFETY: takes nothing.
                calls.check("ncclGroupStart", unsafe { start() })?;
                (0..self.comms.len()).try_for_each(|index| rank(index).enqueue(stage))?;
                // SAFETY: as above.
                calls.check("ncclGroupEnd", unsafe { end() })?;
            }
        }
        for gpu in &self.rig.gpus {
            gpu.device.synchronize(gpu.stream)?;
        }
        let each = (0..self.comms.len()).map(|index| {
            let rank = rank(index);
            move |stage: usize, _iteration: u32| rank.enqueue(stage)
        });
        let mut timed = self
            .rig
            .time(repeats, &[Stage::Aligned; 2], each.collect())?
            .into_iter();
        Ok([(); 2].map(|()| timed.next().unwrap_or_default()))
    }

    /// Frees everything, once no process has failed. Collective.
    pub fn close(self) -> Result<()> {
        self.rig.processes.meet()?;
        let destroy: Symbol<CommDestroy> = self.symbol("ncclCommDestroy")?;
        for comm in &self.comms {
            // SAFETY: nothing uses the communicator any more.
            let code = unsafe { destroy(comm.0) };
            self.calls()?.check("ncclCommDestroy", code)?;
        }
        for (gpu, &(own, all)) in self.rig.gpus.iter().zip(&self.buffers) {
            // SAFETY: all of the communicators have gone, after the streams were synchronised.
            unsafe {
                gpu.device.free(own)?;
                gpu.device.free(all)?;
            }
        }
        Ok(())
    }
}

/// A rank's side.
struct Rank {
    calls: Calls,
    comm: SendComm,
    buffers: (DevicePtr, DevicePtr),
    stream: Stream,
    elements: usize,
}

impl Rank {
    /// All-gather for stage 0, else reduce-scatter.
    fn enqueue(&self, stage: usize) -> Result<()> {
        let (own, all) = self.buffers;
        let at =
            |address: DevicePtr| ptr::without_provenance_mut::<c_void>(address.address() as usize);
        let stream = ptr::without_provenance_mut(self.stream.handle() as usize);
        let Calls {
            all_gather,
            reduce_scatter,
            ..
        } = self.calls;
        let comm = self.comm.0;
        // SAFETY: the buffers hold the elements of one rank and of all, on the communicator's
        // device, whose stream this is.
        let code = unsafe {
            if stage == 0 {
                all_gather(at(own), at(all), self.elements, BF16, comm, stream)
            } else {
                reduce_scatter(at(all), at(own), self.elements, BF16, SUM, comm, stream)
            }
        };
        self.calls.check("NCCL's collective", code)
    }
}
