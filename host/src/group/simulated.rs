//! A group and devices that exist only in memory, for machines without GPUs.

use std::mem::offset_of;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytemuck::{Zeroable, bytes_of, bytes_of_mut, cast_slice_mut};
use ferry_layout::{FaultPage, Rank, Shape};
use ferry_simulator::{Options as SimulatorOptions, Simulator, SimulatorError};

use crate::device::Device;
use crate::device::{Launch, SharedPage};
use crate::error::Error;
use crate::group::fabric::Fabric;
use crate::tensor::handles::{DevicePtr, Stream};

/// Bytes that a fill writes at a time.
const FILL_BYTES: u64 = 1 << 20;

/// Simulated ranks, all driven by this process, or one of them.
pub(crate) struct SimulatedFabric {
    simulator: Simulator,
    ranks: u32,
    /// The only rank of this process, if ranks are processes.
    own: Option<Rank>,
    epilogue_bytes: Option<usize>,
}

impl SimulatedFabric {
    /// Joins the machine at `path` as `rank`.
    pub(crate) fn join(
        path: &Path,
        rank: Rank,
        options: &SimulatorOptions,
        timeout: Duration,
    ) -> Result<Self, Error> {
        Ok(Self {
            epilogue_bytes: options.combines.epilogue_bytes(),
            simulator: Simulator::join(path, rank.0, options, timeout)?,
            ranks: options.ranks,
            own: Some(rank),
        })
    }

    pub(crate) fn new(options: SimulatorOptions) -> Result<Self, Error> {
        let ranks = options.ranks;
        Ok(Self {
            epilogue_bytes: options.combines.epilogue_bytes(),
            simulator: Simulator::start(options)?,
            ranks,
            own: None,
        })
    }
}

// SAFETY: the simulator allocates each window for its rank, in the requested size, lets all its
// ranks address it, and refuses accesses elsewhere. If ranks are processes, its collectives wait for
// all of them. It simulates the network between nodes.
unsafe impl Fabric for SimulatedFabric {
    fn name(&self) -> &'static str {
        "simulated"
    }

    fn ranks(&self) -> u32 {
        self.ranks
    }

    fn local_ranks(&self) -> Vec<Rank> {
        match self.own {
            Some(own) => vec![own],
            None => (0..self.ranks).map(Rank).collect(),
        }
    }

    fn device(&self, rank: Rank) -> Result<Arc<dyn Device>, Error> {
        Ok(Arc::new(SimulatedDevice {
            simulator: self.simulator.clone(),
            rank,
            epilogue_bytes: self.epilogue_bytes,
        }))
    }

    fn reaches_other_nodes(&self) -> bool {
        true
    }

    fn all_gather(&self, value: u64) -> Result<Vec<u64>, Error> {
        match self.own {
            Some(_) => Ok(self.simulator.all_gather(value)?),
            None => Ok(vec![value; self.ranks as usize]),
        }
    }

    fn barrier(&self) -> Result<(), Error> {
        self.all_gather(0).map(drop)
    }

    fn alloc_windows(&self, bytes: u64) -> Result<Vec<DevicePtr>, Error> {
        let windows = self.simulator.alloc_symmetric(bytes)?;
        let local = self.local_ranks().into_iter();
        Ok(local
            // SAFETY: the simulator allocated them, and refuses addresses of what it freed.
            .map(|Rank(rank)| unsafe { DevicePtr::new(windows[rank as usize], bytes) })
            .collect())
    }

    fn peer_windows(
        &self,
        rank: Rank,
        windows: &[DevicePtr],
        shape: &Shape,
    ) -> Result<Vec<DevicePtr>, Error> {
        let local = self.local_ranks();
        let own = local.iter().position(|local| *local == rank);
        let own = windows[own.unwrap_or(0)];
        let as_seen = |peer: u32| {
            if !shape.same_node(rank, Rank(peer)) {
                return own;
            }
            let there = ferry_simulator::same_place(own.address(), rank.0, peer);
            // SAFETY: the simulator allocated the windows of all ranks at the same place of each, and refuses
            // addresses of what it freed.
            unsafe { DevicePtr::new(there, own.bytes()) }
        };
        Ok((0..self.ranks).map(as_seen).collect())
    }

    unsafe fn close(&self) -> Result<(), Error> {
        // Rank 0 outlives the others.
        self.barrier()
    }

    unsafe fn free_windows(&self, windows: &[DevicePtr]) -> Result<(), Error> {
        let ranks = self.local_ranks().into_iter();
        ranks
            .zip(windows)
            .try_for_each(|(rank, window)| Ok(free(&self.simulator, rank, *window)?))
    }
}

