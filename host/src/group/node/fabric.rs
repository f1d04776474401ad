//! A rank's membership of a node group.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ferry_layout::{Rank, Shape};

use super::exchange::{Asked, Share, Shared, exchange, release};
use super::introduction::{Introduction, on_gpus, require_group};
use super::time_slices;
use crate::device::Device;
use crate::device::sharing::gpu_ranks::GpuRanks;
use crate::device::sharing::own_gpu::takes_turns;
use crate::error::bootstrap::BootstrapError;
use crate::error::{Error, NodeError, leak};
use crate::group::bootstrap::Bootstrap;
use crate::group::fabric::Fabric;
use crate::group::job::{agree, gather_numbers, wrong_length};
use crate::tensor::handles::DevicePtr;

/// Steps of the trial, each of which succeeds on all ranks or fails on all.
const WRITING: &str = "writing into a shared window";
const READING: &str = "reading the windows of the other ranks";
/// The step before a communicator's windows are freed.
const CLOSING: &str = "closing a communicator";

/// One rank of this process, and the windows of all others mapped here.
///
/// [`close`](Fabric::close) leaves the group. A drop leaks the windows that were not freed,
/// because other processes may have mapped them.
pub(crate) struct NodeFabric<S: Share> {
    rank: Rank,
    ranks: u32,
    gpus: Vec<GpuRanks>,
    device: Arc<dyn Device>,
    #[cfg(feature = "cuda")]
    cuda: Option<Arc<crate::cuda::CudaDevice>>,
    /// Held during every exchange with the other ranks, so that there is one at a time.
    member: Mutex<Member<S>>,
}

/// This process's membership, and the way to the other ranks.
struct Member<S> {
    bootstrap: Box<dyn Bootstrap>,
    share: S,
    is_open: bool,
    /// Number of windows allocated so far: the same on every rank.
    count: u64,
    /// Windows that were not freed.
    windows: Vec<Shared>,
}

impl<S: Share> Member<S> {
    /// The bootstrap, unless the group was left: then the other ranks do not come any more.
    fn bootstrap(&mut self) -> Result<&mut dyn Bootstrap, Error> {
        if self.is_open {
            return Ok(&mut *self.bootstrap);
        }
        Err(Error::GroupClosed)
    }

    fn alloc(&mut self, bytes: u64) -> Result<DevicePtr, Error> {
        self.bootstrap()?;
        self.count += 1;
        let own = self.share.alloc(bytes);
        let asked = Asked {
            number: self.count,
            bytes,
        };
        let shared = exchange(&mut *self.bootstrap, &self.share, asked, own)?;
        let own = shared.own;
        self.windows.push(shared);
        Ok(own)
    }

    /// Shares a small window as a test: each rank writes a number into its own, sends it to all, and
    /// looks for the other ranks' numbers where it has mapped their windows. Collective.
    fn try_windows(&mut self, rank: Rank) -> Result<(), Error> {
        let own = self.alloc(size_of::<u64>() as u64)?;
        let tried = self.compare_numbers(rank, own);
        // SAFETY: no kernel was launched.
        let freed = unsafe { self.free(&[own]) };
        tried.and(freed)
    }

