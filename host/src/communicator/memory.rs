//! Device memory of a communicator, and when it is freed.

use std::sync::{Arc, Mutex, PoisonError};

use ferry_layout::{HostCounts, Rank};

use crate::communicator::progress::Progress;
use crate::device::Device;
use crate::device::SharedPage;
use crate::device::loaded_kernels::LoadedKernels;
use crate::error::Error;
use crate::group::fabric::Fabric;
use crate::plan::Plan;
use crate::tensor::handles::DevicePtr;

/// Memory of one rank that no other rank touches. A drop frees it, which synchronizes.
pub(crate) struct Private {
    device: Arc<dyn Device>,
    /// `Workspace::of(shape)`.
    pub(crate) workspace: DevicePtr,
    /// `[u64; ranks]`: the address of every rank's window on this rank.
    pub(crate) peers: DevicePtr,
    /// This rank's window: the fabric's.
    pub(crate) window: DevicePtr,
    /// The kernels of calls without options.
    pub(crate) kernels: LoadedKernels,
    /// The kernels with options, if the plan has them.
    pub(crate) kernels_with_options: Option<LoadedKernels>,
    /// Page on which kernels record faults. `None` once freed or leaked.
    pub(crate) page: Option<Box<dyn SharedPage>>,
}

impl Private {
    /// Allocates, and has kernels compiled for the plan if it says so; clears only the fault
    /// page. Synchronizes.
    pub(crate) fn alloc(fabric: &dyn Fabric, rank: Rank, plan: &Plan) -> Result<Self, Error> {
        let device = fabric.device(rank)?;
        let mut memory = Self {
            device,
            workspace: DevicePtr::NULL,
            peers: DevicePtr::NULL,
            window: DevicePtr::NULL,
            kernels: LoadedKernels::GENERAL,
            kernels_with_options: None,
            page: None,
        };
        memory.load_kernels(fabric, rank, plan)?;
        memory.page = Some(memory.device.fault_page(HostCounts::words(plan.shape()))?);
        memory.workspace = memory.device.alloc(plan.workspace_bytes())?;
        memory.peers = memory.device.alloc(8 * u64::from(plan.shape().ranks))?;
        Ok(memory)
    }

    /// Loads the kernels of the plan's calls. Synchronizes.
    fn load_kernels(&mut self, fabric: &dyn Fabric, rank: Rank, plan: &Plan) -> Result<(), Error> {
        let config = plan.config();
        let shape = config.specialise.then(|| plan.shape());
        if config.receive.keeps_rows() {
            // One set for all calls. Constants of a shape are those of combine rows without weights.
            let shape = shape.filter(|_| !plan.receive().combine_weights);
            self.kernels = fabric.kernels_with_rows(rank, shape)?;
            self.kernels_with_options = Some(self.kernels.clone());
            return Ok(());
        }
        // With `skip_a2a` all kernels are those with options.
        if let Some(shape) = shape.filter(|_| !config.skip_a2a) {
            self.kernels = self.device.kernels(shape)?;
        }
        if plan.takes_options() {
            self.kernels_with_options = Some(fabric.kernels_with_options(rank, shape)?);
        }
        Ok(())
    }

    pub(crate) fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// Clears the workspace, the signals and the rows with inline flags of `window`, and writes the
    /// peers' table. Synchronizes.
    pub(crate) fn set_up(
        &self,
        plan: &Plan,
        window: DevicePtr,
        peers: &[DevicePtr],
    ) -> Result<(), Error> {
        let peers: Vec<u8> = peers
            .iter()
            .flat_map(|peer| peer.address().to_le_bytes())
            .collect();
        self.device
            .fill(self.workspace, 0, plan.workspace_bytes())?;
        let layout = plan.common().window;
        self.device.fill(window, 0, layout.signal_bytes)?;
        // `SENTINEL`, byte by byte.
        let inline = window.plus(layout.inline_start);
        self.device.fill(inline, 0xff, layout.inline_bytes)?;
        self.device.upload(self.peers, &peers)
    }

    /// Frees everything; the first error is returned. Synchronizes.
    pub(crate) fn free(&mut self) -> Result<(), Error> {
        let mut result = Ok(());
        for at in [&mut self.workspace, &mut self.peers] {
            let at = std::mem::replace(at, DevicePtr::NULL);
            if at != DevicePtr::NULL {
                // SAFETY: this device's `alloc` returned `at` (in `Private::alloc`). Only this communicator's
                // kernels use it: `free` waits for those at work, and `close` and `drop` come here only
                // when no graph can launch one any more.
                result = result.and(unsafe { self.device.free(at) });
            }
        }
        self.page = None;
        result
    }

    /// Leaks everything: a kernel may still be at work, and freeing would wait.
    pub(crate) fn leak(&mut self) {
        self.workspace = DevicePtr::NULL;
        self.peers = DevicePtr::NULL;
        std::mem::forget(self.page.take());
    }
}

impl Drop for Private {
    fn drop(&mut self) {
        if let Err(error) = self.free() {
            tracing::warn!(%error, "cannot free a communicator's memory");
        }
    }
}

