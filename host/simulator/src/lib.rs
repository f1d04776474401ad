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

pub mod encode;
mod memory;
mod network;
mod scheduler;
mod shared;
mod silu;
mod store_buffer;
mod warp;

use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use ferry_layout::MAX_RANKS;
pub use ferry_layout::{CombineWith, DispatchWith, EpilogueWords, Kernel, MAX_BLOCKS, SiluArgs};
use scheduler::{Command, World};
pub use silu::Portable;
pub use warp::Combines;

/// How a simulated machine behaves. [`Options::new`] has the defaults; `ranks` and `seed` have none.
#[derive(Clone, Debug)]
pub struct Options {
    /// Ranks of the group, 1 to [`MAX_RANKS`].
    pub ranks: u32,
    /// Decides every choice of the scheduler: the same seed and the same calls make the same run. Any number.
    pub seed: u64,
    /// Warps that a launch has on each rank, at least 1. An even number makes blocks of two warps, an odd one
    /// of one, and there are at most [`MAX_BLOCKS`]. Default: 4.
    pub warps: u32,
    /// One in how many of its turns a warp begins to stall, for up to 50 turns of all warps; 0: never.
    /// Default: 64.
    pub stall_one_in: u32,
    /// A rank that dies on the way. Default: `None`, nobody does.
    pub lost: Option<Lost>,
    /// How long a simulation in which nothing more can happen, but some rank runs nothing, waits for a
    /// launch from another thread before it lets the next deadline pass, in wall time. Each launch, and each
    /// deadline that passes, makes it start anew. `None`, the default: simulated time passes as
    /// wall time does while the simulation waits so, and each launch times out when its own
    /// deadline has passed, whoever else launches meanwhile. Faults that come of it name the
    /// patience, or the deadline. Set it where a rank is to be missed quickly.
    pub patience: Option<Duration>,
    /// Whether a signal may arrive when its round is over: where a test damages windows, rounds end early.
    /// Default: false, such a signal ends the simulation with an error.
    pub allow_late_signals: bool,
    /// With which epilogue combines run. Default: [`Combines::STEPS`], Ferry's own steps.
    pub combines: Combines,
}

/// A rank that dies: what runs on it ends, and nothing more begins there.
#[derive(Clone, Copy, Debug)]
pub struct Lost {
    /// Its number, below [`Options::ranks`].
    pub rank: u32,
    /// After how many turns of the scheduler, of all ranks together. A turn takes 100 ns of simulated time.
    pub after_steps: u64,
}

impl Options {
    /// Four warps a rank, occasional stalls, nobody lost, as patient as the deadlines.
    pub fn new(ranks: u32, seed: u64) -> Self {
        Self {
            ranks,
            seed,
            warps: 4,
            stall_one_in: 64,
            lost: None,
            patience: None,
            allow_late_signals: false,
            combines: Combines::STEPS,
        }
    }

    /// Blocks of a launch: of two warps each, if that comes out even.
    fn blocks(&self) -> u32 {
        match self.warps.is_multiple_of(2) {
            true => self.warps / 2,
            false => self.warps,
        }
    }
}

/// Arguments of a launch.
#[derive(Clone, Copy, Debug)]
pub enum Args {
    /// Of the dispatch kernels.
    Dispatch(DispatchWith),
    /// Of the combine kernels.
    Combine(CombineWith<EpilogueWords>),
    /// Of the fused SiLU kernel.
    Silu(SiluArgs),
}

/// What went wrong in a simulation. The text names the seed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SimulatorError {
    /// An access outside every live allocation.
    #[error(
        "simulator (seed {seed}): {what} of {bytes} bytes at {address:#x} is outside every allocation{by}"
    )]
    BadAccess {
        /// The run's seed.
        seed: u64,
        /// "read", "write", ...
        what: &'static str,
        /// Where.
        address: u64,
        /// How many.
        bytes: u64,
        /// Which warp, if it was one.
        by: String,
    },
    /// An access that left the allocation of the tensor, window or workspace that it was for.
    #[error(
        "simulator (seed {seed}): an access at {address:#x} is outside the allocation of {base:#x}, \
         for which it was, by {by}"
    )]
    StrayAccess {
        /// The run's seed.
        seed: u64,
        /// Where.
        address: u64,
        /// Where the tensor, window or workspace begins.
        base: u64,
        /// Which warp.
        by: String,
    },
    /// A warp used the memory of its block so that what comes of it depends on which warp is first, or is
    /// anything.
    #[error("simulator (seed {seed}): {by} {what}: byte {at} of its block's memory")]
    BlockMemory {
        /// The run's seed.
        seed: u64,
        /// Which warp.
        by: String,
        /// What it did.
        what: &'static str,
        /// Bytes from the start.
        at: u32,
    },
    /// Some warps of a block wait at a barrier at which others will not arrive, as they have ended.
    #[error(
        "simulator (seed {seed}): not all warps of block {block} of rank {rank} arrive at a barrier"
    )]
    MissedBarrier {
        /// The run's seed.
        seed: u64,
        /// Whose block.
        rank: u32,
        /// Which one.
        block: u32,
    },
    /// A launch goes on waiting long after its deadline. One that works longer than that does not.
    #[error(
        "simulator (seed {seed}): a launch of rank {rank} goes on waiting {late_ns} ns after its deadline"
    )]
    Overdue {
        /// The run's seed.
        seed: u64,
        /// Whose.
        rank: u32,
        /// How late it is, in simulated time.
        late_ns: u64,
    },
    /// A warp touched the window of a rank of another node.
    #[error(
        "simulator (seed {seed}): rank {rank} wrote directly into the window of rank {peer}, \
         which is on another node"
    )]
    NotMapped {
        /// The run's seed.
        seed: u64,
        /// Who.
        rank: u32,
        /// Whose window.
        peer: u32,
    },
    /// A signal arrived at a rank that had finished its round without it.
    #[error(
        "simulator (seed {seed}): a signal of round {round} arrived at rank {rank}, which had finished it"
    )]
    LateSignal {
        /// The run's seed.
        seed: u64,
        /// Where.
        rank: u32,
        /// Its round.
        round: u64,
    },
    /// A rank's addresses, 1 TiB, or this process's memory do not suffice for an allocation.
    #[error("simulator: no memory for an allocation of {bytes} bytes on rank {rank}")]
    OutOfMemory {
        /// Whose.
        rank: u32,
        /// Of what size.
        bytes: u64,
    },
    /// The rank was lost.
    #[error("simulator (seed {seed}): rank {rank} was lost")]
    RankLost {
        /// The run's seed.
        seed: u64,
        /// Which.
        rank: u32,
    },
    /// The kernel and its arguments do not belong together.
    #[error("simulator: {kernel} was given the arguments of another kernel")]
    WrongArguments {
        /// Which kernel.
        kernel: &'static str,
    },
    /// A machine without ranks, or of more than a group has.
    #[error("simulator: ranks is {ranks}, but a machine has 1 to {MAX_RANKS}")]
    Ranks {
        /// How many it would have.
        ranks: u32,
    },
    /// There is no such rank.
    #[error("simulator: rank {rank} is not among {ranks} ranks")]
    NoSuchRank {
        /// Which.
        rank: u32,
        /// How many there are.
        ranks: u32,
    },
    /// Launches would have more blocks than there may be.
    #[error("simulator: warps is {warps}, which makes more than {MAX_BLOCKS} blocks")]
    TooManyWarps {
        /// [`Options::warps`].
        warps: u32,
    },
    /// The simulation ended because a kernel panicked.
    #[error("simulator: the simulation has ended; a kernel panicked")]
    Ended,
}

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
