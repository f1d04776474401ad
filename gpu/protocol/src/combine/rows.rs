//! Combine of rows that stayed as they came: the end of a view, and weights that return with the rows.

use ferry_layout::{ReceiveLayout, SENTINEL, Table, Window, assignment_index, avoid_sentinel};

use crate::combine::launch::Combine;
use crate::machine::miss::TimedOut;
use crate::machine::rows::{ByteRange, Row};
use crate::machine::{LANES, Machine};
use crate::sync::launch::Launch;
use crate::sync::wait::wait_for;
use crate::work::item::Item;
use crate::work::rank_set::RankSet;

/// A row that returns.
pub struct Returned<L> {
    /// Its number among the expert rows.
    pub row: u32,
    /// The experts of its token, one a lane.
    pub experts: L,
}

/// Ends an item's part of a view, if kernels are to check: fills its payload, and with its first part the
/// scales, so that nobody who reads them later takes them for a row. The header stays. Before this rank
/// returns its credit.
#[inline(always)]
pub fn end_view<M: Machine>(launch: &Launch<M>, layout: ReceiveLayout, item: Item) {
    let (machine, common) = (launch.machine, launch.common);
    let is_view = machine.keeps_rows() && layout == ReceiveLayout::View;
    if !is_view || common.debug_checks == 0 {
        return;
    }
    let at = common.window.dispatch_row(item.source, item.token);
    let row = machine.row(Row::Window(common.rank(), at));
    let fill = |range: ByteRange| {
        let mut start = range.start;
        while start < range.end {
            machine.store_tile(row, start, range.end, &[M::SENTINELS]);
            start += M::WARP_BYTES;
        }
    };
    fill(item.range(common.row.payload_bytes));
    if item.part == 0 {
        fill(ByteRange {
            start: common.row.payload_bytes,
            end: common.row.header,
        });
    }
}

impl<M: Machine> Combine<'_, M> {
    /// Writes the weights of a row's slots whose experts are here, after its payload in `to`: zeros if the
    /// row did not fit in the outputs. Nothing if no weights return.
    #[inline(always)]
    pub fn return_weights(&self, to: Row, returned: Returned<M::Lanes<u32>>) {
        let (machine, common) = (self.machine, self.common);
        let shape = &common.shape;
        let (Row::Window(rank, at) | Row::Inline(rank, at)) = to else {
            return;
        };
        if !machine.keeps_rows() || self.options.rows.weights == 0 {
            return;
        }
        let is_inside = (returned.row as u64) < self.args.row_capacity;
        let first_expert = common.rank().0 * shape.local_experts();
        machine.lanes(|lane| {
            let expert = machine
                .own(returned.experts, lane)
                .wrapping_sub(first_expert);
            if lane >= shape.top_k || expert >= shape.local_experts() {
                return;
            }
            let weight = match is_inside {
                true => {
                    let at = assignment_index(shape.top_k, returned.row, lane);
                    machine.read(Table::ReturnedWeights, at)
                }
                false => 0,
            };
            let at = Window::combine_weight(shape, at, lane);
            machine.write_word(rank, at, avoid_sentinel(weight));
        });
    }

    /// Writes the weights that the ranks of a token's experts returned, one for each top-k slot; 0 for slots
    /// that are not routed. Waits for inline weights and re-arms their words; others have arrived with their
    /// rows. On a time-out writes nothing, and the error has the slot of a row that is missing. Does nothing
    /// if the launch returns no weights.
    #[inline(always)]
    pub fn take_weights(
        &self,
        token: u32,
        is_inline: bool,
        experts: M::Lanes<u32>,
    ) -> Result<(), TimedOut> {
        let (machine, common) = (self.machine, self.common);
        let (shape, window) = (&common.shape, &common.window);
        if !machine.keeps_rows() || self.options.rows.combined_weights == 0 {
            return Ok(());
        }
        let ranks = RankSet::of_experts(machine, shape, experts);
        let routed =
            machine
                .ballot(machine.lanes(|lane| {
                    lane < shape.top_k && machine.own(experts, lane) < shape.experts
                }));
        let slots = machine.lanes(|lane| {
            let expert = machine.own(experts, lane).min(shape.experts - 1);
            ranks.reduced_slot(window, shape.rank_of(expert))
        });
        // Kept rather than computed by nested closures, which would live in memory.
        let at = machine.lanes(|lane: u32| {
            let slot = machine.own(slots, lane);
            let row = match is_inline {
                true => window.inline_combine_row(token, slot),
                false => window.combine_row(token, slot),
            };
            Window::combine_weight(shape, row, lane.min(shape.top_k - 1))
        });
        let read = || {
            machine.lanes(|lane| match routed >> lane & 1 != 0 {
                true => machine.read_window(machine.own(at, lane)),
                false => 0,
            })
        };
        let mut weights = read();
        if is_inline && wait_for(machine, &mut weights, read, |word| word == SENTINEL).is_err() {
            let is_missing = machine.lanes(|lane| machine.own(weights, lane) == SENTINEL);
            let lane = machine.ballot(is_missing).trailing_zeros().min(LANES - 1);
            let row = machine.broadcast(slots, lane);
            return Err(TimedOut { row });
        }
        machine.lanes(|lane| {
            if is_inline && routed >> lane & 1 != 0 {
                machine.write_window(machine.own(at, lane), SENTINEL);
            }
            if lane < shape.top_k {
                let index = assignment_index(shape.top_k, token, lane);
                machine.write(Table::CombinedWeights, index, machine.own(weights, lane));
            }
        });
        Ok(())
    }
}
