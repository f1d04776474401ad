//! One process a GPU, over NVLink inside a node and NVSHMEM between nodes.

use std::ffi::c_void;
use std::path::PathBuf;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ferry_layout::{Rank, Shape};
use nvshmem_sys::{CallError, HostLibrary, LoadError, UniqueId, host::SONAME};

use crate::cuda::CudaDevice;
use crate::{Bootstrap, BootstrapError, Device, DevicePtr, Error, Fabric};

/// A rank's membership of an NVSHMEM job.
///
/// [`close`](Fabric::close) leaves the job; dropping does not, because leaving waits for the
/// other ranks. A process is in one job at a time.
///
/// Windows come from NVSHMEM's symmetric heap. By default that grows as needed, up to the
/// variable `NVSHMEM_MAX_MEMORY_PER_GPU`; with `NVSHMEM_DISABLE_CUDA_VMM=1`, and where the driver
/// cannot map memory later, it has `NVSHMEM_SYMMETRIC_SIZE` bytes, 1 GiB unless set. NVSHMEM
/// reads these by itself; Ferry does not.
pub struct NvshmemFabric {
    rank: Rank,
    ranks: u32,
    device: Arc<CudaDevice>,
    library: HostLibrary,
    /// Held during every call of NVSHMEM's, so that there is one at a time.
    job: Mutex<Job>,
}

/// What changes.
struct Job {
    bootstrap: Box<dyn Bootstrap>,
    open: bool,
}

impl NvshmemFabric {
    /// Opens device number `device`, loads the NVSHMEM host library (from `library`, or where the
    /// loader finds `libnvshmem_host.so.3`), and joins the job of all the ranks of `bootstrap`.
    /// A rank that cannot makes all fail. Collective. Synchronises.
    ///
    /// # Errors
    /// [`Error::PeerFailed`] where another rank's error says why; [`Error::Bootstrap`],
    /// [`Error::LibraryMissing`], [`Error::NvshmemVersion`], [`Error::Nvshmem`],
    /// [`Error::NvshmemRanks`], and those of [`CudaDevice::open`].
    pub fn new(
        mut bootstrap: Box<dyn Bootstrap>,
        device: usize,
        library: Option<PathBuf>,
    ) -> Result<Self, Error> {
        let (rank, ranks) = (bootstrap.rank(), bootstrap.ranks());
        if ranks == 0 {
            return Err(Error::NoRanks);
        }
        let prepared = prepare(rank, device, library);
        let announced = |(_, _, id): &(_, _, Option<UniqueId>)| {
            id.map_or_else(Vec::new, |id| id.to_bytes().to_vec())
        };
        let step = "opening the device and loading NVSHMEM";
        let ((device, library, _), announced) = agree(&mut *bootstrap, step, prepared, announced)?;
        let id = unique_id(&announced)?;

        let joined = join(&device, &library, &id, rank, ranks);
        let is_in = joined.is_ok();
        let step = "joining the NVSHMEM job";
        agree(&mut *bootstrap, step, joined, |()| Vec::new()).inspect_err(|_| {
            if is_in {
                // Leaving would wait for the ranks that are not in, so NVSHMEM goes on using the
                // context.
                std::mem::forget(device.clone());
            }
        })?;
        let ready = get_ready(&device, &library, rank, ranks);
        let registered = ready.is_ok();
        let step = "letting the kernels call NVSHMEM";
        let agreed = agree(&mut *bootstrap, step, ready, |()| Vec::new());
        let fabric = Self {
            rank: Rank(rank),
            ranks,
            device,
            library,
            job: Mutex::new(Job {
                bootstrap,
                open: true,
            }),
        };
        if let Err(error) = agreed {
            // Every rank is in the job and learns the same, so all leave it together.
            if let Err(error) = fabric.leave(registered) {
                tracing::warn!(%error, "cannot leave the NVSHMEM job");
            }
            return Err(error);
        }
        Ok(fabric)
    }

