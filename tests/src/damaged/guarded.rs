//! Group whose every allocation has guard zones on both sides, whose windows can be written, and
//! whose launches can be repeated.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use ferry::device::{GpuRanks, LoadedKernels};
use ferry::device::{InGraph, Launch, SharedPage};
use ferry::layout::Shape;
use ferry::{Device, DevicePtr, Error, Fabric, Group, Rank, Stream};

/// Byte that guard zones hold.
const GUARD: u8 = 0xb7;

/// An allocation, of which the user sees all but the guard zones.
#[derive(Clone)]
struct Guarded {
    device: Arc<dyn Device>,
    whole: DevicePtr,
    bytes: u64,
}

/// All that is allocated, by the address that the user sees.
type Allocations = Mutex<BTreeMap<DevicePtr, Guarded>>;

struct Zones {
    inner: Arc<dyn Fabric>,
    guard_bytes: u64,
    live: Allocations,
    /// The windows of the last communicator.
    windows: Mutex<Vec<DevicePtr>>,
    launches: Mutex<Vec<(Rank, Launch)>>,
}

impl Zones {
    /// Notes an allocation of `bytes` between guard zones, and makes those.
    fn note(
        &self,
        device: &Arc<dyn Device>,
        whole: DevicePtr,
        bytes: u64,
    ) -> Result<DevicePtr, Error> {
        let at = whole.plus(self.guard_bytes);
        device.fill(whole, GUARD, self.guard_bytes)?;
        device.fill(at.plus(bytes), GUARD, self.guard_bytes)?;
        // SAFETY: these bytes are a part of what was allocated, without the zone behind them.
        let at = unsafe { DevicePtr::new(at.address(), bytes) };
        let device = device.clone();
        let guarded = Guarded {
            device,
            whole,
            bytes,
        };
        lock(&self.live).insert(at, guarded);
        Ok(at)
    }

