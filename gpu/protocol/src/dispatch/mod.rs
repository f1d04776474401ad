//! Dispatch: every token goes to the ranks of its experts, and every rank puts the received rows in expert
//! order, or keeps them as they came ([`receive::unsorted`]).

pub mod launch;
pub mod place;
pub mod receive;
pub mod send;

use ferry_layout::{Counter, DispatchArgs, DispatchOptions, Kernel};

use crate::dispatch::launch::{Dispatch, read_tokens};
use crate::dispatch::send::numbering::block::SmallBatch;
use crate::machine::Machine;
use crate::sync::launch::{Aborted, Launch};
use crate::tactics::Phase;
use crate::tactics::dispatch::DispatchTactics;
use crate::tactics::roles::DispatchRoles;
use crate::wire::credit::require_credits;
use crate::work::partition::Partition;

/// Sends this rank's tokens and counts, after every rank has read those of the round before: it waits for
/// that, and for nothing that a peer does in this round. Collective.
#[inline(always)]
pub fn dispatch_async<M: Machine>(
    machine: &M,
    args: &DispatchArgs,
    options: &DispatchOptions,
) -> Result<(), Aborted> {
    let dispatch = Dispatch::begin(machine, args, options, Kernel::DispatchAsync);
    dispatch.enter()?;
    let tactics = dispatch.tactics(Phase::Send);
    let roles = dispatch.roles(tactics);
    dispatch.end(dispatch.notify_and_send(tactics, roles))
}

/// Waits for all ranks' tokens and puts them in the layout that the options name, with offsets and sources.
/// After `dispatch_async`, in stream order. Collective.
#[inline(always)]
pub fn dispatch_wait<M: Machine>(
    machine: &M,
    args: &DispatchArgs,
    options: &DispatchOptions,
) -> Result<(), Aborted> {
    let is_counted = options.tokens_on_device != 0;
    let launch = Launch {
        varies: machine.keeps_rows(),
        ..Launch::begin(machine, &args.common, Kernel::DispatchWait, is_counted)
    };
    let dispatch = Dispatch {
        launch,
        args,
        options,
    };
    dispatch.enter()?;
    let position = machine.warp_position();
    let partition = Partition {
        index: position.warp(),
        of: position.warps(),
    };
    dispatch.end(dispatch.receive(partition))
}

/// Does both in one launch. Collective. All warps must be resident at once: they wait for peers, which wait
/// for all of them.
#[inline(always)]
pub fn dispatch<M: Machine>(
    machine: &M,
    args: &DispatchArgs,
    options: &DispatchOptions,
) -> Result<(), Aborted> {
    let dispatch = Dispatch::begin(machine, args, options, Kernel::Dispatch);
    dispatch.enter()?;
    let tactics = dispatch.tactics(Phase::Fused);
    let roles = dispatch.roles(tactics);
    let sent = dispatch.notify_and_send(tactics, roles);
    // Not a closure, which is too large to be inlined: it would keep the launch in memory.
    dispatch.end(match (sent, roles.receiver) {
        (Ok(()), Some(partition)) => dispatch.receive(partition),
        (sent, _) => sent,
    })
}

impl<'a, M: Machine> Dispatch<'a, M> {
    /// Begins a launch that numbers assignments. Every block numbers a small batch. The ids are loaded
    /// together with the machine's own words, before any of them is waited for, and one barrier ends both the
    /// numbering and the machine's first steps.
    #[inline(always)]
    fn begin(
        machine: &'a M,
        args: &'a DispatchArgs,
        options: &'a DispatchOptions,
        kernel: Kernel,
    ) -> Self {
        let mut tokens = args.common.tokens;
        // Before the machine waits for earlier kernels, as the arguments are there already.
        let is_wide = options.wide_ids != 0;
        let mut batch = SmallBatch::to_number(args, tokens, is_wide);
        let mut loading = machine.begin();
        // Also before the number on the device is known: the batch leaves out the ids after its end.
        let mut ids = batch.load_ids(machine);
        if options.tokens_on_device != 0 {
            let is_loaded = !batch.is_empty();
            tokens = tokens.min(read_tokens(machine));
            batch = SmallBatch::to_number(args, tokens, is_wide);
            if !is_loaded {
                ids = batch.load_ids(machine);
            }
        }
        machine.clear_block();
        if !batch.is_empty() {
            batch.clear(machine);
            // The ids are still on their way.
            machine.block_barrier();
        }
        // After that barrier, as the warp that loads them waits for an answer.
        machine.ask_credits(&mut loading);
        batch.number(machine, ids);
        let launch = Launch {
            wide_ids: is_wide,
            varies: machine.keeps_rows(),
            ..Launch::begun(machine, &args.common, kernel, tokens, loading)
        };
        Self {
            launch,
            args,
            options,
        }
    }

    #[inline(always)]
    fn tactics(&self, phase: Phase) -> DispatchTactics {
        DispatchTactics::decide(
            self.common,
            self.tokens,
            phase,
            self.machine.warp_position().grid(),
            self.machine.spans_nodes(),
            self.layout(),
        )
    }

    #[inline(always)]
    fn roles(&self, tactics: DispatchTactics) -> DispatchRoles {
        let items = self.tokens * tactics.parts;
        DispatchRoles::of(tactics, self.machine.warp_position(), items)
    }

    /// Notifies and sends this warp's partitions of both.
    #[inline(always)]
    fn notify_and_send(
        &self,
        tactics: DispatchTactics,
        roles: DispatchRoles,
    ) -> Result<(), Aborted> {
        if self.machine.warp() == 0 {
            self.machine.leave(Counter::CombineTickets, 0);
            if self.options.tokens_on_device != 0 {
                self.keep_tokens();
            }
        }
        // Receivers wait, too: a rank that waits for a credit itself must not be named as the one at fault.
        require_credits(self)?;
        if let Some(partition) = roles.notifier {
            self.notify(tactics.numbering, partition)?;
        }
        match roles.sender {
            Some(partition) => self.send_items(tactics, partition),
            None => Ok(()),
        }
    }

    /// Receives this warp's partition of the items that may arrive.
    #[inline(always)]
    fn receive(&self, partition: Partition) -> Result<(), Aborted> {
        match self.machine.keeps_rows() {
            true => self.receive_unsorted(partition),
            false => self.receive_by_expert(partition),
        }
    }
}