/// The windows of all ranks of this process. The ranks leave them one by one.
pub(crate) struct Windows {
    fabric: Arc<dyn Fabric>,
    at: Vec<DevicePtr>,
    /// Calls of the ranks of this process.
    pub(crate) progress: Progress,
    holders: Mutex<Holders>,
}

/// The number of holders of the windows, and how the others left.
#[derive(Debug)]
struct Holders {
    open: usize,
    /// A rank was dropped: its kernels may still be at work.
    dropped: bool,
    /// A rank gave up: ranks of other processes may never come to a barrier.
    gave_up: bool,
}

/// Ways in which a rank leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leave {
    /// Closed, in order; or dropped, and none of its kernels is at work.
    Closed,
    /// Closed after it gave up.
    GaveUp,
    /// Dropped, and a kernel may be at work.
    Dropped,
}

impl Windows {
    pub(crate) fn new(fabric: Arc<dyn Fabric>, at: Vec<DevicePtr>) -> Self {
        let holders = Holders {
            open: at.len(),
            dropped: false,
            gave_up: false,
        };
        Self {
            progress: Progress::of(fabric.local_ranks()),
            fabric,
            at,
            holders: Mutex::new(holders),
        }
    }

    /// Whether all ranks of the group are this process's.
    pub(crate) fn are_all_here(&self) -> bool {
        self.at.len() == self.fabric.ranks() as usize
    }

    /// The ranks of this process.
    pub(crate) fn local_ranks(&self) -> Vec<Rank> {
        self.fabric.local_ranks()
    }

    /// Counts one holder out. The last one waits for the other processes and frees the windows,
    /// unless that could wait for ever or free memory that a kernel still uses: then they are leaked.
    pub(crate) fn leave(&self, how: Leave) -> Result<(), Error> {
        let mut holders = self.holders.lock().unwrap_or_else(PoisonError::into_inner);
        holders.open -= 1;
        holders.dropped |= how == Leave::Dropped;
        holders.gave_up |= how == Leave::GaveUp;
        if holders.open > 0 {
            return Ok(());
        }
        if holders.dropped || (holders.gave_up && !self.are_all_here()) {
            tracing::warn!(
                windows = self.at.len(),
                "the windows of a communicator are not freed: a rank was dropped without close, or gave \
                 up while other processes may still be waiting; closing a node group frees \
                 them, in other groups they are leaked"
            );
            return Ok(());
        }
        self.fabric.barrier().inspect_err(|error| {
            tracing::warn!(
                %error, windows = self.at.len(),
                "the windows of a communicator are not freed; closing a node group frees them, in \
                 other groups they are leaked"
            );
        })?;
        // SAFETY: the fabric's `alloc_windows` returned them, and no kernel uses them any more: all ranks of
        // this process have left them closed or done, and the barrier says so of all others.
        unsafe { self.fabric.free_windows(&self.at) }
    }
}

/// Checks that `call` of `fabric` returned `count` windows of at least `bytes` bytes.
pub(crate) fn require_windows(
    fabric: &dyn Fabric,
    call: &'static str,
    windows: &[DevicePtr],
    count: usize,
    bytes: u64,
) -> Result<(), Error> {
    let refused = |unit, wanted, given| Error::FabricAnswer {
        fabric: fabric.name(),
        call,
        unit,
        wanted,
        given,
    };
    if windows.len() != count {
        return Err(refused("windows", count as u64, windows.len() as u64));
    }
    match windows.iter().find(|window| window.bytes() < bytes) {
        Some(window) => Err(refused("bytes of a window", bytes, window.bytes())),
        None => Ok(()),
    }
}

/// Frees the windows of a communicator that could not be made, when the state of the other ranks is unknown:
/// if freeing would wait for other processes, leaks them.
pub(crate) fn give_up(fabric: &dyn Fabric, windows: &[DevicePtr]) {
    if windows.len() < fabric.ranks() as usize {
        tracing::warn!(
            windows = windows.len(),
            "windows are leaked: freeing them waits for ranks that may not come"
        );
        return;
    }
    // SAFETY: the fabric's `alloc_windows` returned them for a communicator that was not made: no rank has
    // launched a kernel.
    if let Err(error) = unsafe { fabric.free_windows(windows) } {
        tracing::warn!(%error, "cannot free windows");
    }
}

/// Agrees with all ranks on whether a step succeeded everywhere. The outer error is that of the exchange, or
/// this rank's own if it has one; then the state of the other ranks is unknown. Collective.
pub(crate) fn agree<T>(
    fabric: &dyn Fabric,
    step: &'static str,
    result: Result<T, Error>,
) -> Result<Result<T, Error>, Error> {
    let well = match fabric.all_gather(u64::from(result.is_ok())) {
        Ok(well) => well,
        // This rank's own error says more than that of the exchange.
        Err(asking) => return Err(result.err().unwrap_or(asking)),
    };
    let failed = well.iter().position(|&well| well == 0);
    Ok(result.and_then(|value| match failed {
        Some(rank) => Err(Error::PeerFailed {
            rank: Rank(rank as u32),
            step,
        }),
        None => Ok(value),
    }))
}

#[cfg(test)]
#[path = "memory_tests.rs"]
mod tests;