    /// This process's device, with what only CUDA has: graphs and events.
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

    fn lock(&self) -> MutexGuard<'_, Job> {
        self.job.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The job, if it has not been left.
    fn job(&self) -> Result<MutexGuard<'_, Job>, Error> {
        let job = self.lock();
        if job.open {
            Ok(job)
        } else {
            Err(Error::GroupClosed)
        }
    }

    /// Leaves the job, once. Collective.
    fn leave(&self, registered: bool) -> Result<(), Error> {
        let mut job = self.lock();
        if !std::mem::replace(&mut job.open, false) {
            return Ok(());
        }
        let _current = self.device.enter()?;
        // A communicator that was dropped may have left kernels behind. They end at their deadline.
        let mut result = self.device.synchronize_all();
        if registered {
            // SAFETY: `get_ready` registered the module, and no kernel runs.
            let unregistered = unsafe { self.library.unregister_module(self.device.module()) };
            result = result.and(unregistered.map_err(refused));
        }
        // SAFETY: this process joined the job and leaves it once. Nothing uses windows any more: no kernel runs, and
        // the group has no communicator or graph that could launch one.
        unsafe { self.library.finalize() };
        result
    }

    /// `window` of this rank as `peer`, a rank of the same node, is addressed.
    fn mapped(&self, window: DevicePtr, peer: Rank) -> Result<DevicePtr, Error> {
        let own = ptr::without_provenance::<c_void>(window.address() as usize);
        // SAFETY: the job is open (the caller holds it), and NVSHMEM gives null for an address
        // that is not symmetric.
        let at = unsafe {
            self.library
                .functions()
                .nvshmem_ptr(own, pe_number(peer.0)?)
        };
        if at.is_null() {
            return Err(Error::PeerNotMapped {
                rank: self.rank,
                peer,
            });
        }
        // SAFETY: NVSHMEM maps the peer's window here, which is as long as the own one.
        Ok(unsafe { DevicePtr::new(at.addr() as u64, window.bytes()) })
    }
}

impl Fabric for NvshmemFabric {
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

    fn cuda(&self, rank: Rank) -> Option<Arc<CudaDevice>> {
        self.cuda_device(rank).ok()
    }

    fn reaches_other_nodes(&self) -> bool {
        true
    }

    fn all_gather(&self, value: u64) -> Result<Vec<u64>, Error> {
        let all = self.lock().bootstrap.all_gather(&value.to_le_bytes())?;
        let number = |(rank, bytes): (usize, Vec<u8>)| {
            let bytes = <[u8; 8]>::try_from(bytes)
                .map_err(|bytes| wrong_length(rank, bytes.len(), size_of::<u64>()))?;
            Ok(u64::from_le_bytes(bytes))
        };
        all.into_iter().enumerate().map(number).collect()
    }

    fn barrier(&self) -> Result<(), Error> {
        Ok(self.lock().bootstrap.barrier()?)
    }

    fn alloc_windows(&self, bytes: u64) -> Result<Vec<DevicePtr>, Error> {
        let mut job = self.job()?;
        let _current = self.device.enter()?;
        // SAFETY: the job is open and held, and the device's context is current.
        let at = unsafe { self.library.functions().nvshmem_malloc(bytes as usize) };
        let window = if at.is_null() {
            Err(Error::NvshmemHeap { bytes })
        } else {
            // SAFETY: NVSHMEM gave so many bytes, which are kept until `free_windows`.
            Ok(unsafe { DevicePtr::new(at.addr() as u64, bytes) })
        };
        // The heap is symmetric: it is exhausted on all ranks or on none. Should they disagree
        // all the same, the memory is leaked, because giving it back waits for every rank.
        let step = "allocating windows";
        let (window, _) = agree(&mut *job.bootstrap, step, window, |_| Vec::new())?;
        Ok(vec![window])
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
        let _job = self.job()?;
        let _current = self.device.enter()?;
        let as_seen = |peer| {
            if shape.same_node(rank, peer) && peer != rank {
                self.mapped(own, peer)
            } else {
                Ok(own)
            }
        };
        (0..self.ranks).map(Rank).map(as_seen).collect()
    }

