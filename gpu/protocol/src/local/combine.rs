//! Sums of each token's rows on this rank, at the positions that the last dispatch left.

use ferry_layout::{
    CombineArgs, CombineMode, CombineOptions, Counter, Epilogue, Header, Kernel, Table, Tensor,
    assignment_index,
};

use crate::combine::ending::{Ending, GivenEnding, OnlyRounds, only_rounds};
use crate::combine::launch::Combine;
use crate::combine::received::read_positions;
use crate::machine::Machine;
use crate::machine::rows::Row;
use crate::sync::launch::{Aborted, Launch};
use crate::work::item::Item;
use crate::work::partition::Partition;
use crate::work::queue::WorkQueue;

/// Sums each token's rows of this rank's experts; zeros for a token without any. Ends the round. Waits for no
/// other rank: the caller adds their sums.
#[inline(always)]
pub fn combine_local<M: Machine, E: Epilogue>(
    machine: &M,
    args: &CombineArgs,
    options: &CombineOptions,
    epilogue: &E,
) -> Result<(), Aborted> {
    match only_rounds(machine, options, epilogue) {
        true => sum_tokens(machine, args, &options.only_rounding(), OnlyRounds),
        false => sum_tokens(machine, args, options, GivenEnding { options, epilogue }),
    }
}

/// Runs [`combine_local`] with the last step `ending`.
#[inline(always)]
fn sum_tokens<M: Machine>(
    machine: &M,
    args: &CombineArgs,
    options: &CombineOptions,
    ending: impl Ending<M>,
) -> Result<(), Aborted> {
    let launch = Launch::begin(
        machine,
        &args.common,
        Kernel::LocalCombine,
        options.tokens_on_device != 0,
    );
    let combine = Combine {
        launch,
        args,
        options,
    };
    combine.check()?;
    sum_items(&combine, ending);
    combine.leave_round();
    Ok(())
}

/// Computes this warp's items of the sums.
#[inline(always)]
fn sum_items<M: Machine>(combine: &Combine<M>, ending: impl Ending<M>) {
    let (machine, common) = (combine.machine, combine.common);
    let position = machine.warp_position();
    let partition = Partition {
        index: position.warp(),
        of: position.warps(),
    };
    let parts = common.shape.reduce_parts(combine.tokens);
    let items = combine.tokens * parts;
    let mut queue = WorkQueue::new(machine, partition, items, Counter::CombineTickets);
    while let Some(index) = queue.next_item() {
        let item = Item {
            source: common.rank(),
            token: index >> parts.trailing_zeros(),
            part: index & (parts - 1),
            parts,
        };
        sum_item(combine, ending, item);
        queue.take_ticket();
    }
}

/// Writes a part of a token's sum, or of its rows.
#[inline(always)]
fn sum_item<M: Machine>(combine: &Combine<M>, ending: impl Ending<M>, item: Item) {
    let (machine, shape) = (combine.machine, &combine.common.shape);
    // Both are loaded before either is waited for.
    let positions = read_positions(combine, item);
    let weights = read_weights(combine, item.token, positions);
    let here = combine.slots_here(positions);
    let row = |k| Row::Tensor(Tensor::Expert, machine.broadcast(positions, k));
    if shape.mode() == CombineMode::Exact && combine.args.topk_weights == 0 {
        return combine.copy_slots(item, here, row);
    }
    let range = item.range(shape.combine_row_bytes());
    let weighted = |k| (row(k), f32::from_bits(machine.broadcast(weights, k)));
    let to = Row::Tensor(Tensor::Combined, item.token);
    let finish = ending.of_token(combine, item.token);
    machine.sum_rows(range, here, weighted, to, finish);
}

/// The weights of a token, as f32 bits: those of the dispatch, in exact mode of this combine. The last lanes
/// repeat an assignment.
#[inline(always)]
fn read_weights<M: Machine>(
    combine: &Combine<M>,
    token: u32,
    positions: M::Lanes<u32>,
) -> M::Lanes<u32> {
    let (machine, common) = (combine.machine, combine.common);
    let top_k = common.shape.top_k;
    let slot = |lane: u32| lane.min(top_k - 1);
    if combine.args.topk_weights != 0 {
        return machine.lanes(|lane| {
            machine.read(
                Table::TopkWeights,
                assignment_index(top_k, token, slot(lane)),
            )
        });
    }
    let row = common.window.dispatch_row(common.rank(), token);
    let header = row.plus(common.row.header);
    machine.lanes(|lane| {
        let at = header.plus(Header::weight(top_k, slot(lane)));
        combine.row_weight(machine.own(positions, lane), at)
    })
}
