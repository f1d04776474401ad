//! Groups of ranks.

pub(crate) mod bootstrap;
#[cfg(feature = "nvshmem")]
mod channel;
pub(crate) mod fabric;
#[cfg(any(feature = "cuda", test))]
pub(crate) mod job;
#[cfg(feature = "cuda")]
pub(crate) mod local;
#[cfg(any(feature = "cuda", test))]
pub(crate) mod node;
#[cfg(feature = "nvshmem")]
pub(crate) mod nvshmem;
pub(crate) mod options;
#[cfg(feature = "simulator")]
pub(crate) mod simulated;

#[cfg(feature = "simulator")]
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
#[cfg(feature = "simulator")]
use std::time::Duration;

use ferry_layout::{MAX_RANKS, Rank};
#[cfg(feature = "simulator")]
use ferry_simulator::Options as SimulatorOptions;

use crate::device::Device;
use crate::device::sharing::gpu_ranks::GpuRanks;
use crate::device::sharing::queues;
use crate::error::Error;
use crate::group::fabric::Fabric;
#[cfg(feature = "simulator")]
use crate::group::simulated::SimulatedFabric;
use crate::tensor::handles::Stream;

/// The ranks that exchange tokens, and the fabric between them. Cheap to clone; clones are the same group.
///
/// There are four kinds. `Group::simulated` needs the feature `simulator`, a default one. `Group::local` (one
/// process drives several GPUs) and `Group::node` (one process per GPU, all on one node) need the
/// crate's feature `cuda`, `Group::nvshmem` (one process per GPU, on several nodes) its feature
/// `nvshmem`; without the feature they return [`Error::NotBuilt`]. With
/// [`share_gpus`](crate::GroupOptions::share_gpus) a GPU may have several ranks.
///
/// Nothing brings a lost rank back. The remaining ones close what they have, meet again and make a new group;
/// or the same one goes on, if the lost rank is only a thread. [The
/// guide](crate::guide::recovery#after-a-rank-was-lost) has the steps.
#[derive(Clone)]
pub struct Group {
    pub(crate) fabric: Arc<dyn Fabric>,
    /// Number of this process's communicators that are open or that a graph will launch; `None` once the
    /// group is closed.
    members: Arc<Mutex<Option<usize>>>,
    /// Held while a communicator is made: its steps are not mixed with those of another one.
    beginning: Arc<Mutex<()>>,
    /// Streams of [checks of links](Self::check_links), of the first ranks of this process.
    pub(crate) check_streams: Arc<Mutex<Vec<Stream>>>,
}

impl std::fmt::Debug for Group {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Group")
            .field("kind", &self.fabric.name())
            .field("ranks", &self.fabric.ranks())
            .field("local_ranks", &self.fabric.local_ranks())
            .finish_non_exhaustive()
    }
}

/// Counts a communicator of a group whose kernels may be launched.
pub(crate) struct Member(Arc<Mutex<Option<usize>>>);

impl Drop for Member {
    fn drop(&mut self) {
        let mut members = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *members = members.map(|count| count - 1);
    }
}

impl Group {
    /// Group of `ranks` simulated ranks in this process. `seed` decides every choice of the simulation. Not
    /// collective.
    ///
    /// If one thread drives several ranks, enqueue on all of them first, then wait for each: an earlier wait
    /// is for peers that launch nothing, and ends at the deadline.
    ///
    /// The simulation runs while some thread waits in
    /// [`Communicator::synchronize`](crate::Communicator::synchronize), in a time of its own:
    /// each step of the scheduler takes 100 ns of it. A deadline passes when that much simulated time has
    /// passed, or when nothing more can happen: at once if every rank has a kernel running or was lost;
    /// otherwise some thread may still launch one, and until it does, simulated time passes as wall
    /// time does: each launch that waits in vain gives up about its own deadline after it began,
    /// however many others wait. [`SimulatorOptions::patience`] sets another time, after which the next
    /// deadline passes if nothing was launched. A [`Fault`](crate::Fault) caused by this names
    /// that time, or the deadline, in `patience_ms`.
    ///
    /// # Errors
    /// [`Error::RankCount`] for zero ranks or more than [`MAX_RANKS`].
    #[cfg(feature = "simulator")]
    pub fn simulated(ranks: u32, seed: u64) -> Result<Self, Error> {
        Self::simulated_with(SimulatorOptions::new(ranks, seed))
    }

