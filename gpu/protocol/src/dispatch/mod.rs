//! Dispatch: every token goes to the ranks of its experts, and every rank puts what comes in expert order.

mod batch;
mod destination;
mod header;
mod notify;
pub mod numbering;
mod offsets;
pub mod output;
mod receive;
mod route;
mod scales;
mod send;

use ferry_layout::{Counter, DispatchArgs, DispatchOptions, Kernel};

use crate::dispatch::notify::notify;
use crate::dispatch::numbering::block::SmallBatch;
use crate::dispatch::receive::receive;
use crate::dispatch::send::send_items;
use crate::machine::Machine;
use crate::sync::launch::{Aborted, Launch};
use crate::tactics::Phase;
use crate::tactics::dispatch::DispatchTactics;
use crate::tactics::roles::DispatchRoles;
use crate::wire::credit::require_credits;
use crate::work::partition::Partition;

/// Sends this rank's tokens and counts, once every rank has read the round before: it waits for
/// that, and for nothing that a peer does in this round. Collective.
#[inline(always)]
pub fn dispatch_async<M: Machine>(
    machine: &M,
    args: &DispatchArgs,
    options: &DispatchOptions,
) -> Result<(), Aborted> {
    let launch = begin(machine, args, Kernel::DispatchAsync);
    launch.check()?;
    let tactics = tactics_of(&launch, Phase::Send);
    let roles = roles_of(&launch, tactics);
    launch.end(notify_and_send(&launch, args, tactics, roles))
}

/// Waits for all ranks' tokens and puts them in expert order, with offsets and sources.
/// After `dispatch_async`, in stream order. Collective.
#[inline(always)]
pub fn dispatch_wait<M: Machine>(
    machine: &M,
    args: &DispatchArgs,
    options: &DispatchOptions,
) -> Result<(), Aborted> {
    let launch = Launch::begin(machine, &args.common, Kernel::DispatchWait);
    launch.check()?;
    let position = machine.warp_position();
    let partition = Partition {
        index: position.warp(),
        of: position.warps(),
    };
    launch.end(receive(&launch, args, partition))
}

/// Both in one launch. Collective. All warps must be resident at once: they wait for peers,
/// which wait for all of them.
#[inline(always)]
pub fn dispatch<M: Machine>(
    machine: &M,
    args: &DispatchArgs,
    options: &DispatchOptions,
) -> Result<(), Aborted> {
    let launch = begin(machine, args, Kernel::Dispatch);
    launch.check()?;
    let tactics = tactics_of(&launch, Phase::Fused);
    let roles = roles_of(&launch, tactics);
    let sent = notify_and_send(&launch, args, tactics, roles);
    launch.end(sent.and_then(|()| match roles.receiver {
        Some(partition) => receive(&launch, args, partition),
        None => Ok(()),
    }))
}

/// Begins a launch that sends. Every block numbers a small batch. The ids are asked for together with the
/// machine's own loads, before one of them is waited for, and one barrier ends both the numbering and the
/// machine's first steps.
#[inline(always)]
fn begin<'a, M: Machine>(machine: &'a M, args: &'a DispatchArgs, kernel: Kernel) -> Launch<'a, M> {
    // Before the machine waits for earlier kernels, as the arguments are there already.
    let batch = SmallBatch::to_number(args);
    let mut loading = machine.begin();
    let ids = batch.load_ids(machine);
    machine.clear_block();
    if !batch.is_empty() {
        batch.clear(machine);
        // The ids are still on their way.
        machine.block_barrier();
    }
    // Behind that barrier, as the warp that asks waits for an answer.
    machine.ask_credits(&mut loading);
    batch.number(machine, ids);
    Launch::begun(machine, &args.common, kernel, loading)
}

#[inline(always)]
fn tactics_of<M: Machine>(launch: &Launch<M>, phase: Phase) -> DispatchTactics {
    let machine = launch.machine;
    let grid = machine.warp_position().grid();
    DispatchTactics::decide(
        launch.common,
        launch.tokens,
        phase,
        grid,
        machine.spans_nodes(),
    )
}

#[inline(always)]
fn roles_of<M: Machine>(launch: &Launch<M>, tactics: DispatchTactics) -> DispatchRoles {
    let items = launch.tokens * tactics.parts;
    DispatchRoles::of(tactics, launch.machine.warp_position(), items)
}

/// Notifies and sends, this warp's partitions of both.
#[inline(always)]
fn notify_and_send<M: Machine>(
    launch: &Launch<M>,
    args: &DispatchArgs,
    tactics: DispatchTactics,
    roles: DispatchRoles,
) -> Result<(), Aborted> {
    if launch.machine.warp() == 0 {
        launch.machine.leave(Counter::CombineTickets, 0);
    }
    // Receivers wait, too: a rank that waits for a credit itself must not be named as the one at fault.
    require_credits(launch)?;
    if let Some(partition) = roles.notifier {
        notify(launch, tactics.numbering, partition)?;
    }
    match roles.sender {
        Some(partition) => send_items(launch, args, tactics, partition),
        None => Ok(()),
    }
}
