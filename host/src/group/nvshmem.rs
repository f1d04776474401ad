//! One process per GPU, over NVLink inside a node and NVSHMEM between nodes.

use std::ffi::c_void;
use std::path::PathBuf;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ferry_layout::{Rank, Shape};
use nvshmem_sys::device::DEVICE_STATE;
use nvshmem_sys::{CallError, HostLibrary, LoadError, UniqueId, host::SONAME};

use crate::cuda::{CudaDevice, Current};
use crate::device::Device;
use crate::device::kernels::KernelSet;
use crate::device::loaded_kernels::LoadedKernels;
use crate::device::sharing::gpu_ranks::GpuRanks;
use crate::device::sharing::own_gpu::{Gpu, Terms, require_own, takes_turns};
use crate::error::bootstrap::BootstrapError;
use crate::error::{Error, NvshmemError, SharedGpuError, leak};
use crate::group::bootstrap::Bootstrap;
use crate::group::channel::Channel;
use crate::group::fabric::Fabric;
use crate::group::job::{Calls, Job, agree, gather_numbers, wrong_length};
use crate::group::options::GroupOptions;
use crate::tensor::handles::DevicePtr;

/// A rank's membership of an NVSHMEM job.
///
/// [`close`](Fabric::close) leaves the job; dropping does not, because leaving waits for the
/// other ranks. A process is in one job at a time.
///
/// Windows come from NVSHMEM's symmetric heap. By default that grows as needed, up to the
/// variable `NVSHMEM_MAX_MEMORY_PER_GPU`; with `NVSHMEM_DISABLE_CUDA_VMM=1`, and if the driver
/// cannot map memory later, it has `NVSHMEM_SYMMETRIC_SIZE` bytes, 1 GiB unless set. NVSHMEM
/// reads these by itself; Ferry does not.
pub struct NvshmemFabric {
    rank: Rank,
    ranks: u32,
    gpus: Vec<GpuRanks>,
    device: Arc<CudaDevice>,
    /// Held during every call of NVSHMEM's, so that there is one at a time.
    job: Mutex<Job<Joined>>,
}

/// The device and the library that joined NVSHMEM.
struct Joined {
    device: Arc<CudaDevice>,
    library: HostLibrary,
    /// The modules that were registered besides the device's own.
    registered: Vec<*mut c_void>,
    channel: Option<Channel>,
}

// SAFETY: the driver's module handles may be used from any thread.
unsafe impl Send for Joined {}

impl Calls for Joined {
    type Entered = Current;

    /// Also makes sure that NVSHMEM's thread is not stuck, as all calls wait for it.
    fn enter(&self) -> Result<Current, Error> {
        if let Some(channel) = &self.channel {
            channel.require_progress(&self.device)?;
        }
        self.device.enter()
    }

    unsafe fn malloc(&self, bytes: u64) -> Option<DevicePtr> {
        // SAFETY: this process is in the job, no other thread calls NVSHMEM, and the device is entered:
        // documented on `Calls::malloc`.
        let at = unsafe { self.library.functions().nvshmem_malloc(bytes as usize) };
        // SAFETY: NVSHMEM allocated `bytes` bytes, which stay until `free`.
        (!at.is_null()).then(|| unsafe { DevicePtr::new(at.addr() as u64, bytes) })
    }

    unsafe fn free(&self, window: DevicePtr) {
        let at = ptr::without_provenance_mut::<c_void>(window.address() as usize);
        // SAFETY: as in `malloc`, which returned the window; nothing uses it any more: documented on
        // `Calls::free`.
        unsafe { self.library.functions().nvshmem_free(at) };
    }

