//! Who takes part.

pub(crate) mod bootstrap;
pub(crate) mod fabric;
#[cfg(any(feature = "cuda", test))]
pub(crate) mod job;
#[cfg(feature = "cuda")]
pub(crate) mod local;
#[cfg(any(feature = "cuda", test))]
pub(crate) mod node;
#[cfg(feature = "nvshmem")]
pub(crate) mod nvshmem;
#[cfg(feature = "cuda")]
pub(crate) mod options;
#[cfg(feature = "simulator")]
pub(crate) mod simulated;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ferry_layout::{MAX_RANKS, Rank};
#[cfg(feature = "simulator")]
use ferry_simulator::Options as SimulatorOptions;

use crate::device::Device;
use crate::device::sharing::gpu_ranks::GpuRanks;
use crate::device::sharing::queues;
use crate::error::Error;
#[cfg(feature = "cuda")]
use crate::group::bootstrap::Bootstrap;
use crate::group::fabric::Fabric;
#[cfg(feature = "cuda")]
use crate::group::options::GroupOptions;
#[cfg(feature = "simulator")]
use crate::group::simulated::SimulatedFabric;

/// The ranks that exchange tokens, and how they reach each other. Cheap to clone; clones are the
/// same group.
///
/// There are four kinds. `Group::simulated` needs the feature `simulator`, a default one. `Group::local` (one
/// process drives several GPUs) and `Group::node` (one process a GPU, all on one node) need the
/// crate's feature `cuda`, `Group::nvshmem` (one process a GPU, on several nodes) its feature
/// `nvshmem`, and do not exist without. With `GroupOptions::share_gpus` a GPU may have several ranks.
///
/// # After a rank was lost
///
/// A rank is lost to the others when its process ends, when its machine or its network fails, and
/// when it does not make a call that they make. Nothing brings it back into a communicator. Each
/// rank that is left takes these steps, in this order, by itself. No step waits for the lost rank
/// longer than the [`deadline`](crate::Config::deadline), or the bootstrap's own.
///
/// 1. **Learn of it.** [`synchronize`](crate::Communicator::synchronize) gives [`Error::Fault`] with a
///    [`PeerTimeout`](crate::FaultKind), at the latest a deadline after the kernel began; its
///    `culprit` is the lost rank (after split calls between nodes, perhaps one that gave up
///    itself). A call that the bootstrap takes part in gives [`Error::Bootstrap`], whose
///    [`lost_rank`](crate::error::BootstrapError::lost_rank) it is where that is known. A rank whose own
///    round ended well learns it in the next one, as the others do not come. A rank that launched a
///    graph [out of turn](crate::FaultKind::OutOfTurn) is lost, too. A rank that came late itself
///    learns from `synchronize` that a peer gave up on it ([`Error::PeerGaveUp`]), if that peer's
///    deadline has passed by then. Nobody has to tell anybody.
/// 2. **Close the communicators.** Drop their graphs, and
///    [say so](crate::Communicator::assume_no_foreign_graphs) of those that others made, then
///    [`close_all`](crate::Communicator::close_all). A communicator that gave up waits for nobody. One
///    whose round is open and that has not given up is refused ([`Error::RoundOpen`]): enqueue the rest of
///    the round and wait for it, which ends by the deadline, or drop it. One that has
///    finished its round waits for the bootstrap, and has its error. Either way the rank's own memory is
///    free; note the error, and go on.
/// 3. **Close the group**, if it spans processes, and drop it. [`close`](Self::close) of a node
///    group gives an error that names the lost rank; note it, and go on: this rank's windows are
///    leaked, as the lost one may have them mapped; all else is given back. A process that was in
///    an NVSHMEM group stays in NVSHMEM's job: it ends here, and a new one takes the next steps. A
///    group whose ranks are all in this process stays as it is, and step 6 may use it again with
///    all ranks, if the lost one is only a thread that did not call: then plan and buffers serve again, too.
/// 4. **Agree on who is left.** Ferry cannot: who starts the processes says which of them go on, their new
///    numbers (from 0, without gaps), and where they meet, at an address that was not used before.
///    All are told the same.
/// 5. **Meet again**: a new [`Bootstrap`](crate::bootstrap::Bootstrap), and of it a new group, in the same
///    processes.
/// 6. **Plan anew.** The new number of ranks divides `experts`; rank `r` holds experts
///    `r * experts / ranks` and up, so load those of the lost rank, and have the router name them. Make
///    a new [`Plan`](crate::Plan), communicators and buffers, whose sizes depend on the number of ranks.
/// 7. **Repeat.** What the last round left in its outputs counts on no rank: some have their sums, others a
///    part of them. Agree on a step of your model that all have finished, and go on behind it.
#[derive(Clone)]
pub struct Group {
    pub(crate) fabric: Arc<dyn Fabric>,
    /// Communicators of this process that are open, or that a graph will launch.
    members: Arc<Mutex<usize>>,
    /// Held while a communicator is made: its steps are not mixed with those of another one.
    beginning: Arc<Mutex<()>>,
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
pub(crate) struct Member(Arc<Mutex<usize>>);

impl Drop for Member {
    fn drop(&mut self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
    }
}

impl Group {
    /// `ranks` simulated ranks in this process. `seed` decides every choice of the simulation.
    ///
    /// Where one thread drives several ranks, enqueue on all of them first, then wait for each: a wait before
    /// that is for peers that launch nothing, and ends at the deadline.
    ///
    /// The simulation runs while some thread waits in
    /// [`Communicator::synchronize`](crate::Communicator::synchronize), in a time of its own,
    /// of which a step takes 100 ns. A deadline passes when so much of that time has passed, or
    /// when nothing more can happen: at once if every rank has a kernel running or was lost;
    /// otherwise some thread may still launch one, and until it does, simulated time passes as wall
    /// time does: each launch that waits in vain gives up about its own deadline after it began,
    /// however many others wait. [`SimulatorOptions::patience`] sets another time, after which the next
    /// deadline passes if nothing was launched. A [`Fault`](crate::Fault) that came of it names
    /// that time, or the deadline, in `patience_ms`.
    ///
    /// # Errors
    /// [`Error::RankCount`] for zero ranks or more than [`MAX_RANKS`].
    #[cfg(feature = "simulator")]
    pub fn simulated(ranks: u32, seed: u64) -> Result<Self, Error> {
        Self::simulated_with(SimulatorOptions::new(ranks, seed))
    }