    unsafe fn free_windows(&self, windows: &[DevicePtr]) -> Result<(), Error> {
        let _job = self.job()?;
        let _current = self.device.enter()?;
        for window in windows {
            let at = ptr::without_provenance_mut::<c_void>(window.address() as usize);
            // SAFETY: the job is open and held, and `alloc_windows` got the window from it; that nobody uses it
            // is the caller's promise.
            unsafe { self.library.functions().nvshmem_free(at) };
        }
        Ok(())
    }

    fn close(&self) -> Result<(), Error> {
        self.leave(true)
    }
}

impl Drop for NvshmemFabric {
    fn drop(&mut self) {
        if self.lock().open {
            // NVSHMEM still uses the context, and knows the module.
            tracing::warn!(
                rank = self.rank.0,
                "an NVSHMEM group was dropped without close"
            );
            std::mem::forget(self.device.clone());
        }
    }
}

/// What a rank can do by itself. Rank 0 names the job.
fn prepare(
    rank: u32,
    device: usize,
    library: Option<PathBuf>,
) -> Result<(Arc<CudaDevice>, HostLibrary, Option<UniqueId>), Error> {
    let path = library.as_deref();
    let library = HostLibrary::load(path).map_err(|error| not_loaded(path, &error))?;
    let device = Arc::new(CudaDevice::open(device)?);
    let _current = device.enter()?;
    let id = match rank {
        0 => Some(library.new_unique_id().map_err(refused)?),
        _ => None,
    };
    Ok((device.clone(), library, id))
}

/// Rank 0's name for the job.
fn unique_id(announced: &[Vec<u8>]) -> Result<UniqueId, Error> {
    let bytes = announced.first().map_or(&[][..], Vec::as_slice);
    let wrong = |_| wrong_length(0, bytes.len(), UniqueId::BYTES);
    Ok(UniqueId::from_bytes(bytes.try_into().map_err(wrong)?))
}

/// Initialises NVSHMEM. Collective.
fn join(
    device: &CudaDevice,
    library: &HostLibrary,
    id: &UniqueId,
    rank: u32,
    ranks: u32,
) -> Result<(), Error> {
    let _current = device.enter()?;
    // SAFETY: the device's context is current, and only this thread knows the library's handle.
    // A second group in one process is NVSHMEM's to refuse.
    unsafe { library.init(id, pe_number(rank)?, pe_number(ranks)?) }.map_err(refused)
}

/// Compares the ranks' numbers and makes the kernels known to NVSHMEM. If it fails, they are not.
fn get_ready(
    device: &CudaDevice,
    library: &HostLibrary,
    rank: u32,
    ranks: u32,
) -> Result<(), Error> {
    let _current = device.enter()?;
    let functions = library.functions();
    // SAFETY: NVSHMEM is initialised.
    let (pe, pes) = unsafe { (functions.nvshmem_my_pe(), functions.nvshmem_n_pes()) };
    if (pe, pes) != (pe_number(rank)?, pe_number(ranks)?) {
        return Err(Error::NvshmemRanks {
            rank: Rank(rank),
            ranks,
            pe: i64::from(pe),
            pes: i64::from(pes),
        });
    }
    // SAFETY: the module is loaded in the current context, and NVSHMEM's code is linked into it.
    unsafe { library.register_module(device.module()) }.map_err(refused)
}