    unsafe fn leave(&self, registered: bool) -> Result<(), Error> {
        // A communicator that was dropped may have left kernels behind. They end at their deadline.
        let mut result = self.device.synchronize_all();
        if registered {
            // SAFETY: `get_ready` registered the module, and no kernel runs.
            let unregistered = unsafe {
                self.library
                    .unregister_module(self.device.module().raw().cast())
            };
            result = result.and(unregistered.map_err(refused));
            for &module in &self.registered {
                // SAFETY: `register` registered it, and no kernel runs.
                let unregistered = unsafe { self.library.unregister_module(module) };
                result = result.and(unregistered.map_err(refused));
            }
        }
        // SAFETY: this process joined the job and leaves it once, and nothing uses windows any more:
        // documented on `Calls::leave`.
        unsafe { self.library.finalize() };
        result
    }
}

impl NvshmemFabric {
    /// Opens the device with the group's kernels, loads the NVSHMEM host library (from the path in the
    /// options, or the loader's `libnvshmem_host.so.3`), and joins the job of all the ranks of `bootstrap`.
    /// If one rank cannot, all fail. Collective. Synchronizes.
    ///
    /// # Errors
    /// [`Error::PeerFailed`] if another rank's error says why; [`Error::Bootstrap`],
    /// [`Error::GpuShared`], [`Error::LibraryMissing`], [`Error::Nvshmem`],
    /// [`Error::Kernels`] for kernels that were built without NVSHMEM, and those of [`CudaDevice::open`].
    pub fn new(
        mut bootstrap: Box<dyn Bootstrap>,
        device: usize,
        options: &GroupOptions,
    ) -> Result<Self, Error> {
        let (rank, ranks) = (bootstrap.rank(), bootstrap.ranks());
        if ranks == 0 {
            return Err(Error::RankCount { ranks: 0 });
        }
        let prepared = prepare(rank, device, options);
        let announced = |prepared: &Prepared| {
            let id = prepared.id.map(UniqueId::to_bytes);
            let id = id.as_ref().map_or(&[][..], |id| &id[..]);
            let terms = prepared.terms.to_bytes();
            [&prepared.gpu.to_bytes(), &terms[..], id].concat()
        };
        let step = "opening the device and loading NVSHMEM";
        let (prepared, announced) = agree(&mut *bootstrap, step, prepared, announced)?;
        let Prepared {
            device, library, ..
        } = prepared;
        let (id, gpus) = heard(&announced)?;

        let joined = join(&device, &library, &id, rank, ranks);
        let step = "joining the NVSHMEM job";
        // A rank that has joined stays in the job if another one has not: leaving would wait for that one.
        agree(&mut *bootstrap, step, joined, |()| Vec::new())?;
        let ready = get_ready(&device, &library, rank, ranks);
        let registered = ready.is_ok();
        let channel = ready.and_then(|()| channel_of(&device, rank, ranks));
        let calls = Joined {
            device: device.clone(),
            library,
            registered: Vec::new(),
            channel: channel.as_ref().copied().unwrap_or(None),
        };
        let step = "letting the kernels call NVSHMEM";
        let agreed = agree(&mut *bootstrap, step, channel, |_| Vec::new());
        let fabric = Self {
            rank: Rank(rank),
            ranks,
            gpus,
            device,
            job: Mutex::new(Job::new(bootstrap, calls)),
        };
        // Allocates, so that no rank does unless all are ready.
        let reaches_all = agreed.and_then(|_| fabric.require_ways());
        if let Err(error) = reaches_all {
            // Every rank is in the job and learns the same, so all leave it together.
            // SAFETY: no window is allocated, and no kernel was launched.
            if let Err(error) = unsafe { fabric.lock().leave(registered) } {
                tracing::warn!(%error, "cannot leave the NVSHMEM job");
            }
            return Err(error);
        }
        Ok(fabric)
    }

    /// This process's CUDA device, for graphs and events.
    ///
    /// # Errors
    /// [`Error::NotLocal`] for the other ranks.
    pub fn cuda_device(&self, rank: Rank) -> Result<Arc<CudaDevice>, Error> {
        if rank == self.rank {
            return Ok(self.device.clone());
        }
        Err(Error::NotLocal {
            rank,
            local: vec![self.rank.0],
        })
    }

