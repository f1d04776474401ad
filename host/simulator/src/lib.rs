//! A machine without GPUs that runs Ferry's kernels: many ranks in one thread, reproducible
//! from a seed.
//!
//! Each warp of each rank is a fibre that runs the same protocol code as a GPU's warp. A seeded
//! scheduler decides which warp runs next, and when writes become visible:
//!
//! - Writes wait in the warp's store buffer and drain in any order, until a release drains them.
//!   A device-scope release drains only writes to the own rank's memory.
//! - A put to a rank of another node travels in parts, in any order with other puts, reading
//!   its source when the part is delivered; its signal comes after the last part.
//! - Warps stall for a while; a rank can be lost, with all writes that are not visible yet.
//!
//! These are errors:
//!
//! - an access outside the allocation that it is for, or a write into the window of a rank of another node
//! - a launch that goes on waiting after its deadline
//! - a use of a block's memory whose outcome depends on the order of warps, and a barrier at which not all
//!   warps of a block arrive
//! - a signal that arrives after its round is over, which could pass for one of a later round, or undo one
//!
//! Allocations are filled with a pattern, not with zeros.
//!
//! Not modelled: reads of old values after their flag was acquired (the model checker's part), divergent
//! lanes of a warp, and time. A deadline passes when nothing else can happen. While another thread may still
//! launch something, simulated time passes like wall time, or the next deadline passes after
//! [`Options::patience`] of wall time.
#![forbid(unsafe_code)]

mod args;
mod block;
mod combines;
mod command;
mod encode;
mod error;
mod lent;
mod memory;
mod network;
mod options;
mod run;
mod scheduler;
mod shared;
mod silu;
mod stacks;
mod store_buffer;
mod warp;

use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};

pub use args::Args;
pub use combines::Combines;
use command::{Command, Reply};
pub use error::SimulatorError;
use ferry_layout::MAX_RANKS;
pub use ferry_layout::{CombineWith, DispatchWith, EpilogueWords, Kernel, MAX_BLOCKS, SiluArgs};
use lent::Lent;
use memory::Outside;
pub use options::{Lost, Options};
use scheduler::World;
pub use silu::Portable;

/// A simulated machine: device memory and a stream for each rank. A handle; clones share the
/// machine, which ends with the last of them.
#[derive(Clone)]
pub struct Simulator {
    commands: Sender<Command>,
    memory: Arc<Lent>,
    seed: u64,
}

impl Simulator {
    /// Starts a machine on a thread of its own. [`SimulatorError::Ranks`] if there are no ranks or too many.
    pub fn start(options: Options) -> Result<Self, SimulatorError> {
        let ranks = options.ranks;
        if !(1..=MAX_RANKS).contains(&ranks) {
            return Err(SimulatorError::Ranks { ranks });
        }
        let (commands, inbox) = channel();
        let memory = Arc::new(Lent::new(ranks));
        let simulator = Self {
            commands,
            memory: Arc::clone(&memory),
            seed: options.seed,
        };
        std::thread::spawn(move || World::new(options, memory).serve(&inbox));
        Ok(simulator)
    }

    /// Allocates `bytes` on `rank`, filled with a pattern. [`SimulatorError::OutOfMemory`] if they do not
    /// fit.
    pub fn alloc(&self, rank: u32, bytes: u64) -> Result<u64, SimulatorError> {
        self.memory.get()?.alloc(rank, bytes)
    }

    /// Allocates `bytes` on every rank, at the same place in each rank's memory, as windows must
    /// be; on none if they do not fit. Each address can be freed by itself.
    pub fn alloc_symmetric(&self, bytes: u64) -> Result<Vec<u64>, SimulatorError> {
        self.memory.get()?.alloc_symmetric(bytes)
    }

    /// Frees an allocation at its address.
    pub fn free(&self, address: u64) -> Result<(), SimulatorError> {
        let freed = self.memory.get()?.free(address);
        freed.map_err(|outside| self.bad_access(outside))
    }

    /// Writes device memory.
    pub fn write(&self, address: u64, bytes: &[u8]) -> Result<(), SimulatorError> {
        let written = self.memory.get()?.write(address, bytes);
        written.map_err(|outside| self.bad_access(outside))
    }

    /// Reads device memory.
    pub fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), SimulatorError> {
        let memory = self.memory.get()?;
        let read = memory.read(address, bytes.len() as u64);
        bytes.copy_from_slice(read.map_err(|outside| self.bad_access(outside))?);
        Ok(())
    }

    /// Enqueues a kernel on `rank`'s stream.
    pub fn launch(&self, rank: u32, kernel: Kernel, args: Args) -> Result<(), SimulatorError> {
        self.ask(|reply| Command::Launch {
            rank,
            kernel,
            args: Box::new(args),
            reply,
        })
    }

    /// Runs the machine until everything enqueued on `rank` is done.
    pub fn synchronize(&self, rank: u32) -> Result<(), SimulatorError> {
        self.ask(|reply| Command::Synchronize { rank, reply })
    }

    fn ask(&self, command: impl FnOnce(Reply) -> Command) -> Result<(), SimulatorError> {
        let (reply, answer) = channel();
        self.commands
            .send(command(reply))
            .map_err(|_| SimulatorError::Ended)?;
        answer.recv().map_err(|_| SimulatorError::Ended)?
    }

    /// Error for an access by the host, which does not end the simulation.
    fn bad_access(&self, outside: Outside) -> SimulatorError {
        let Outside {
            what,
            address,
            bytes,
        } = outside;
        SimulatorError::BadAccess {
            seed: self.seed,
            what,
            address,
            bytes,
            by: String::from(", by the host"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_has_ranks_but_no_more_than_a_group() {
        let started = |ranks| Simulator::start(Options::new(ranks, 1)).map(|_| ());
        for ranks in [0, MAX_RANKS + 1, u32::MAX] {
            assert_eq!(started(ranks), Err(SimulatorError::Ranks { ranks }));
        }
        assert_eq!(started(MAX_RANKS), Ok(()));
    }

    #[test]
    fn warps_that_make_too_many_blocks_are_refused() {
        for (warps, is_refused) in [
            (MAX_BLOCKS - 1, false),
            (2 * MAX_BLOCKS, false),
            (MAX_BLOCKS + 1, true),
            (2 * MAX_BLOCKS + 2, true),
            (u32::MAX, true),
        ] {
            let simulator = Simulator::start(Options {
                warps,
                ..Options::new(1, 1)
            })
            .unwrap();
            let silu = Args::Silu(bytemuck::Zeroable::zeroed());
            let launched = simulator.launch(0, Kernel::FusedSilu, silu);
            let refused = Err(SimulatorError::TooManyWarps { warps });
            assert_eq!(launched == refused, is_refused, "{warps}: {launched:?}");
        }
    }
}
