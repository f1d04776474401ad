//! Combine: expert outputs go back to their tokens and are summed.

mod credits;
pub mod ending;
mod give_up;
pub mod launch;
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
use crate::combine::launch::Combine;
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
    let combine = Combine::begin(machine, args, options, Kernel::CombineAsync);
    combine.enter()?;
    let (extent, tactics) = combine.tactics(Phase::Send);
    let sender = CombineRoles::sender(tactics, machine.warp_position());
    combine.end(combine.send_back(extent, tactics, sender))
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
    let combine = Combine::begin(machine, args, options, Kernel::CombineWait);
    combine.enter()?;
    let (_, tactics) = combine.tactics(Phase::Wait);
    let reducer = CombineRoles::reducer(tactics, machine.warp_position());
    combine.end(combine.reduce_rows(tactics, reducer, ending))
}

/// Runs [`combine`] with the last step `ending`.
#[inline(always)]
fn send_and_reduce<M: Machine>(
    machine: &M,
    args: &CombineArgs,
    options: &CombineOptions,
    ending: impl Ending<M>,
) -> Result<(), Aborted> {
    let combine = Combine::begin(machine, args, options, Kernel::Combine);
    combine.enter()?;
    let (extent, tactics) = combine.tactics(Phase::Fused);
    let sender = CombineRoles::sender(tactics, machine.warp_position());
    let sent = combine.send_back(extent, tactics, sender);
    if sent.is_err() {
        return combine.end(sent);
    }
    let reducer = CombineRoles::reducer(tactics, machine.warp_position());
    combine.end(combine.reduce_rows(tactics, reducer, ending))
}

impl<'a, M: Machine> Combine<'a, M> {
    /// Begins a launch.
    #[inline(always)]
    fn begin(
        machine: &'a M,
        args: &'a CombineArgs,
        options: &'a CombineOptions,
        kernel: Kernel,
    ) -> Self {
        let is_counted = options.tokens_on_device != 0;
        Self {
            launch: Launch {
                varies: machine.keeps_rows(),
                ..Launch::begin(machine, &args.common, kernel, is_counted)
            },
            args,
            options,
        }
    }

    /// The extent that dispatch found over all sources, and the tactics of this launch.
    #[inline(always)]
    fn tactics(&self, phase: Phase) -> (Extent, CombineTactics) {
        let machine = self.machine;
        let extent = Extent::of_word(machine.peek(Counter::Extent));
        let grid = machine.warp_position().grid();
        let spans_nodes = machine.spans_nodes();
        let tactics = CombineTactics::decide(
            self.common,
            self.tokens,
            extent,
            phase,
            grid,
            spans_nodes,
            machine.keeps_rows(),
        );
        (extent, tactics)
    }
}
