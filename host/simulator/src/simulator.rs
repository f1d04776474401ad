//! Handles of a machine.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};

use ferry_layout::{Args, Kernel, MAX_RANKS};

use crate::addresses::{Machine, RANK_SHIFT};
use crate::args::bytes;
use crate::command::{Command, Launch, Reply};
use crate::error::SimulatorError;
use crate::lent::Lent;
use crate::memory::Outside;
use crate::options::{ASK_AGAIN, Lost, Options, is_interrupted};
use crate::owner::require_own;
use crate::remote::{Remote, operation};
use crate::scheduler::World;

/// A simulated machine: device memory and a stream for each rank. A handle; clones share the
/// machine, which ends with the last of them.
#[derive(Clone)]
pub struct Simulator {
    commands: Sender<Command>,
    memory: Arc<Lent>,
    /// Number of ranks.
    ranks: u32,
    seed: u64,
    machine: Machine,
    /// [`Options::interrupted`].
    interrupted: Option<fn() -> bool>,
    /// The machine, if it is in another process; the other fields are then without use.
    remote: Option<Arc<Remote>>,
}

impl Simulator {
    /// Starts a machine on a thread of its own. [`SimulatorError::Ranks`] if there are no ranks or too many,
    /// [`SimulatorError::NoSuchRank`] if [`Options::lost`] or [`Options::bad_link`] names another rank.
    pub fn start(options: Options) -> Result<Self, SimulatorError> {
        let ranks = options.ranks;
        if !(1..=MAX_RANKS).contains(&ranks) {
            return Err(SimulatorError::Ranks { ranks });
        }
        let lost = options.lost.map(|Lost { rank, .. }| [rank; 2]);
        let linked = options.bad_link.map(|bad| [bad.from, bad.to]);
        let mut named = [lost, linked].into_iter().flatten().flatten();
        if let Some(rank) = named.find(|&rank| rank >= ranks) {
            return Err(SimulatorError::NoSuchRank { rank, ranks });
        }
        let (commands, inbox) = channel();
        let machine = Machine::next();
        let memory = Arc::new(Lent::new(ranks, machine));
        let simulator = Self {
            commands,
            memory: Arc::clone(&memory),
            ranks,
            seed: options.seed,
            machine,
            interrupted: options.interrupted,
            remote: None,
        };
        std::thread::spawn(move || World::new(options, memory, machine).serve(&inbox));
        Ok(simulator)
    }

    /// A handle of one rank of a machine in another process.
    pub(crate) fn at(remote: Remote) -> Self {
        let machine = Machine::next();
        Self {
            commands: channel().0,
            memory: Arc::new(Lent::new(0, machine)),
            ranks: 0,
            seed: 0,
            machine,
            interrupted: None,
            remote: Some(Arc::new(remote)),
        }
    }

    /// Returns the `value` of every rank, if ranks are processes. Collective between them.
    pub fn all_gather(&self, value: u64) -> Result<Vec<u64>, SimulatorError> {
        match &self.remote {
            Some(remote) => remote.numbers(operation::GATHER, value),
            None => Ok(vec![value]),
        }
    }

    /// Allocates `bytes` on `rank`, filled with a pattern. [`SimulatorError::OutOfMemory`] if they do not
    /// fit.
    pub fn alloc(&self, rank: u32, bytes: u64) -> Result<u64, SimulatorError> {
        if let Some(remote) = &self.remote {
            let address = remote.numbers(operation::ALLOC, bytes)?;
            return address.first().copied().ok_or(SimulatorError::Ended);
        }
        self.memory.get()?.alloc(rank, bytes)
    }

    /// Allocates `bytes` on every rank, at the same place in each rank's memory, as windows must
    /// be; on none if they do not fit. Each address can be freed by itself.
    pub fn alloc_symmetric(&self, bytes: u64) -> Result<Vec<u64>, SimulatorError> {
        if let Some(remote) = &self.remote {
            return remote.numbers(operation::WINDOWS, bytes);
        }
        self.memory.get()?.alloc_symmetric(bytes)
    }

    /// Frees an allocation at its address.
    pub fn free(&self, address: u64) -> Result<(), SimulatorError> {
        if let Some(remote) = &self.remote {
            return remote.ask(operation::FREE, address, &[]).map(drop);
        }
        let freed = self.memory.get()?.free(address);
        freed.map_err(|outside| self.bad_access(outside))
    }