    /// Loads the kernels of a set for every shape and registers them with NVSHMEM, unless that was done.
    /// Returns the device.
    fn register(&self, rank: Rank, set: KernelSet) -> Result<Arc<CudaDevice>, Error> {
        let device = self.cuda_device(rank)?;
        let module = device.module_of(set)?;
        module.require_shmem()?;
        let module = module.raw().cast();
        let mut job = self.lock();
        if !job.is_open() {
            return Err(Error::GroupClosed);
        }
        if !job.calls.registered.contains(&module) {
            let _current = device.enter()?;
            // SAFETY: the module is loaded in the current context, and NVSHMEM's code is linked into it.
            unsafe { job.calls.library.register_module(module) }.map_err(refused)?;
            job.calls.registered.push(module);
        }
        Ok(device)
    }

    /// Makes sure that rows can get to every rank. Collective.
    fn require_ways(&self) -> Result<(), Error> {
        let mut job = self.lock();
        let probe = job.alloc(size_of::<u64>() as u64)?;
        let mut ranks = (0..self.ranks).map(Rank);
        let found = match ranks.find(|&peer| self.mapped(&job, probe, peer).is_err()) {
            Some(peer) => Channel::require_way(job.calls.channel.as_ref(), &self.device, peer),
            None => Ok(()),
        };
        // SAFETY: `alloc` returned it, and nothing uses it.
        let freed = unsafe { job.free(&[probe]) };
        let step = "looking for ways to all ranks";
        agree(&mut *job.bootstrap, step, found.and(freed), |()| Vec::new())?;
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Job<Joined>> {
        self.job.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `window` of this rank as `peer`, a rank of the same node, is addressed.
    fn mapped(&self, job: &Job<Joined>, window: DevicePtr, peer: Rank) -> Result<DevicePtr, Error> {
        if !job.is_open() {
            return Err(Error::GroupClosed);
        }
        let own = ptr::without_provenance::<c_void>(window.address() as usize);
        let functions = job.calls.library.functions();
        // SAFETY: the job is open, and NVSHMEM returns null for an address that is not symmetric.
        let at = unsafe { functions.nvshmem_ptr(own, pe_number(peer.0)?) };
        if at.is_null() {
            return Err(NvshmemError::NotMapped {
                rank: self.rank,
                peer,
            }
            .into());
        }
        // SAFETY: NVSHMEM maps the peer's window at this address, with the length of the own one.
        Ok(unsafe { DevicePtr::new(at.addr() as u64, window.bytes()) })
    }
}

// SAFETY: windows come from NVSHMEM's symmetric heap on this rank's device, in the requested size,
// and NVSHMEM maps those of peers; they stay until they are freed or the job is left. The job's
// ranks have the bootstrap's numbers, and the module of the kernels is registered with NVSHMEM. The
// bootstrap's collectives are `all_gather` and `barrier`.
unsafe impl Fabric for NvshmemFabric {
    fn name(&self) -> &'static str {
        "nvshmem"
    }

    fn ranks(&self) -> u32 {
        self.ranks
    }

    fn local_ranks(&self) -> Vec<Rank> {
        vec![self.rank]
    }

    fn device(&self, rank: Rank) -> Result<Arc<dyn Device>, Error> {
        Ok(self.cuda_device(rank)?)
    }

    fn gpu_ranks(&self, rank: Rank) -> Option<&GpuRanks> {
        GpuRanks::of(&self.gpus, rank)
    }

    fn cuda(&self, rank: Rank) -> Option<Arc<CudaDevice>> {
        self.cuda_device(rank).ok()
    }

    fn kernels_with_options(
        &self,
        rank: Rank,
        shape: Option<&Shape>,
    ) -> Result<LoadedKernels, Error> {
        let device = self.register(rank, KernelSet::WithOptions)?;
        device.kernels_with_options(shape)
    }

    fn kernels_with_rows(&self, rank: Rank, shape: Option<&Shape>) -> Result<LoadedKernels, Error> {
        let device = self.register(rank, KernelSet::Rows)?;
        device.kernels_with_rows(shape)
    }

    fn reaches_other_nodes(&self) -> bool {
        true
    }

    fn all_gather(&self, value: u64) -> Result<Vec<u64>, Error> {
        gather_numbers(&mut *self.lock().bootstrap, value)
    }

    fn barrier(&self) -> Result<(), Error> {
        Ok(self.lock().bootstrap.barrier()?)
    }

    fn alloc_windows(&self, bytes: u64) -> Result<Vec<DevicePtr>, Error> {
        Ok(vec![self.lock().alloc(bytes)?])
    }

    fn peer_windows(
        &self,
        rank: Rank,
        windows: &[DevicePtr],
        shape: &Shape,
    ) -> Result<Vec<DevicePtr>, Error> {
        self.cuda_device(rank)?;
        let Some(&own) = windows.first() else {
            return Err(Error::NotLocal {
                rank,
                local: Vec::new(),
            });
        };
        let job = self.lock();
        let _current = self.device.enter()?;
        let as_seen = |peer| {
            if shape.same_node(rank, peer) && peer != rank {
                self.mapped(&job, own, peer)
            } else {
                Ok(own)
            }
        };
        (0..self.ranks).map(Rank).map(as_seen).collect()
    }

    unsafe fn free_windows(&self, windows: &[DevicePtr]) -> Result<(), Error> {
        // SAFETY: `alloc_windows` returned them and no kernel uses them: documented on
        // `Fabric::free_windows`.
        unsafe { self.lock().free(windows) }
    }

    unsafe fn close(&self) -> Result<(), Error> {
        // SAFETY: no communicator is open (documented on `Fabric::close`), so nothing uses windows any
        // more. `leave` waits for kernels of dropped communicators.
        unsafe { self.lock().leave(true) }
    }
}

impl Drop for NvshmemFabric {
    fn drop(&mut self) {
        let job = self.lock();
        if job.is_open() {
            tracing::warn!(
                rank = self.rank.0,
                "an NVSHMEM group was dropped without close"
            );
            leak::tell(
                "an NVSHMEM group was dropped without close, and stays joined; close it instead",
            );
        }
    }
}

/// Results of the steps that a rank takes by itself.
struct Prepared {
    device: Arc<CudaDevice>,
    gpu: Gpu,
    terms: Terms,
    library: HostLibrary,
    /// Rank 0's name for the job.
    id: Option<UniqueId>,
}

fn prepare(rank: u32, device: usize, options: &GroupOptions) -> Result<Prepared, Error> {
    let path = options.nvshmem_library.as_deref();
    let library = HostLibrary::load(path).map_err(|error| not_loaded(path, &error))?;
    let device = Arc::new(CudaDevice::open_with(device, &options.kernels)?);
    device.module().require_shmem()?;
    let gpu = Gpu::here(device.uuid()?);
    let terms = device.terms(options.share_gpus)?;
    let _current = device.enter()?;
    let id = match rank {
        0 => Some(library.new_unique_id().map_err(refused)?),
        _ => None,
    };
    Ok(Prepared {
        device: device.clone(),
        gpu,
        terms,
        library,
        id,
    })
}

/// Rank 0's name for the job, and the ranks' GPUs, if every rank has its own, or shares one under MPS.
fn heard(announced: &[Vec<u8>]) -> Result<(UniqueId, Vec<GpuRanks>), Error> {
    let mut ranks = Vec::new();
    let mut id = &[][..];
    for (rank, bytes) in announced.iter().enumerate() {
        let split = Gpu::split_from(bytes).and_then(|(gpu, rest)| {
            let (terms, rest) = Terms::split_from(rest)?;
            Some(((gpu, terms), rest))
        });
        let wrong = || wrong_length(rank, bytes.len(), size_of::<[u8; 17]>() + Terms::BYTES);
        let (on_gpu, rest) = split.ok_or_else(wrong)?;
        ranks.push(on_gpu);
        if rank == 0 {
            id = rest;
        }
    }
    let gpus = require_own(&ranks)?;
    if let Some(rank) = takes_turns(&gpus, &ranks) {
        let device = ranks[rank.0 as usize].0.name();
        return Err(SharedGpuError::NeedsMps { rank, device }.into());
    }
    let wrong = |_| wrong_length(0, id.len(), UniqueId::BYTES);
    let id = UniqueId::from_bytes(id.try_into().map_err(wrong)?);
    Ok((id, gpus))
}

/// Initializes NVSHMEM. Collective.
fn join(
    device: &CudaDevice,
    library: &HostLibrary,
    id: &UniqueId,
    rank: u32,
    ranks: u32,
) -> Result<(), Error> {
    let _current = device.enter()?;
    // SAFETY: the device's context is current, and only this thread has the library's handle.
    // NVSHMEM itself refuses a second group in one process.
    unsafe { library.init(id, pe_number(rank)?, pe_number(ranks)?) }.map_err(refused)
}

/// Compares the ranks' numbers and registers the kernels with NVSHMEM. If it fails, they are not registered.
fn get_ready(
    device: &CudaDevice,
    library: &HostLibrary,
    rank: u32,
    ranks: u32,
) -> Result<(), Error> {
    let _current = device.enter()?;
    let functions = library.functions();
    // SAFETY: NVSHMEM is initialized.
    let (pe, pes) = unsafe { (functions.nvshmem_my_pe(), functions.nvshmem_n_pes()) };
    if (pe, pes) != (pe_number(rank)?, pe_number(ranks)?) {
        return Err(NvshmemError::Ranks {
            rank: Rank(rank),
            ranks,
            pe: i64::from(pe),
            pes: i64::from(pes),
        }
        .into());
    }
    // SAFETY: the module is loaded in the current context, and NVSHMEM's code is linked into it.
    unsafe { library.register_module(device.module().raw().cast()) }.map_err(refused)
}

/// The channel to ranks whose memory is not mapped, if there is one. After [`get_ready`].
fn channel_of(device: &CudaDevice, rank: u32, ranks: u32) -> Result<Option<Channel>, Error> {
    let _current = device.enter()?;
    let state = device.module().variable(DEVICE_STATE)?;
    Channel::of(device, state, rank, ranks)
}

/// Converts a rank to C's `int`, in which NVSHMEM counts.
fn pe_number(rank: u32) -> Result<i32, Error> {
    i32::try_from(rank).map_err(|_| {
        Error::Bootstrap(BootstrapError::Other {
            call: "the bootstrap's ranks",
            reason: format!("{rank} is more than NVSHMEM can count"),
        })
    })
}

fn refused(error: CallError) -> Error {
    let (call, status) = (error.function, i64::from(error.status));
    NvshmemError::Call { call, status }.into()
}

fn not_loaded(path: Option<&std::path::Path>, error: &LoadError) -> Error {
    let dotted = |(major, minor, patch): (u32, u32, u32)| format!("{major}.{minor}.{patch}");
    match error {
        LoadError::Version { found, linked, .. } => NvshmemError::Version {
            linked: dotted(*linked),
            found: dotted(*found),
        }
        .into(),
        _ => Error::LibraryMissing {
            library: "the NVSHMEM host library",
            tried: vec![path.map_or_else(|| PathBuf::from(SONAME), PathBuf::from)],
            reason: error.to_string(),
        },
    }
}

#[cfg(test)]
#[path = "nvshmem_tests.rs"]
mod tests;