    /// As [`simulated`](Self::simulated), with more to choose: stalls, a rank that dies.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use ferry::Group;
    /// use ferry::simulator::Options as SimulatorOptions;
    ///
    /// # fn main() -> Result<(), ferry::Error> {
    /// // Two ranks that are missed after 50 ms, whatever the deadline.
    /// let group = Group::simulated_with(SimulatorOptions {
    ///     patience: Some(Duration::from_millis(50)),
    ///     ..SimulatorOptions::new(2, 7)
    /// })?;
    /// # group.close()
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`simulated`](Self::simulated).
    #[cfg(feature = "simulator")]
    pub fn simulated_with(options: SimulatorOptions) -> Result<Self, Error> {
        require_ranks(options.ranks)?;
        Self::with_fabric(Box::new(SimulatedFabric::new(options)?))
    }

    /// One rank a GPU, all driven by this process, over peer access. `devices` are CUDA device
    /// numbers; rank `r` is `devices[r]`. Not collective. Synchronises the devices.
    ///
    /// ```no_run
    /// use ferry::{Group, GroupOptions};
    ///
    /// # fn main() -> Result<(), ferry::Error> {
    /// let group = Group::local(&[0, 1, 2, 3], &GroupOptions::default())?;
    /// # group.close()
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::RankCount`], [`Error::DeviceListedTwice`], [`Error::NoSuchDevice`],
    /// [`Error::NoPeerAccess`], [`Error::LibraryMissing`] without a CUDA driver,
    /// [`Error::Driver`], also for kernels of other devices, [`Error::Cuda`].
    #[cfg(feature = "cuda")]
    pub fn local(devices: &[usize], options: &GroupOptions) -> Result<Self, Error> {
        Self::with_fabric(Box::new(local::LocalFabric::new(devices, options)?))
    }

    /// One process a GPU, all on one node, over peer access. Needs nothing but the driver: the processes give
    /// each other their windows as CUDA IPC handles, through `bootstrap`, which also numbers the
    /// ranks. `device` is the number of this process's GPU among those that it sees; it need not
    /// see the others. Collective. Synchronises.
    ///
    /// Every step is agreed on: a rank that cannot take part has the reason, and all others have
    /// [`Error::PeerFailed`] with its number. A rank that does not come at all ends the others'
    /// wait where the bootstrap's deadline does. Before this returns, each rank has mapped a small
    /// window of every other one, so that a machine without CUDA IPC is found here. Processes in
    /// containers need one IPC namespace and one PID namespace.
    ///
    /// # Errors
    /// [`Error::Node`] (different nodes, different numbers of ranks, no peer access, no CUDA IPC),
    /// [`Error::GpuShared`], [`Error::PeerFailed`], [`Error::Bootstrap`], [`Error::RankCount`],
    /// [`Error::NoSuchDevice`], [`Error::LibraryMissing`] without a CUDA driver, [`Error::Driver`], also
    /// for kernels of other devices, [`Error::Cuda`].
    #[cfg(feature = "cuda")]
    pub fn node(
        bootstrap: Box<dyn Bootstrap>,
        device: usize,
        options: &GroupOptions,
    ) -> Result<Self, Error> {
        let open = || node::ipc::Ipc::open(device, options);
        let fabric = node::fabric::NodeFabric::join(bootstrap, open)?;
        Self::with_fabric(Box::new(fabric))
    }

    /// One process a GPU, over NVLink inside a node and NVSHMEM between nodes. `device` is the number of
    /// this process's GPU. Kernels of yours were linked with NVSHMEM's device code, as Ferry's are.
    /// Collective.
    ///
    /// # Errors
    /// [`Error::Bootstrap`], [`Error::GpuShared`], [`Error::LibraryMissing`] without a CUDA driver or
    /// NVSHMEM's library, [`Error::Nvshmem`], [`Error::NoSuchDevice`], [`Error::Cuda`];
    /// [`Error::Driver`], also for kernels of other devices, and [`Error::Kernels`] for kernels that were
    /// built without NVSHMEM; [`Error::SharedGpu`] if ranks share a GPU without MPS.
    #[cfg(feature = "nvshmem")]
    pub fn nvshmem(
        bootstrap: Box<dyn Bootstrap>,
        device: usize,
        options: &GroupOptions,
    ) -> Result<Self, Error> {
        let fabric = nvshmem::NvshmemFabric::new(bootstrap, device, options)?;
        Self::with_fabric(Box::new(fabric))
    }

    /// A group over a fabric of your own, which it alone closes.
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
            members: Arc::default(),
            beginning: Arc::default(),
        })
    }

    /// Ranks of the whole group.
    pub fn ranks(&self) -> u32 {
        self.fabric.ranks()
    }

    /// The ranks that this process drives, ascending.
    pub fn local_ranks(&self) -> Vec<Rank> {
        self.fabric.local_ranks()
    }

    /// The device of a rank of this process.
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

    /// The GPU of a rank, and which ranks are on it; `None` where ranks have none, as in the simulator. Not
    /// collective.
    pub fn gpu_ranks(&self, rank: Rank) -> Option<&GpuRanks> {
        self.fabric.gpu_ranks(rank)
    }

    /// The CUDA device of a rank of this process, for graphs and events; `None` for the ranks of
    /// other processes, and where devices are not CUDA's.
    #[cfg(feature = "cuda")]
    pub fn cuda(&self, rank: Rank) -> Option<Arc<crate::cuda::CudaDevice>> {
        self.fabric.cuda(rank)
    }

    /// Leaves the group, which its clones leave as well. Close its communicators and drop their graphs
    /// first. Collective. Synchronises. An NVSHMEM group that is dropped instead stays joined until the
    /// process ends; for a local or simulated one it makes no difference.
    ///
    /// A node group waits for what is at work on its device, unmaps the windows of other ranks that
    /// are left (of communicators that gave up or were dropped), and frees its own once all ranks
    /// have said that they did the same. Where a rank does not, because it was lost or failed, the
    /// error says so, and those windows are leaked, with a warning, as are those of a node group
    /// that is dropped instead. In either case the process may form a new group.
    ///
    /// Leaving an NVSHMEM job waits inside NVSHMEM for every rank, as allocating and freeing
    /// windows does, and nothing bounds that. So all ranks come to a barrier of their
    /// [`Bootstrap`](crate::bootstrap::Bootstrap) first. Where that fails, because a rank was lost, its error
    /// is returned, and this process stays joined until it ends. Two things can still wait for
    /// ever: NVSHMEM itself, if a rank is lost just when the barrier lets all go on
    /// ([`TcpBootstrap`](crate::bootstrap::TcpBootstrap) says when), or after it and before its call is over;
    /// and a bootstrap whose own waits do not end, as MPI's.
    ///
    /// # Errors
    /// [`Error::CommunicatorsOpen`]: nothing was done, and it can be called again.
    /// [`Error::Bootstrap`] that names the lost rank where it is known, and what the group reports.
    pub fn close(&self) -> Result<(), Error> {
        // Held meanwhile: a communicator that begins finds the group closed, or is found.
        let members = self.members.lock().unwrap_or_else(PoisonError::into_inner);
        match *members {
            // SAFETY: no communicator of this group is open or will be launched by a graph, and
            // none begins while the count is held. No other group has the fabric, unless by
            // `fabric`, whose caller promised as much of that.
            0 => unsafe { self.fabric.close() },
            communicators => Err(Error::CommunicatorsOpen { communicators }),
        }
    }

    /// The kind: "local", "node", "nvshmem", "simulated".
    pub fn name(&self) -> &'static str {
        self.fabric.name()
    }

    /// Whether ranks of other nodes can be reached at all, so that `p2p_world_size` may be below
    /// the number of ranks.
    pub fn reaches_other_nodes(&self) -> bool {
        self.fabric.reaches_other_nodes()
    }

    /// Waits until no other thread of this process makes a communicator of the group.
    pub(crate) fn turn(&self) -> MutexGuard<'_, ()> {
        (self.beginning.lock()).unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a communicator in.
    pub(crate) fn enter(&self) -> Member {
        *self.members.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        Member(self.members.clone())
    }

    /// What it is a group over, for tests that put one of their own between.
    ///
    /// # Safety
    /// Neither the fabric nor a group over it is closed while this group has communicators or they
    /// have graphs, nor this group while another group over it has.
    #[doc(hidden)]
    pub unsafe fn fabric(&self) -> &Arc<dyn Fabric> {
        &self.fabric
    }
}

/// Refuses a number of ranks that no group has.
fn require_ranks(ranks: u32) -> Result<(), Error> {
    match ranks {
        1..=MAX_RANKS => Ok(()),
        _ => Err(Error::RankCount { ranks }),
    }
}

/// Most ranks of this process that are on one GPU.
fn most_on_a_gpu(fabric: &dyn Fabric) -> Option<usize> {
    let local = fabric.local_ranks();
    let gpus = local.iter().filter_map(|&rank| fabric.gpu_ranks(rank));
    let here = |gpu: &GpuRanks| gpu.ranks().filter(|rank| local.contains(rank)).count();
    gpus.map(here).max()
}

#[cfg(test)]
mod tests {
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
            let of_fabric = Group::with_fabric(Box::new(Elsewhere(ranks)));
            for refused in [of_fabric, Group::simulated(ranks, 1)] {
                let text = refused.unwrap_err().to_string();
                assert_eq!(text, format!("ranks is {ranks}, but a group has 1 to 64"));
            }
        }
    }

    /// Has so many ranks, all of them elsewhere.
    struct Elsewhere(u32);

    // SAFETY: it has no device and gives nothing.
    unsafe impl Fabric for Elsewhere {
        fn name(&self) -> &'static str {
            "elsewhere"
        }
        fn ranks(&self) -> u32 {
            self.0
        }
        fn local_ranks(&self) -> Vec<Rank> {
            Vec::new()
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
        let error = Group::with_fabric(Box::new(Elsewhere(3))).err().unwrap();
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