    fn compare_numbers(&mut self, rank: Rank, own: DevicePtr) -> Result<(), Error> {
        let device = self.share.device();
        // A hasher begins with a random number. A process and its fork may draw the same, but ranks differ.
        let random = RandomState::new().build_hasher().finish();
        let number = random ^ (u64::from(rank.0) + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let number = number.to_le_bytes();
        let written = device.upload(own, &number);
        let tell = |(): &()| number.to_vec();
        let (_, numbers) = agree(&mut *self.bootstrap, WRITING, written, tell)?;
        let shared = self.windows.iter().find(|shared| shared.own == own);
        let shared = shared.ok_or(Error::GroupClosed)?;
        let mut peers = (0..).map(Rank).zip(&numbers);
        let read = peers.try_for_each(|(peer, number)| {
            let mut found = [0; size_of::<u64>()];
            device.download(shared.of(peer), &mut found)?;
            if &found[..] == number {
                return Ok(());
            }
            Err(Error::Node(NodeError::OtherMemory { rank, peer }))
        });
        agree(&mut *self.bootstrap, READING, read, |()| Vec::new())?;
        Ok(())
    }

    /// Frees those of `windows` that are this group's. Collective.
    ///
    /// # Safety
    /// No kernel of any rank uses them any more.
    unsafe fn free(&mut self, windows: &[DevicePtr]) -> Result<(), Error> {
        self.bootstrap()?;
        let all = std::mem::take(&mut self.windows);
        let (freed, kept) = all
            .into_iter()
            .partition(|shared| windows.contains(&shared.own));
        self.windows = kept;
        let freed: Vec<Shared> = freed;
        // SAFETY: they were in `self.windows` until now, and no kernel of any rank uses them any more:
        // documented on this function.
        unsafe { release(&mut *self.bootstrap, &self.share, Ok(()), &freed) }
    }

    /// Frees all remaining windows, once. Collective.
    ///
    /// # Safety
    /// This process launches no kernel any more that uses windows.
    unsafe fn leave(&mut self) -> Result<(), Error> {
        if !self.is_open {
            return Ok(());
        }
        self.is_open = false;
        let windows = std::mem::take(&mut self.windows);
        // Kernels of a communicator that was dropped may still be at work. They end at their deadline.
        let ready = if windows.is_empty() {
            Ok(())
        } else {
            self.share.drain()
        };
        // SAFETY: they were in `self.windows` until now. No kernel is launched any more (documented on this
        // function), and if `ready` is `Ok`, none is at work.
        unsafe { release(&mut *self.bootstrap, &self.share, ready, &windows) }
    }
}

impl<S: Share> NodeFabric<S> {
    /// Checks whether the processes of `bootstrap` can be a group, and maps a small
    /// window of each rank on all others, as a test. `open` opens this process's
    /// device. If one rank cannot, all fail. Collective.
    pub(crate) fn join(
        mut bootstrap: Box<dyn Bootstrap>,
        open: impl FnOnce() -> Result<S, Error>,
    ) -> Result<Self, Error> {
        let (rank, ranks) = (bootstrap.rank(), bootstrap.ranks());
        if ranks == 0 {
            return Err(Error::RankCount { ranks: 0 });
        }
        if rank >= ranks {
            return Err(Error::Bootstrap(BootstrapError::NotAmong { rank, ranks }));
        }
        let opened = open().and_then(|share| {
            let place = share.place()?;
            Ok((share, Introduction { rank, ranks, place }))
        });
        let said = |(_, introduction): &(S, Introduction)| introduction.to_bytes();
        let step = "opening the device";
        let ((share, _), said) = agree(&mut *bootstrap, step, opened, said)?;
        let all = said.iter().enumerate().map(|(rank, bytes)| {
            Introduction::from_bytes(bytes)
                .ok_or_else(|| wrong_length(rank, bytes.len(), Introduction::LEAST_BYTES))
        });
        let all: Vec<_> = all.collect::<Result<_, _>>()?;
        let gpus = require_group(&all, ranks)?;
        let others = all.iter().filter(|other| other.rank != rank);
        let mut access = others
            .map(|other| share.require_access(Rank(rank), Rank(other.rank), &other.place.gpu));
        let access = access.try_for_each(|access| access);
        let step = "looking for peer access";
        agree(&mut *bootstrap, step, access, |()| Vec::new())?;
        let device = share.device();
        #[cfg(feature = "cuda")]
        let cuda = share.cuda();
        let mut member = Member {
            bootstrap,
            share,
            is_open: true,
            count: 0,
            windows: Vec::new(),
        };
        member.try_windows(Rank(rank))?;
        if takes_turns(&gpus, &on_gpus(&all)) == Some(Rank(rank)) {
            time_slices::warn(Rank(rank));
        }
        Ok(Self {
            rank: Rank(rank),
            ranks,
            gpus,
            device,
            #[cfg(feature = "cuda")]
            cuda,
            member: Mutex::new(member),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Member<S>> {
        self.member.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn require_local(&self, rank: Rank) -> Result<(), Error> {
        if rank == self.rank {
            return Ok(());
        }
        let local = vec![self.rank.0];
        Err(Error::NotLocal { rank, local })
    }
}

// SAFETY: each window is memory of this rank's device, of at least the requested size. Those of
// peers are mapped by the device when the windows are allocated, and unmapped when they are freed
// or the group is closed; their owners keep them until then. `reaches_other_nodes` is false.
// The bootstrap's collectives are `all_gather` and `barrier`.
unsafe impl<S: Share> Fabric for NodeFabric<S> {
    fn name(&self) -> &'static str {
        "node"
    }

    fn ranks(&self) -> u32 {
        self.ranks
    }

    fn local_ranks(&self) -> Vec<Rank> {
        vec![self.rank]
    }

    fn device(&self, rank: Rank) -> Result<Arc<dyn Device>, Error> {
        self.require_local(rank)?;
        Ok(self.device.clone())
    }

    fn gpu_ranks(&self, rank: Rank) -> Option<&GpuRanks> {
        GpuRanks::of(&self.gpus, rank)
    }

    #[cfg(feature = "cuda")]
    fn cuda(&self, rank: Rank) -> Option<Arc<crate::cuda::CudaDevice>> {
        self.cuda.clone().filter(|_| rank == self.rank)
    }

    fn reaches_other_nodes(&self) -> bool {
        false
    }

    fn all_gather(&self, value: u64) -> Result<Vec<u64>, Error> {
        gather_numbers(self.lock().bootstrap()?, value)
    }

    /// Sends the step's name: a rank that gave up closes the whole group instead, and learns that this one
    /// does not.
    fn barrier(&self) -> Result<(), Error> {
        let mut member = self.lock();
        agree(member.bootstrap()?, CLOSING, Ok(()), |()| Vec::new())?;
        Ok(())
    }

    fn alloc_windows(&self, bytes: u64) -> Result<Vec<DevicePtr>, Error> {
        Ok(vec![self.lock().alloc(bytes)?])
    }

    /// `shape` has one node.
    fn peer_windows(
        &self,
        rank: Rank,
        windows: &[DevicePtr],
        shape: &Shape,
    ) -> Result<Vec<DevicePtr>, Error> {
        self.require_local(rank)?;
        let member = self.lock();
        let shared = member
            .windows
            .iter()
            .find(|shared| windows.first() == Some(&shared.own));
        let shared = shared.ok_or(Error::GroupClosed)?;
        let as_seen = |peer| {
            if shape.same_node(rank, peer) {
                shared.of(peer)
            } else {
                shared.own
            }
        };
        Ok((0..self.ranks).map(Rank).map(as_seen).collect())
    }

    unsafe fn free_windows(&self, windows: &[DevicePtr]) -> Result<(), Error> {
        // SAFETY: no kernel of any rank uses them any more: documented on `Fabric::free_windows`.
        unsafe { self.lock().free(windows) }
    }

    unsafe fn close(&self) -> Result<(), Error> {
        // SAFETY: no communicator is open, and no graph launches one: documented on `Fabric::close`.
        unsafe { self.lock().leave() }
    }
}

impl<S: Share> Drop for NodeFabric<S> {
    fn drop(&mut self) {
        let member = self.lock();
        if !member.windows.is_empty() {
            tracing::warn!(
                rank = self.rank.0,
                windows = member.windows.len(),
                "a node group was dropped without close: its windows are leaked"
            );
            leak::tell(
                "a node group was dropped without close, and its windows are leaked; close it instead",
            );
        }
    }
}