    /// [`simulated`](Self::simulated) with all options: stalls, a rank that dies. Not collective.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use ferry::Group;
    /// use ferry::simulator::Options as SimulatorOptions;
    ///
    /// # fn main() -> Result<(), ferry::Error> {
    /// // Two ranks; a missing one is noticed after 50 ms, whatever the deadline.
    /// let group = Group::simulated_with(SimulatorOptions {
    ///     patience: Some(Duration::from_millis(50)),
    ///     ..SimulatorOptions::new(2, 7)
    /// })?;
    /// # group.close()
    /// # }
    /// ```
    ///
    /// # Errors
    /// Those of [`simulated`](Self::simulated).
    #[cfg(feature = "simulator")]
    pub fn simulated_with(options: SimulatorOptions) -> Result<Self, Error> {
        require_ranks(options.ranks)?;
        Self::with_fabric(Box::new(SimulatedFabric::new(options)?))
    }

    /// Group of simulated ranks that are processes, for tests and first steps without GPUs. Rank 0's process
    /// runs the simulation, with its `options`, and all talk to it over a Unix socket at `path`, which other
    /// users cannot open; of the `options` of other ranks the number of ranks counts. Collective: returns
    /// after all have joined; a rank that does not come is waited for as long as `timeout`, here and when
    /// communicators and the group begin and end.
    ///
    /// Rank 0 replaces no file but a socket at which nobody listens, and removes its own before this returns.
    /// While it makes and removes the socket it holds a lock of the path, an empty file `<path>.lock`, which
    /// goes with it.
    /// Give each job a path of its own, or a [`key`](SimulatorOptions::key): ranks with another one are sent
    /// away. Two ranks 0 at a path while ranks meet are an error on all ranks there.
    ///
    /// A process that ends is a lost rank. If rank 0's ends, all calls of the others fail at once.
    ///
    /// # Errors
    /// [`Error::Simulator`]; [`Error::RankCount`] for zero ranks or more than [`MAX_RANKS`].
    #[cfg(feature = "simulator")]
    pub fn simulated_at(
        path: &Path,
        rank: Rank,
        options: &SimulatorOptions,
        timeout: Duration,
    ) -> Result<Self, Error> {
        require_ranks(options.ranks)?;
        Self::with_fabric(Box::new(SimulatedFabric::join(
            path, rank, options, timeout,
        )?))
    }

    /// Group over a fabric of your own, which only the group closes. Not collective.
    ///
    /// # Errors
    /// [`Error::RankCount`] for zero ranks or more than [`MAX_RANKS`],
    /// [`Error::NoLocalRanks`] if none is in this process.
    pub fn with_fabric(fabric: Box<dyn Fabric>) -> Result<Self, Error> {
        let ranks = fabric.ranks();
        require_ranks(ranks)?;
        if fabric.local_ranks().is_empty() {
            return Err(Error::NoLocalRanks { ranks });
        }
        if let Some(most) = most_on_a_gpu(&*fabric).filter(|&most| most > 1) {
            queues::warn(most);
        }
        Ok(Self {
            fabric: fabric.into(),
            members: Arc::new(Mutex::new(Some(0))),
            beginning: Arc::default(),
            check_streams: Arc::default(),
        })
    }

    /// Number of ranks of the whole group.
    pub fn ranks(&self) -> u32 {
        self.fabric.ranks()
    }

    /// The ranks that this process drives, ascending.
    pub fn local_ranks(&self) -> Vec<Rank> {
        self.fabric.local_ranks()
    }