    /// Forgets `at`, and returns what was allocated for it.
    fn forget(&self, at: DevicePtr) -> DevicePtr {
        lock(&self.live)
            .remove(&at)
            .map_or(at, |guarded| guarded.whole)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A group with guard zones, over another one.
pub struct GuardedGroup {
    /// The group.
    pub group: Group,
    zones: Arc<Zones>,
}

impl GuardedGroup {
    /// `guard_bytes`: of a zone; 0 where the machine itself checks every access.
    ///
    /// # Safety
    /// Neither group is closed while the other has communicators, or they have graphs.
    pub unsafe fn new(inner: &Group, guard_bytes: u64) -> Result<Self, Error> {
        // SAFETY: neither group is closed while the other has communicators: documented on `new`.
        let fabric = unsafe { inner.fabric() };
        let zones = Arc::new(Zones {
            inner: fabric.clone(),
            guard_bytes,
            live: Mutex::default(),
            windows: Mutex::default(),
            launches: Mutex::default(),
        });
        let group = Group::with_fabric(Box::new(GuardedFabric(zones.clone())))?;
        Ok(Self { group, zones })
    }

    /// The windows of the communicator that was made last, in the order of the local ranks.
    pub fn windows(&self) -> Vec<DevicePtr> {
        lock(&self.zones.windows).clone()
    }

    /// Launches since this was last called, in order, each with its rank.
    pub fn take_launches(&self) -> Vec<(Rank, Launch)> {
        std::mem::take(&mut lock(&self.zones.launches))
    }

    /// Enqueues launches again, as a graph does: below the host's side of a round.
    ///
    /// # Safety
    /// [`take_launches`](Self::take_launches) gave them, and what they name still exists.
    pub unsafe fn repeat(&self, launches: &[(Rank, Launch)]) -> Result<(), Error> {
        launches.iter().try_for_each(|(rank, launch)| {
            let device = self.zones.inner.device(*rank)?;
            // SAFETY: the communicator promised it of the same launch, whose memory still exists.
            unsafe { device.launch(launch) }
        })
    }

    /// The first guard zone that was written, if one was: how far from its allocation, and which.
    pub fn damage(&self) -> Result<Option<String>, Error> {
        let guard_bytes = self.zones.guard_bytes;
        let mut zone = vec![0; guard_bytes as usize];
        for guarded in lock(&self.zones.live).values() {
            let ends = [
                ("before", guarded.whole),
                ("behind", guarded.whole.plus(guard_bytes + guarded.bytes)),
            ];
            for (side, start) in ends {
                guarded.device.download(start, &mut zone)?;
                if let Some(byte) = zone.iter().position(|&byte| byte != GUARD) {
                    return Ok(Some(format!(
                        "byte {byte} of the {guard_bytes} {side} an allocation of {} bytes on {} was written",
                        guarded.bytes,
                        guarded.device.name()
                    )));
                }
            }
        }
        Ok(None)
    }
}

struct GuardedFabric(Arc<Zones>);

// SAFETY: each window lies between zones of one of the inner fabric's, which is longer by these,
// and is all its own; the rest is the inner fabric's.
unsafe impl Fabric for GuardedFabric {
    fn name(&self) -> &'static str {
        self.0.inner.name()
    }

    fn ranks(&self) -> u32 {
        self.0.inner.ranks()
    }

    fn local_ranks(&self) -> Vec<Rank> {
        self.0.inner.local_ranks()
    }

    fn device(&self, rank: Rank) -> Result<Arc<dyn Device>, Error> {
        Ok(Arc::new(GuardedDevice {
            inner: self.0.inner.device(rank)?,
            rank,
            zones: self.0.clone(),
        }))
    }

    fn gpu_ranks(&self, rank: Rank) -> Option<&GpuRanks> {
        self.0.inner.gpu_ranks(rank)
    }

    #[cfg(feature = "cuda")]
    fn cuda(&self, rank: Rank) -> Option<Arc<ferry::cuda::CudaDevice>> {
        self.0.inner.cuda(rank)
    }

    fn reaches_other_nodes(&self) -> bool {
        self.0.inner.reaches_other_nodes()
    }

    fn all_gather(&self, value: u64) -> Result<Vec<u64>, Error> {
        self.0.inner.all_gather(value)
    }

    fn barrier(&self) -> Result<(), Error> {
        self.0.inner.barrier()
    }

    fn alloc_windows(&self, bytes: u64) -> Result<Vec<DevicePtr>, Error> {
        let whole = self.0.inner.alloc_windows(bytes + 2 * self.0.guard_bytes)?;
        let windows: Vec<_> = self
            .local_ranks()
            .into_iter()
            .zip(whole)
            .map(|(rank, whole)| self.0.note(&self.0.inner.device(rank)?, whole, bytes))
            .collect::<Result<_, Error>>()?;
        lock(&self.0.windows).clone_from(&windows);
        Ok(windows)
    }

    fn peer_windows(
        &self,
        rank: Rank,
        windows: &[DevicePtr],
        shape: &Shape,
    ) -> Result<Vec<DevicePtr>, Error> {
        self.0.inner.peer_windows(rank, windows, shape)
    }

    unsafe fn free_windows(&self, windows: &[DevicePtr]) -> Result<(), Error> {
        let whole: Vec<_> = windows.iter().map(|&at| self.0.forget(at)).collect();
        // SAFETY: nobody uses the windows any more: documented on `Fabric::free_windows`; these contain them.
        unsafe { self.0.inner.free_windows(&whole) }
    }

    unsafe fn close(&self) -> Result<(), Error> {
        // SAFETY: nothing of the group is used any more: documented on `Fabric::close`.
        unsafe { self.0.inner.close() }
    }
}

struct GuardedDevice {
    inner: Arc<dyn Device>,
    rank: Rank,
    zones: Arc<Zones>,
}

impl GuardedDevice {
    fn note(&self, launch: &Launch) {
        lock(&self.zones.launches).push((self.rank, launch.clone()));
    }
}

// SAFETY: what is allocated lies between zones of what the inner device gave, which is longer by
// these, and is all its own; the rest is the inner device's.
unsafe impl Device for GuardedDevice {
    fn name(&self) -> String {
        self.inner.name()
    }

