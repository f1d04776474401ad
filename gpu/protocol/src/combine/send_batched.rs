//! Combine on the experts' rank with many rows a warp: a warp sends several items back at a time.

use ferry_layout::{Header, NOT_ROUTED, SENTINEL, Table, Tensor};

use crate::combine::launch::Combine;
use crate::combine::rows::{Returned, end_view};
use crate::machine::finishing::Rounding;
use crate::machine::rows::{ByteRange, Row};
use crate::machine::{LANES, Machine};
use crate::wire::flagged;
use crate::work::extent::Extent;
use crate::work::item::Item;
use crate::work::lanes::lane_or_none;
use crate::work::rank_set::RankSet;
use crate::work::received_row::received_row;
use crate::work::sub_warps::SubWarps;

impl<M: Machine> Combine<'_, M> {
    /// Sends back a batch of items from item `first` on: those that have come to this rank. Their rows are
    /// whole, and their sources are P2P. Headers are read for all items at once, and one release is for all.
    #[inline(always)]
    pub fn send_batched(&self, extent: Extent, first: u32, written: impl FnOnce()) {
        let (machine, common, epoch) = (self.machine, self.common, self.epoch);
        let (shape, window, me) = (&common.shape, &common.window, common.rank());
        let sub_warps = SubWarps::of(shape);
        let index_of = |lane| first + sub_warps.item(lane);
        let item_of = |lane| extent.item(shape, me, index_of(lane), 1);
        let present = machine.lanes(|lane| extent.parts_here(self, index_of(lane)));
        // The last lanes repeat an assignment rather than branch.
        let slot_of = |lane| sub_warps.slot(lane).min(shape.top_k - 1);
        let place = |word: u32, lane| {
            let Item { source, token, .. } = item_of(lane);
            let header = window.dispatch_row(source, token).plus(common.row.header);
            header.plus(word)
        };
        let positions = machine.lanes(|lane| self.position_of(item_of(lane), sub_warps.slot(lane)));
        let words = machine
            .lanes(|lane| machine.read_window(place(Header::assignment(slot_of(lane)), lane)));
        let weights = machine.lanes(|lane| {
            let at = place(Header::weight(shape.top_k, slot_of(lane)), lane);
            self.row_weight(machine.own(positions, lane), at)
        });
        // The lanes that have an assignment of an item that has arrived.
        let coming = machine.ballot(machine.lanes(|lane| {
            let is_here = machine.own(present, lane).is_some_and(|parts| parts != 0);
            is_here && sub_warps.slot(lane) < shape.top_k
        }));
        let here = coming & self.slots_here(positions);
        let slots = self.slots_of(sub_warps, words, coming);
        let mut item = 0;
        while item < sub_warps.most() {
            let lane = sub_warps.first(item);
            let slot = machine.broadcast(slots, lane);
            let Item { source, token, .. } = item_of(lane);
            let from = |lane| {
                let weight = f32::from_bits(machine.broadcast(weights, lane));
                let row = machine.broadcast(positions, lane);
                (Row::Tensor(Tensor::Expert, row), weight)
            };
            if slot != SENTINEL {
                let to = window.combine_row(token, slot);
                let range = ByteRange::part(shape.combine_row_bytes(), 0, 1);
                machine.sum_rows(
                    range,
                    here & sub_warps.lanes(item),
                    from,
                    Row::Window(source, to),
                    Rounding,
                );
                if machine.keeps_rows() {
                    let returned = Returned {
                        row: machine.broadcast(positions, lane),
                        experts: self.experts_from(words, lane),
                    };
                    end_view(self, self.options.rows.layout(), item_of(lane));
                    self.return_weights(Row::Window(source, to), returned);
                }
            }
            item += 1;
        }
        written();
        machine.release();
        machine.lanes(|lane| {
            if sub_warps.slot(lane) == 0 && machine.own(slots, lane) != SENTINEL {
                let item = item_of(lane);
                let flag = window.combine_flag(item.flag(), machine.own(slots, lane));
                flagged::publish(machine, item.source, flag, epoch);
            }
        });
    }

    /// The expert row of a top-k slot of an item's token; the last slot again for slots after it. Of rows
    /// that stayed as they came, the only one is in slot 0. For one lane.
    #[inline(always)]
    fn position_of(&self, item: Item, slot: u32) -> u32 {
        let (machine, shape) = (self.machine, &self.common.shape);
        let Item { source, token, .. } = item;
        match (machine.keeps_rows(), slot) {
            (false, _) => {
                let slot = slot.min(shape.top_k - 1);
                machine.read(Table::RowMap, shape.row_map_index(source, token, slot))
            }
            (true, 0) => received_row(self, self.options.rows.layout(), source, token),
            (true, _) => NOT_ROUTED,
        }
    }

    /// The experts in the words from lane `first` on, a top-k slot a lane.
    #[inline(always)]
    fn experts_from(&self, words: M::Lanes<u32>, first: u32) -> M::Lanes<u32> {
        let (machine, shape) = (self.machine, &self.common.shape);
        let words = machine.shuffle(words, machine.lanes(|slot| (first + slot).min(LANES - 1)));
        machine.lanes(|slot| {
            lane_or_none(slot, shape.top_k, || {
                let word = machine.own(words, slot);
                shape.assignment_words().decode(word).expert
            })
        })
    }

    /// The slot of each item's row at its source, on the item's lanes; [`SENTINEL`] if the item has not
    /// arrived. `coming`: the lanes whose words are assignments.
    #[inline(always)]
    fn slots_of(&self, sub_warps: SubWarps, words: M::Lanes<u32>, coming: u32) -> M::Lanes<u32> {
        let (machine, common) = (self.machine, self.common);
        let shape = &common.shape;
        let mut slots = machine.lanes(|_| SENTINEL);
        let mut item = 0;
        while item < sub_warps.most() {
            let experts = machine.lanes(|lane| {
                let assignment = shape.assignment_words().decode(machine.own(words, lane));
                match (coming & sub_warps.lanes(item)) >> lane & 1 != 0 {
                    true => assignment.expert,
                    false => NOT_ROUTED,
                }
            });
            let slot = RankSet::of_experts(machine, shape, experts)
                .reduced_slot(&common.window, common.rank());
            let has_come = coming & sub_warps.lanes(item) != 0;
            slots = machine.lanes(|lane| match has_come && sub_warps.item(lane) == item {
                true => slot,
                false => machine.own(slots, lane),
            });
            item += 1;
        }
        slots
    }
}