    /// The device of a rank of this process, for tensors and streams.
    ///
    /// # Errors
    /// [`Error::NotLocal`].
    pub fn device(&self, rank: Rank) -> Result<Arc<dyn Device>, Error> {
        let local = self.fabric.local_ranks();
        if !local.contains(&rank) {
            let local = local.iter().map(|rank| rank.0).collect();
            return Err(Error::NotLocal { rank, local });
        }
        self.fabric.device(rank)
    }

    /// The GPU of a rank and the ranks on it; `None` for ranks without one, as in the simulator.
    pub fn gpu_ranks(&self, rank: Rank) -> Option<&GpuRanks> {
        self.fabric.gpu_ranks(rank)
    }

    /// The CUDA device of a rank of this process, for graphs and events; `None` for the ranks of
    /// other processes, and if devices are not CUDA's.
    #[cfg(feature = "cuda")]
    pub fn cuda(&self, rank: Rank) -> Option<Arc<crate::cuda::CudaDevice>> {
        self.fabric.cuda(rank)
    }

    /// Leaves the group, also for its clones: no communicator can be made of it any more
    /// ([`Error::GroupClosed`]). Close its communicators and drop their graphs
    /// first. Collective. Synchronizes. An NVSHMEM group that is dropped instead stays joined until the
    /// process ends; a local or simulated one may be dropped as well.
    ///
    /// A node group waits for all work on its device, unmaps the remaining windows of other ranks
    /// (of communicators that gave up or were dropped), and frees its own once all ranks
    /// have said that they did the same. If a rank does not, because it was lost or failed, the
    /// error names it, and those windows are leaked, with a warning, as are those of a node group
    /// that is dropped instead. In either case the process may form a new group.
    ///
    /// Leaving an NVSHMEM job waits inside NVSHMEM for every rank, as allocating and freeing
    /// windows does, and nothing bounds that wait. So all ranks come to a barrier of their
    /// [`Bootstrap`](crate::bootstrap::Bootstrap) first. If the barrier fails, because a rank was lost, its
    /// error is returned, and this process stays joined until it ends. Two things can still wait for
    /// ever: NVSHMEM itself, if a rank is lost just as the barrier lets all go on
    /// ([`TcpBootstrap`](crate::bootstrap::TcpBootstrap) says when), or after it and before its call is over;
    /// and a bootstrap whose own waits do not end, such as MPI's.
    ///
    /// # Errors
    /// [`Error::CommunicatorsOpen`]: nothing was done, and it can be called again.
    /// [`Error::Bootstrap`] that names the lost rank if it is known, and errors of the fabric.
    pub fn close(&self) -> Result<(), Error> {
        // Held until the end: a communicator that begins finds the group closed, or is found here.
        let mut members = self.members.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(communicators) = members.filter(|&count| count > 0) {
            return Err(Error::CommunicatorsOpen { communicators });
        }
        *members = None;
        // SAFETY: no communicator of this group is open or will be launched by a graph (`members`), and none
        // begins from now on (`enter`). Another group over the fabric has none either: documented on
        // `Group::fabric`.
        unsafe { self.fabric.close() }
    }

    /// The kind: "local", "node", "nvshmem", "simulated".
    pub fn name(&self) -> &'static str {
        self.fabric.name()
    }

    /// Whether ranks of other nodes can be reached, so that `p2p_world_size` may be less than
    /// the number of ranks.
    pub fn reaches_other_nodes(&self) -> bool {
        self.fabric.reaches_other_nodes()
    }

    /// Waits until no other thread of this process makes a communicator of the group.
    pub(crate) fn turn(&self) -> MutexGuard<'_, ()> {
        (self.beginning.lock()).unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a communicator in.
    ///
    /// # Errors
    /// [`Error::GroupClosed`].
    pub(crate) fn enter(&self) -> Result<Member, Error> {
        let mut members = self.members.lock().unwrap_or_else(PoisonError::into_inner);
        *members.as_mut().ok_or(Error::GroupClosed)? += 1;
        Ok(Member(self.members.clone()))
    }

    /// The fabric of the group, for tests that wrap it in one of their own.
    ///
    /// # Safety
    /// Neither the fabric nor a group over it is closed while this group has communicators or they
    /// have graphs, nor this group while another group over it has.
    #[doc(hidden)]
    pub unsafe fn fabric(&self) -> &Arc<dyn Fabric> {
        &self.fabric
    }
}

