//! A machine without GPUs that runs Ferry's kernels: many ranks in one thread, reproducible
//! from a seed.
//!
//! Each warp of each rank is a fibre that runs the same protocol code as a GPU's warp. A seeded
//! scheduler decides who runs next, and when the effects of writes are seen:
//!
//! - Writes wait in the warp's store buffer and drain in any order, until a release drains them.
//!   A device-scope release drains only what concerns the own rank.
//! - A put to a rank of another node travels in parts, in any order with other puts, reading
//!   its source when the part is delivered; its signal comes after the last part.
//! - Warps stall for a while; a rank can be lost, with everything it had not yet made visible.
//!
//! Every access is checked against the allocation that it belongs to, and writes into the window of a rank of
//! another node are refused: a wild write is an error, not a corruption. So is a launch that goes on
//! waiting after its deadline. So is the use of a block's memory whose outcome depends on the order of
//! warps, and a barrier at which not all warps of a block arrive. So is a signal that arrives when its round
//! is over: it could pass for one of a later round, or undo it. Allocations start out filled with a pattern,
//! not zeros.
//!
//! What it does not model: reads that see old values although their flag was acquired (the model
//! checker's part), lanes of a warp that run apart, and time: a deadline passes when nothing
//! else can happen. While another thread may still launch something, simulated time passes as wall
//! time does, or the next deadline passes after [`Options::patience`] of wall time.
#![forbid(unsafe_code)]

mod args;
mod block;
mod combines;
mod command;
pub mod encode;
mod error;
mod memory;
mod network;
mod options;
mod run;
mod scheduler;
mod shared;
mod silu;
mod store_buffer;
mod warp;

use std::sync::mpsc::{Sender, channel};

pub use args::Args;
pub use combines::Combines;
use command::Command;
pub use error::SimulatorError;
use ferry_layout::MAX_RANKS;
pub use ferry_layout::{CombineWith, DispatchWith, EpilogueWords, Kernel, MAX_BLOCKS, SiluArgs};
pub use options::{Lost, Options};
use scheduler::World;
pub use silu::Portable;

/// A simulated machine: device memory and a stream for each rank. A handle; clones share the
/// machine, which ends with the last of them.
#[derive(Clone)]
pub struct Simulator {
    commands: Sender<Command>,
}

impl Simulator {
    /// Starts a machine on a thread of its own. [`SimulatorError::Ranks`] for none and for too many.
    pub fn start(options: Options) -> Result<Self, SimulatorError> {
        let ranks = options.ranks;
        if !(1..=MAX_RANKS).contains(&ranks) {
            return Err(SimulatorError::Ranks { ranks });
        }
        let (commands, inbox) = channel();
        std::thread::spawn(move || World::new(options).serve(&inbox));
        Ok(Self { commands })
    }

    /// Allocates `bytes` on `rank`, filled with a pattern. [`SimulatorError::OutOfMemory`] where they do not
    /// fit.
    pub fn alloc(&self, rank: u32, bytes: u64) -> Result<u64, SimulatorError> {
        self.ask(|reply| Command::Alloc { rank, bytes, reply })
    }

    /// Allocates `bytes` on every rank, at the same place in each rank's memory, as windows must
    /// be; on none where they do not fit. Each address can be freed by itself.
    pub fn alloc_symmetric(&self, bytes: u64) -> Result<Vec<u64>, SimulatorError> {
        self.ask(|reply| Command::AllocSymmetric { bytes, reply })
    }

    /// Frees what [`alloc`](Self::alloc) gave.
    pub fn free(&self, address: u64) -> Result<(), SimulatorError> {
        self.ask(|reply| Command::Free { address, reply })
    }

    /// Writes device memory.
    pub fn write(&self, address: u64, bytes: &[u8]) -> Result<(), SimulatorError> {
        let bytes = bytes.to_vec();
        self.ask(|reply| Command::Write {
            address,
            bytes,
            reply,
        })
    }

    /// Reads device memory.
    pub fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), SimulatorError> {
        let count = bytes.len();
        let read = self.ask(|reply| Command::Read {
            address,
            count,
            reply,
        })?;
        bytes.copy_from_slice(&read);
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

    fn ask<T>(
        &self,
        command: impl FnOnce(Sender<Result<T, SimulatorError>>) -> Command,
    ) -> Result<T, SimulatorError> {
        let (reply, answer) = channel();
        self.commands
            .send(command(reply))
            .map_err(|_| SimulatorError::Ended)?;
        answer.recv().map_err(|_| SimulatorError::Ended)?
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