    fn alloc(&self, bytes: u64) -> Result<DevicePtr, Error> {
        let whole = self.inner.alloc(bytes + 2 * self.zones.guard_bytes)?;
        self.zones.note(&self.inner, whole, bytes)
    }

    unsafe fn free(&self, at: DevicePtr) -> Result<(), Error> {
        // SAFETY: nobody uses the memory any more: documented on `Device::free`; this contains it.
        unsafe { self.inner.free(self.zones.forget(at)) }
    }

    fn upload(&self, to: DevicePtr, bytes: &[u8]) -> Result<(), Error> {
        self.inner.upload(to, bytes)
    }

    fn download(&self, from: DevicePtr, bytes: &mut [u8]) -> Result<(), Error> {
        self.inner.download(from, bytes)
    }

    fn fill(&self, at: DevicePtr, value: u8, bytes: u64) -> Result<(), Error> {
        self.inner.fill(at, value, bytes)
    }

    fn stream(&self) -> Result<Stream, Error> {
        self.inner.stream()
    }

    fn synchronize(&self, stream: Stream) -> Result<(), Error> {
        self.inner.synchronize(stream)
    }

    fn kernels(&self, shape: &Shape) -> Result<LoadedKernels, Error> {
        self.inner.kernels(shape)
    }

    fn kernels_with_options(&self, shape: Option<&Shape>) -> Result<LoadedKernels, Error> {
        self.inner.kernels_with_options(shape)
    }

    fn kernels_with_rows(&self, shape: Option<&Shape>) -> Result<LoadedKernels, Error> {
        self.inner.kernels_with_rows(shape)
    }

    fn capture(&self, stream: Stream) -> Option<u64> {
        self.inner.capture(stream)
    }

    fn stream_multiprocessors(&self, stream: Stream) -> Option<u32> {
        self.inner.stream_multiprocessors(stream)
    }

    unsafe fn launch(&self, launch: &Launch) -> Result<(), Error> {
        self.note(launch);
        // SAFETY: the arguments name memory that stays: documented on `Device::launch`.
        unsafe { self.inner.launch(launch) }
    }

    unsafe fn launch_held(
        &self,
        launch: &Launch,
        held: &Arc<dyn Any + Send + Sync>,
    ) -> Result<InGraph, Error> {
        self.note(launch);
        // SAFETY: the arguments name memory that stays: documented on `Device::launch_held`.
        unsafe { self.inner.launch_held(launch, held) }
    }

    fn fault_page(&self, words: usize) -> Result<Box<dyn SharedPage>, Error> {
        self.inner.fault_page(words)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_outside_of_an_allocation_is_found() {
        let inner = Group::simulated(1, 1).unwrap();
        for (offset, found) in [(None, None), (Some(8), Some("byte 0 of the 256 behind"))] {
            // SAFETY: neither group is closed.
            let guarded = unsafe { GuardedGroup::new(&inner, 256) }.unwrap();
            let device = guarded.group.device(Rank(0)).unwrap();
            let at = device.alloc(8).unwrap();
            device.upload(at, &[0; 8]).unwrap();
            if let Some(offset) = offset {
                // SAFETY: the guard zone behind the allocation, which lies in the same memory.
                let behind = unsafe { DevicePtr::new(at.address() + offset, 1) };
                device.upload(behind, &[1]).unwrap();
            }
            let damage = guarded.damage().unwrap();
            let is_right = match (&damage, found) {
                (Some(damage), Some(found)) => damage.starts_with(found),
                (damage, _) => damage.is_none() && found.is_none(),
            };
            assert!(is_right, "{damage:?}");
            // SAFETY: nothing was launched.
            unsafe { device.free(at).unwrap() };
        }
    }
}
