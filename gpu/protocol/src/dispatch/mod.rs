//! Dispatch: every token goes to the ranks of its experts, and every rank puts the received rows in expert
//! order, or keeps them as they came ([`rows`]).

mod batch;
pub mod blocks;
pub mod counts;
pub mod destination;
pub mod entries;
pub mod experts;
mod fill;
mod header;
pub mod ids;
pub mod notify;
pub mod numbering;
pub mod offsets;
pub mod overflow;
pub mod padding;
pub mod pass_through;
pub mod receive;
pub mod route;
mod rows;
pub mod scales;
mod send;
pub mod shared;

use ferry_layout::{
    Counter, DispatchArgs, DispatchOptions, Fault, FaultKind, Kernel, ReceiveLayout, Region, Table,
};

use crate::dispatch::notify::notify;
use crate::dispatch::numbering::block::SmallBatch;
use crate::dispatch::receive::receive_by_expert;
use crate::dispatch::rows::receive_rows;
use crate::dispatch::send::send_items;
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
    let launch = begin(machine, args, options, Kernel::DispatchAsync);
    launch.enter()?;
    let tactics = tactics_of(&launch, options, Phase::Send);
    let roles = roles_of(&launch, tactics);
    launch.end(notify_and_send(&launch, args, options, tactics, roles))
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
    launch.enter()?;
    let position = machine.warp_position();
    let partition = Partition {
        index: position.warp(),
        of: position.warps(),
    };
    launch.end(receive(&launch, args, options, partition))
}

/// Does both in one launch. Collective. All warps must be resident at once: they wait for peers, which wait
/// for all of them.
#[inline(always)]
pub fn dispatch<M: Machine>(
    machine: &M,
    args: &DispatchArgs,
    options: &DispatchOptions,
) -> Result<(), Aborted> {
    let launch = begin(machine, args, options, Kernel::Dispatch);
    launch.enter()?;
    let tactics = tactics_of(&launch, options, Phase::Fused);
    let roles = roles_of(&launch, tactics);
    let sent = notify_and_send(&launch, args, options, tactics, roles);
    // Not a closure, which is too large to be inlined: it would keep the launch in memory.
    launch.end(match (sent, roles.receiver) {
        (Ok(()), Some(partition)) => receive(&launch, args, options, partition),
        (sent, _) => sent,
    })
}

/// Receives this warp's partition of the items that may arrive.
#[inline(always)]
fn receive<M: Machine>(
    launch: &Launch<M>,
    args: &DispatchArgs,
    options: &DispatchOptions,
    partition: Partition,
) -> Result<(), Aborted> {
    match launch.machine.keeps_rows() {
        true => receive_rows(launch, args, options, partition),
        false => receive_by_expert(launch, args, options, partition),
    }
}

/// Begins a launch that numbers assignments. Every block numbers a small batch. The ids are loaded together
/// with the machine's own words, before any of them is waited for, and one barrier ends both the numbering
/// and the machine's first steps.
#[inline(always)]
fn begin<'a, M: Machine>(
    machine: &'a M,
    args: &'a DispatchArgs,
    options: &DispatchOptions,
    kernel: Kernel,
) -> Launch<'a, M> {
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
    Launch {
        wide_ids: is_wide,
        varies: machine.keeps_rows(),
        ..Launch::begun(machine, &args.common, kernel, tokens, loading)
    }
}

/// Number of tokens on the device: one for all warps of a block, which pass a barrier. Blocks may read other
/// numbers if the user changes it too early; each of them still stays inside its tensors, and waits end.
#[inline(always)]
pub fn read_tokens<M: Machine>(machine: &M) -> u32 {
    machine.agree(|| {
        let tokens = machine.lanes(|_| machine.read(Table::TokensOnDevice, 0));
        machine.broadcast(tokens, 0)
    })
}

/// Keeps the number of tokens for the round's other launches, and reports a number above the host's limit.
/// One warp.
#[inline(always)]
pub fn keep_tokens<M: Machine>(launch: &Launch<M>) {
    let (machine, most) = (launch.machine, launch.common.tokens);
    machine.leave(Counter::Tokens, launch.tokens as u64);
    let given = machine.agreed();
    if given > most {
        launch.record_input(FaultKind::TooManyOnDevice, 1, |_| Fault {
            region: Region::TokensOnDevice,
            wanted: most as u64,
            saw: given as u64,
            ..launch.fault()
        });
    }
}

#[inline(always)]
fn tactics_of<M: Machine>(
    launch: &Launch<M>,
    options: &DispatchOptions,
    phase: Phase,
) -> DispatchTactics {
    let machine = launch.machine;
    let receive = match machine.keeps_rows() {
        true => options.rows.layout(),
        false => ReceiveLayout::ByExpert,
    };
    DispatchTactics::decide(
        launch.common,
        launch.tokens,
        phase,
        machine.warp_position().grid(),
        machine.spans_nodes(),
        receive,
    )
}

#[inline(always)]
fn roles_of<M: Machine>(launch: &Launch<M>, tactics: DispatchTactics) -> DispatchRoles {
    let items = launch.tokens * tactics.parts;
    DispatchRoles::of(tactics, launch.machine.warp_position(), items)
}

/// Notifies and sends this warp's partitions of both.
#[inline(always)]
fn notify_and_send<M: Machine>(
    launch: &Launch<M>,
    args: &DispatchArgs,
    options: &DispatchOptions,
    tactics: DispatchTactics,
    roles: DispatchRoles,
) -> Result<(), Aborted> {
    if launch.machine.warp() == 0 {
        launch.machine.leave(Counter::CombineTickets, 0);
        if options.tokens_on_device != 0 {
            keep_tokens(launch);
        }
    }
    // Receivers wait, too: a rank that waits for a credit itself must not be named as the one at fault.
    require_credits(launch)?;
    if let Some(partition) = roles.notifier {
        notify(launch, tactics.numbering, partition)?;
    }
    match roles.sender {
        Some(partition) => send_items(launch, args, options, tactics, partition),
        None => Ok(()),
    }
}