/// Refuses a number of ranks that no group can have.
fn require_ranks(ranks: u32) -> Result<(), Error> {
    match ranks {
        1..=MAX_RANKS => Ok(()),
        _ => Err(Error::RankCount { ranks }),
    }
}

/// Largest number of this process's ranks on one GPU.
fn most_on_a_gpu(fabric: &dyn Fabric) -> Option<usize> {
    let local = fabric.local_ranks();
    let gpus = local.iter().filter_map(|&rank| fabric.gpu_ranks(rank));
    let here = |gpu: &GpuRanks| gpu.ranks().filter(|rank| local.contains(rank)).count();
    gpus.map(here).max()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::tensor::handles::DevicePtr;
    use ferry_layout::Shape;

    #[test]
    fn zero_ranks_and_too_many_are_refused() {
        assert!(matches!(
            Group::simulated(0, 1),
            Err(Error::RankCount { ranks: 0 })
        ));
        assert!(Group::simulated(MAX_RANKS, 1).is_ok());
        for ranks in [MAX_RANKS + 1, u32::MAX] {
            let of_fabric = Group::with_fabric(Box::new(Elsewhere(ranks, &[])));
            for refused in [of_fabric, Group::simulated(ranks, 1)] {
                let text = refused.unwrap_err().to_string();
                assert_eq!(text, format!("ranks is {ranks}, but a group has 1 to 64"));
            }
        }
    }

    /// A fabric of that many ranks, of which these are in this process.
    pub(crate) struct Elsewhere(pub(crate) u32, pub(crate) &'static [u32]);

    // SAFETY: it has no devices, and every call that would return memory panics.
    unsafe impl Fabric for Elsewhere {
        fn name(&self) -> &'static str {
            "elsewhere"
        }
        fn ranks(&self) -> u32 {
            self.0
        }
        fn local_ranks(&self) -> Vec<Rank> {
            self.1.iter().copied().map(Rank).collect()
        }
        fn device(&self, _: Rank) -> Result<Arc<dyn Device>, Error> {
            unreachable!()
        }
        fn reaches_other_nodes(&self) -> bool {
            unreachable!()
        }
        fn all_gather(&self, _: u64) -> Result<Vec<u64>, Error> {
            unreachable!()
        }
        fn barrier(&self) -> Result<(), Error> {
            unreachable!()
        }
        fn alloc_windows(&self, _: u64) -> Result<Vec<DevicePtr>, Error> {
            unreachable!()
        }
        fn peer_windows(
            &self,
            _: Rank,
            _: &[DevicePtr],
            _: &Shape,
        ) -> Result<Vec<DevicePtr>, Error> {
            unreachable!()
        }
        unsafe fn free_windows(&self, _: &[DevicePtr]) -> Result<(), Error> {
            unreachable!()
        }
    }

    #[test]
    fn a_process_without_ranks_is_refused() {
        let error = Group::with_fabric(Box::new(Elsewhere(3, &[])))
            .err()
            .unwrap();
        assert!(matches!(error, Error::NoLocalRanks { ranks: 3 }), "{error}");
    }

    #[test]
    fn a_rank_of_another_process_has_no_device_here() {
        let group = Group::simulated(2, 1).unwrap();
        assert!(group.device(Rank(1)).is_ok());
        let Err(Error::NotLocal {
            rank: Rank(2),
            local,
        }) = group.device(Rank(2))
        else {
            panic!("rank 2 has a device");
        };
        assert_eq!(local, [0, 1]);
    }
}