/// Frees an allocation of `rank` once its enqueued kernels have ended, as a driver does. If a peer is
/// missing, they end at their deadline.
fn free(simulator: &Simulator, rank: Rank, at: DevicePtr) -> Result<(), SimulatorError> {
    match simulator.synchronize(rank.0) {
        Err(interrupted @ SimulatorError::Interrupted) => Err(interrupted),
        // After any other error no kernel of the rank goes on.
        _ => simulator.free(at.address()),
    }
}

/// One simulated rank's memory and its only stream.
struct SimulatedDevice {
    simulator: Simulator,
    rank: Rank,
    epilogue_bytes: Option<usize>,
}

// SAFETY: the simulator allocates the requested bytes and refuses accesses elsewhere. The only stream
// lives as long as it, and the kernels are the simulator's own, for all shapes.
unsafe impl Device for SimulatedDevice {
    fn name(&self) -> String {
        format!("simulated rank {}", self.rank.0)
    }

    fn alloc(&self, bytes: u64) -> Result<DevicePtr, Error> {
        let at = self.simulator.alloc(self.rank.0, bytes)?;
        // SAFETY: the simulator allocated them, and refuses addresses of what it freed.
        Ok(unsafe { DevicePtr::new(at, bytes) })
    }

    unsafe fn free(&self, at: DevicePtr) -> Result<(), Error> {
        Ok(free(&self.simulator, self.rank, at)?)
    }

    fn upload(&self, to: DevicePtr, bytes: &[u8]) -> Result<(), Error> {
        to.require("upload", bytes.len() as u64)?;
        Ok(self.simulator.write(to.address(), bytes)?)
    }

    fn download(&self, from: DevicePtr, bytes: &mut [u8]) -> Result<(), Error> {
        from.require("download", bytes.len() as u64)?;
        Ok(self.simulator.read(from.address(), bytes)?)
    }

    fn fill(&self, at: DevicePtr, value: u8, bytes: u64) -> Result<(), Error> {
        at.require("fill", bytes)?;
        let chunk = vec![value; bytes.min(FILL_BYTES) as usize];
        for done in (0..bytes).step_by(FILL_BYTES as usize) {
            let here = FILL_BYTES.min(bytes - done) as usize;
            self.simulator
                .write(at.plus(done).address(), &chunk[..here])?;
        }
        Ok(())
    }

    fn epilogue_bytes(&self) -> Option<usize> {
        self.epilogue_bytes
    }

    fn stream(&self) -> Result<Stream, Error> {
        Ok(Stream::DEFAULT)
    }

    fn synchronize(&self, _stream: Stream) -> Result<(), Error> {
        Ok(self.simulator.synchronize(self.rank.0)?)
    }

    unsafe fn launch(&self, launch: &Launch) -> Result<(), Error> {
        let Launch {
            kernel,
            args,
            max_sms,
            ..
        } = *launch;
        Ok((self.simulator).launch(self.rank.0, kernel, args, max_sms)?)
    }

    fn fault_page(&self, words: usize) -> Result<Box<dyn SharedPage>, Error> {
        let bytes = size_of::<FaultPage>() + size_of::<u64>() * words;
        let address = self.alloc(bytes as u64)?;
        self.fill(address, 0, bytes as u64)?;
        Ok(Box::new(SimulatedPage {
            simulator: self.simulator.clone(),
            rank: self.rank,
            address,
        }))
    }
}

/// A fault page in a simulated rank's memory.
struct SimulatedPage {
    simulator: Simulator,
    rank: Rank,
    address: DevicePtr,
}

// SAFETY: the address is of memory of this rank's, as large as a page, which is freed when the
// value is dropped; the host asks the simulator for it.
unsafe impl SharedPage for SimulatedPage {
    fn address(&self) -> u64 {
        self.address.address()
    }

    fn read(&self) -> Result<FaultPage, Error> {
        let mut page = FaultPage::zeroed();
        let at = self.address.address();
        self.simulator.read(at, bytes_of_mut(&mut page))?;
        Ok(page)
    }

    fn counts(&self, words: &mut [u64]) -> Result<(), Error> {
        // The simulation runs only while somebody waits for it.
        self.simulator.synchronize(self.rank.0)?;
        let at = self.address.address() + size_of::<FaultPage>() as u64;
        Ok(self.simulator.read(at, cast_slice_mut(words))?)
    }

    fn acknowledge(&self, number: u64) {
        let at = self.address.address() + offset_of!(FaultPage, acknowledged) as u64;
        if let Err(error) = self.simulator.write(at, bytes_of(&number)) {
            tracing::warn!(%error, "cannot acknowledge a fault");
        }
    }
}

impl Drop for SimulatedPage {
    fn drop(&mut self) {
        // Fails only if the simulation has ended, and its memory with it.
        let _ = free(&self.simulator, self.rank, self.address);
    }
}
