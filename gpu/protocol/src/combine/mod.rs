//! Combine: expert outputs go back to their tokens and are summed.

mod credits;
pub mod ending;
mod give_up;
pub mod received;
pub mod reduce;
mod rows;
mod send;
mod send_batched;
mod send_exact;
mod send_reduced;
mod work;

use ferry_layout::{CombineArgs, CombineOptions, Counter, Epilogue, Kernel};

use crate::combine::ending::{Ending, GivenEnding, OnlyRounds, only_rounds};
use crate::combine::reduce::reduce_rows;
use crate::combine::send::send_back;
use crate::machine::Machine;
use crate::sync::launch::{Aborted, Launch};
use crate::tactics::Phase;
use crate::tactics::combine::CombineTactics;
use crate::tactics::roles::CombineRoles;
use crate::work::extent::Extent;

pub use give_up::give_up;

/// Sends this rank's expert outputs back; waits for nothing that a peer does. After the round's
/// dispatch, in stream order. Collective.
#[inline(always)]
pub fn combine_async<M: Machine, E: Epilogue>(
    machine: &M,
    args: &CombineArgs,
    options: &CombineOptions,
    _epilogue: &E,
) -> Result<(), Aborted> {
    let launch = begin(machine, args, options, Kernel::CombineAsync);
    launch.enter()?;
    let (extent, tactics) = tactics_of(&launch, Phase::Send);
    let sender = CombineRoles::sender(tactics, machine.warp_position());
    launch.end(send_back(&launch, args, options, extent, tactics, sender))
}

/// Waits for the rows of this rank's tokens and sums them; ends the round. After
/// `combine_async`, in stream order. Collective.
#[inline(always)]
pub fn combine_wait<M: Machine, E: Epilogue>(
    machine: &M,
    args: &CombineArgs,
    options: &CombineOptions,
    epilogue: &E,
) -> Result<(), Aborted> {
    match only_rounds(machine, options, epilogue) {
        true => wait_and_reduce(machine, args, &options.only_rounding(), OnlyRounds),
        false => wait_and_reduce(machine, args, options, GivenEnding { options, epilogue }),
    }
}

/// Does both in one launch. Collective. All warps must be resident at once.
#[inline(always)]
pub fn combine<M: Machine, E: Epilogue>(
    machine: &M,
    args: &CombineArgs,
    options: &CombineOptions,
    epilogue: &E,
) -> Result<(), Aborted> {
    match only_rounds(machine, options, epilogue) {
        true => send_and_reduce(machine, args, &options.only_rounding(), OnlyRounds),
        false => send_and_reduce(machine, args, options, GivenEnding { options, epilogue }),
    }
}

/// Runs [`combine_wait`] with the last step `ending`.
#[inline(always)]
fn wait_and_reduce<M: Machine>(
    machine: &M,
    args: &CombineArgs,
    options: &CombineOptions,
    ending: impl Ending<M>,
) -> Result<(), Aborted> {
    let launch = begin(machine, args, options, Kernel::CombineWait);
    launch.enter()?;
    let (_, tactics) = tactics_of(&launch, Phase::Wait);
    let reducer = CombineRoles::reducer(tactics, machine.warp_position());
    launch.end(reduce_rows(
        &launch, args, options, tactics, reducer, ending,
    ))
}

/// Runs [`combine`] with the last step `ending`.
#[inline(always)]
fn send_and_reduce<M: Machine>(
    machine: &M,
    args: &CombineArgs,
    options: &CombineOptions,
    ending: impl Ending<M>,
) -> Result<(), Aborted> {
    let launch = begin(machine, args, options, Kernel::Combine);
    launch.enter()?;
    let (extent, tactics) = tactics_of(&launch, Phase::Fused);
    let sender = CombineRoles::sender(tactics, machine.warp_position());
    let sent = send_back(&launch, args, options, extent, tactics, sender);
    if sent.is_err() {
        return launch.end(sent);
    }
    let reducer = CombineRoles::reducer(tactics, machine.warp_position());
    launch.end(reduce_rows(
        &launch, args, options, tactics, reducer, ending,
    ))
}

/// Begins a launch.
#[inline(always)]
fn begin<'a, M: Machine>(
    machine: &'a M,
    args: &'a CombineArgs,
    options: &CombineOptions,
    kernel: Kernel,
) -> Launch<'a, M> {
    Launch {
        varies: machine.keeps_rows(),
        ..Launch::begin(machine, &args.common, kernel, options.tokens_on_device != 0)
    }
}

/// The extent that dispatch found over all sources, and the tactics of this launch.
#[inline(always)]
fn tactics_of<M: Machine>(launch: &Launch<M>, phase: Phase) -> (Extent, CombineTactics) {
    let machine = launch.machine;
    let extent = Extent::of_word(machine.peek(Counter::Extent));
    let grid = machine.warp_position().grid();
    let spans_nodes = machine.spans_nodes();
    let tactics = CombineTactics::decide(
        launch.common,
        launch.tokens,
        extent,
        phase,
        grid,
        spans_nodes,
        machine.keeps_rows(),
    );
    (extent, tactics)
}
