//! Reduced mode: a token's expert outputs on this rank are summed, weighted, and their sum goes back.

use ferry_layout::{Header, Rank, Tensor};

use crate::combine::launch::Combine;
use crate::combine::rows::{Returned, end_view};
use crate::combine::work::Work;
use crate::machine::Machine;
use crate::machine::finishing::Rounding;
use crate::machine::rows::Row;
use crate::sync::launch::Aborted;
use crate::tactics::Wire;
use crate::wire::remote::RowPuts;
use crate::wire::{flagged, remote};
use crate::work::item::Item;
use crate::work::lanes::lane_or_none;
use crate::work::rank_set::RankSet;

impl<M: Machine> Combine<'_, M> {
    /// Sends the sum of an item back. `read` is called after everything that dispatch brought for the item is
    /// read, `written` after the row, if there is one, is written.
    #[inline(always)]
    pub fn send_reduced(
        &self,
        work: Work,
        puts: RowPuts<M>,
        read: impl FnOnce() -> Result<(), Aborted>,
        written: impl FnOnce(),
    ) -> Result<RowPuts<M>, Aborted> {
        let slot = match work.item {
            Some(item) => self.sum_item(work.wire, item, read)?,
            None => 0,
        };
        written();
        match (work.wire, work.item) {
            (Wire::Inline, _) => {}
            (Wire::FlaggedByBlock, item) => {
                let word = item.map_or(0, |item| Flag { item, slot }.to_word());
                self.publish_by_block(work, word);
            }
            (_, Some(item)) => return self.publish(puts, item, slot),
            (_, None) => {}
        }
        Ok(puts)
    }

    /// Sums a token's expert outputs on this rank, weighted, into the row at the source, or if that is on
    /// another node, into the staging area. Returns the slot of the row at the source. `read`: as for
    /// [`send_reduced`].
    #[inline(always)]
    fn sum_item(
        &self,
        wire: Wire,
        item: Item,
        read: impl FnOnce() -> Result<(), Aborted>,
    ) -> Result<u32, Aborted> {
        let (machine, common) = (self.machine, self.common);
        let (shape, window, me) = (&common.shape, &common.window, common.rank());
        let Item { source, token, .. } = item;
        let header = window.dispatch_row(source, token).plus(common.row.header);
        // All loads are issued before any is waited for.
        let positions = self.read_rows(item);
        // The last lanes repeat an assignment rather than branch.
        let assignment = |lane: u32| Header::assignment(lane.min(shape.top_k - 1));
        let weight = |lane: u32| Header::weight(shape.top_k, lane.min(shape.top_k - 1));
        let words = machine.lanes(|lane| machine.read_window(header.plus(assignment(lane))));
        let weights = machine.lanes(|lane| {
            let position = machine.own(positions, lane);
            self.row_weight(position, header.plus(weight(lane)))
        });
        let experts = machine.lanes(|lane| {
            let assignment = shape.assignment_words().decode(machine.own(words, lane));
            lane_or_none(lane, shape.top_k, || assignment.expert)
        });
        let here = self.slots_here(positions);
        let slot = RankSet::of_experts(machine, shape, experts).reduced_slot(window, me);
        end_view(self, self.options.rows.layout(), item);
        read()?;

        let to = if wire == Wire::Inline {
            Row::Inline(source, window.inline_combine_row(token, slot))
        } else if remote::is_p2p(machine, common, source) {
            Row::Window(source, window.combine_row(token, slot))
        } else {
            remote::staged_sum(common, item)
        };
        machine.sum_rows(
            item.range(shape.combine_row_bytes()),
            here,
            |k| {
                let weight = f32::from_bits(machine.broadcast(weights, k));
                let position = machine.broadcast(positions, k);
                (Row::Tensor(Tensor::Expert, position), weight)
            },
            to,
            Rounding,
        );
        if machine.keeps_rows() && item.part == 0 {
            let row = machine.broadcast(positions, 0);
            self.return_weights(to, Returned { row, experts });
        }
        Ok(slot)
    }

    /// Flags an item's sum at its source, or puts it there.
    #[inline(always)]
    fn publish(&self, puts: RowPuts<M>, item: Item, slot: u32) -> Result<RowPuts<M>, Aborted> {
        let (machine, common, epoch) = (self.machine, self.common, self.epoch);
        let window = &common.window;
        let flag = window.combine_flag(item.flag(), slot);
        machine.release();
        if remote::is_p2p(machine, common, item.source) {
            machine.lanes(|lane| {
                if lane == 0 {
                    flagged::publish(machine, item.source, flag, epoch);
                }
            });
            Ok(puts)
        } else {
            let bytes = match machine.keeps_rows() && self.options.rows.weights != 0 {
                true => common.shape.weighted_combine_row_bytes(),
                false => common.shape.combine_row_bytes(),
            };
            remote::put_reduced(self, puts, item, slot, bytes)
        }
    }

    /// Flags this warp's only item, if it has one. `word`: its [`Flag`], or 0.
    #[inline(always)]
    fn publish_by_block(&self, work: Work, word: u64) {
        let (machine, window, epoch) = (self.machine, &self.common.window, self.epoch);
        flagged::publish_by_block(machine, work.partition, work.items, word, |_, word| {
            if word != 0 {
                let (source, item, slot) = Flag::of_word(word);
                flagged::publish(machine, source, window.combine_flag(item, slot), epoch);
            }
        });
    }
}

/// The flag of an item that was sent back.
struct Flag {
    item: Item,
    slot: u32,
}

impl Flag {
    /// The flag as a word that is not 0. Ranks and their slots are up to 64.
    #[inline(always)]
    fn to_word(&self) -> u64 {
        let (item, source) = (self.item.flag(), self.item.source.0);
        1 << 63 | (item as u64) << 16 | (self.slot << 8 | source) as u64
    }

    /// The source, the index of the item among the source's, and the slot.
    #[inline(always)]
    fn of_word(word: u64) -> (Rank, u32, u32) {
        (
            Rank(word as u32 & 0xff),
            (word >> 16) as u32,
            word as u32 >> 8 & 0xff,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_read_back_from_their_words() {
        for (source, slot) in [(0, 0), (1, 2), (63, 63)] {
            for (token, part) in [(0, 0), (5, 3), (1 << 20, 0)] {
                let item = Item {
                    source: Rank(source),
                    token,
                    part,
                    parts: 4,
                };
                let word = Flag { item, slot }.to_word();
                assert_ne!(word, 0, "a warp that hands over a flag is seen to");
                assert_eq!(Flag::of_word(word), (Rank(source), 4 * token + part, slot));
            }
        }
    }
}
