//! Bootstrap over MPI.

use anyhow::{Context, Result};
use ferry::bootstrap::Bootstrap;
use ferry::error::BootstrapError;
use mpi::environment::Universe;
use mpi::traits::{Communicator, CommunicatorCollectives};

/// Bootstrap of all processes that mpirun started.
///
/// MPI bounds no wait: if a process is lost, the calls of the others do not return. `mpirun` ends them.
pub struct MpiBootstrap {
    universe: Universe,
}

// SAFETY: MPI is initialised for one thread at a time (`mpi::initialize` asks for that level), and
// `Bootstrap` takes `&mut self` for every call that communicates; the program keeps it behind a
// mutex.
unsafe impl Send for MpiBootstrap {}

impl MpiBootstrap {
    /// Joins the other processes. Once per process.
    pub fn new() -> Result<Self> {
        let universe = mpi::initialize().context("MPI was initialised already")?;
        Ok(Self { universe })
    }
}

// SAFETY: MPI numbers the processes. Its all-gather returns the bytes that every process gave to the same
// call, by rank, and nobody else uses this communicator.
unsafe impl Bootstrap for MpiBootstrap {
    fn rank(&self) -> u32 {
        self.universe.world().rank() as u32
    }

    fn ranks(&self) -> u32 {
        self.universe.world().size() as u32
    }

    fn all_gather(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, BootstrapError> {
        let world = self.universe.world();
        let ranks = world.size() as usize;
        let mut lengths = vec![0u64; ranks];
        world.all_gather_into(&(bytes.len() as u64), &mut lengths[..]);
        // MPI gathers equal pieces, so each is padded to the longest.
        let longest = lengths.iter().copied().max().unwrap_or(0) as usize;
        let mut padded = bytes.to_vec();
        padded.resize(longest, 0);
        let mut all = vec![0u8; longest * ranks];
        if longest > 0 {
            world.all_gather_into(&padded[..], &mut all[..]);
        }
        let piece = |rank: usize| all[rank * longest..][..lengths[rank] as usize].to_vec();
        Ok((0..ranks).map(piece).collect())
    }
}