    /// Writes device memory.
    pub fn write(&self, address: u64, bytes: &[u8]) -> Result<(), SimulatorError> {
        if let Some(remote) = &self.remote {
            return remote.ask(operation::WRITE, address, bytes).map(drop);
        }
        let written = self.memory.get()?.write(address, bytes);
        written.map_err(|outside| self.bad_access(outside))
    }

    /// Reads device memory.
    pub fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), SimulatorError> {
        if let Some(remote) = &self.remote {
            let length = (bytes.len() as u64).to_le_bytes();
            let read = remote.ask(operation::READ, address, &length)?;
            let whole = (read.len() == bytes.len()).then_some(read);
            bytes.copy_from_slice(&whole.ok_or(SimulatorError::Ended)?);
            return Ok(());
        }
        let memory = self.memory.get()?;
        let read = memory.read(address, bytes.len() as u64);
        bytes.copy_from_slice(read.map_err(|outside| self.bad_access(outside))?);
        Ok(())
    }

    /// Enqueues a kernel on `rank`'s stream, of as many blocks as the machine's [`Options::warps`] make, but
    /// at most `max_blocks`. [`SimulatorError::ForeignTensor`] for memory of another rank or machine: nothing
    /// is enqueued.
    pub fn launch(
        &self,
        rank: u32,
        kernel: Kernel,
        args: Args,
        max_blocks: Option<u32>,
    ) -> Result<(), SimulatorError> {
        if let Some(remote) = &self.remote {
            let number = Kernel::ALL.iter().position(|each| *each == kernel);
            let number = number.map_or(u64::MAX, |at| {
                at as u64 | u64::from(max_blocks.unwrap_or(0)) << 32
            });
            let launched = remote.ask(operation::LAUNCH, number, &bytes(&args));
            return launched.map(drop);
        }
        require_own(self.machine, self.seed, [rank, self.ranks], &args)?;
        self.ask(|reply| Command::Launch {
            rank,
            launch: Launch {
                kernel,
                args: Box::new(args),
                max_blocks,
            },
            reply,
        })
    }

    /// Runs the machine until everything enqueued on `rank` is done.
    pub fn synchronize(&self, rank: u32) -> Result<(), SimulatorError> {
        if let Some(remote) = &self.remote {
            return remote.ask(operation::SYNCHRONIZE, 0, &[]).map(drop);
        }
        self.ask(|reply| Command::Synchronize { rank, reply })
    }

    /// Ends the kernels of `rank`, which begins no more, as one that [`Options::lost`] names.
    /// [`SimulatorError::NoSuchRank`].
    pub fn lose(&self, rank: u32) -> Result<(), SimulatorError> {
        self.ask(|reply| Command::Lose { rank, reply })
    }

    fn ask(&self, command: impl FnOnce(Reply) -> Command) -> Result<(), SimulatorError> {
        let (reply, answer) = channel();
        self.commands
            .send(command(reply))
            .map_err(|_| SimulatorError::Ended)?;
        loop {
            match answer.recv_timeout(ASK_AGAIN) {
                Ok(answer) => return answer,
                Err(RecvTimeoutError::Disconnected) => return Err(SimulatorError::Ended),
                Err(RecvTimeoutError::Timeout) if is_interrupted(self.interrupted) => {
                    return Err(SimulatorError::Interrupted);
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
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
            by: format!("{}, by the host", self.machine.whose(address)),
        }
    }
}

/// The address on rank `to` of the place that `address` is on rank `from`, of an allocation of
/// [`Simulator::alloc_symmetric`].
pub const fn same_place(address: u64, from: u32, to: u32) -> u64 {
    address.wrapping_add((to as u64).wrapping_sub(from as u64) << RANK_SHIFT)
}

#[cfg(test)]
mod tests {
    use ferry_layout::MAX_BLOCKS;

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
    fn a_rank_that_is_lost_is_one_of_the_machine() {
        let started = |rank| {
            let lost = Some(Lost {
                rank,
                after_steps: 1,
            });
            let options = Options {
                lost,
                ..Options::new(2, 1)
            };
            Simulator::start(options).map(|_| ())
        };
        let refused = SimulatorError::NoSuchRank { rank: 2, ranks: 2 };
        assert_eq!((started(1), started(2)), (Ok(()), Err(refused)));
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
            let launched = simulator.launch(0, Kernel::FusedSilu, silu, None);
            let refused = Err(SimulatorError::TooManyWarps { warps });
            assert_eq!(launched == refused, is_refused, "{warps}: {launched:?}");
        }
    }
}