/// Tells all ranks whether this one came out of `step` well, with a few bytes if it did, and
/// gives every rank's bytes. Collective.
fn agree<T>(
    bootstrap: &mut dyn Bootstrap,
    step: &'static str,
    result: Result<T, Error>,
    attached: impl FnOnce(&T) -> Vec<u8>,
) -> Result<(T, Vec<Vec<u8>>), Error> {
    const WELL: u8 = 1;
    let message = match &result {
        Ok(value) => [&[WELL][..], &attached(value)].concat(),
        Err(_) => vec![0],
    };
    let gathered = bootstrap.all_gather(&message);
    // This rank's own error says more than that of telling it.
    let value = result?;
    let mut attached = Vec::new();
    for (rank, message) in (0..).map(Rank).zip(gathered?) {
        match message.split_first() {
            Some((&WELL, rest)) => attached.push(rest.to_vec()),
            _ => return Err(Error::PeerFailed { rank, step }),
        }
    }
    Ok((value, attached))
}

/// NVSHMEM counts in C's `int`.
fn pe_number(rank: u32) -> Result<i32, Error> {
    i32::try_from(rank).map_err(|_| {
        Error::Bootstrap(BootstrapError::Other {
            call: "Bootstrap::ranks",
            reason: format!("{rank} is more than NVSHMEM can count"),
        })
    })
}

fn wrong_length(rank: usize, found: usize, wanted: usize) -> Error {
    Error::Bootstrap(BootstrapError::Other {
        call: "Bootstrap::all_gather",
        reason: format!(
            "rank {rank} sent {found} bytes, not {wanted}; do all make the same calls?"
        ),
    })
}

fn refused(error: CallError) -> Error {
    Error::Nvshmem {
        call: error.function,
        status: i64::from(error.status),
    }
}

fn not_loaded(path: Option<&std::path::Path>, error: &LoadError) -> Error {
    let dotted = |(major, minor, patch): (u32, u32, u32)| format!("{major}.{minor}.{patch}");
    match error {
        LoadError::Version { found, linked, .. } => Error::NvshmemVersion {
            linked: dotted(*linked),
            found: dotted(*found),
        },
        _ => Error::LibraryMissing {
            library: "the NVSHMEM host library",
            tried: vec![path.map_or_else(|| PathBuf::from(SONAME), PathBuf::from)],
            reason: error.to_string(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A bootstrap whose other ranks always say the same.
    struct Recorded(Vec<Vec<u8>>);

    impl Bootstrap for Recorded {
        fn rank(&self) -> u32 {
            0
        }

        fn ranks(&self) -> u32 {
            self.0.len() as u32 + 1
        }

        fn all_gather(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, BootstrapError> {
            Ok([vec![bytes.to_vec()], self.0.clone()].concat())
        }
    }

    #[test]
    fn a_rank_that_fails_is_named_to_the_others() {
        let mut bootstrap = Recorded(vec![vec![1, 7], vec![0]]);
        let Err(error) = agree(&mut bootstrap, "testing", Ok(()), |()| vec![5]) else {
            panic!("rank 2 failed");
        };
        let text = error.to_string();
        assert!(
            text.contains("rank 2") && text.contains("testing"),
            "{text}"
        );
    }

    #[test]
    fn what_ranks_attach_comes_by_rank() {
        let mut bootstrap = Recorded(vec![vec![1, 7]]);
        let agreed = agree(&mut bootstrap, "testing", Ok(3), |_| vec![5, 6]);
        assert!(matches!(agreed, Ok((3, bytes)) if bytes == [vec![5, 6], vec![7]]));
    }

    #[test]
    fn a_missing_library_is_named_on_its_own_rank() {
        let library = Some(PathBuf::from("no/such/libnvshmem_host.so.3"));
        let bootstrap = Box::new(Recorded(vec![vec![1]]));
        let Err(error) = NvshmemFabric::new(bootstrap, 0, library) else {
            panic!("there is no such library");
        };
        assert!(matches!(error, Error::LibraryMissing { .. }), "{error}");
        assert!(error.to_string().contains("no/such/libnvshmem_host.so.3"));
    }

    #[test]
    fn a_short_unique_id_is_refused() {
        assert!(matches!(unique_id(&[vec![1; 4]]), Err(Error::Bootstrap(_))));
        assert!(unique_id(&[vec![1; UniqueId::BYTES]]).is_ok());
    }
}
