//! Tables that describe received rows: ids, weights, source and token of each.

use ferry_layout::{Header, NOT_ROUTED, Rank, ReceiveLayout, Table};

use super::Receiver;
use crate::dispatch::place::fill::fill_words;
use crate::dispatch::receive::batch::Batch;
use crate::machine::Machine;
use crate::work::extent::Extent;
use crate::work::item::Item;
use crate::work::partition::Partition;
use crate::work::sub_warps::SubWarps;

/// Word of an id, a source or a token in a row without a token: -1.
const ABSENT: u32 = u32::MAX;

/// Rows whose entries lanes write, a top-k slot a lane. `L`: one value a lane.
#[derive(Clone, Copy)]
pub(super) struct Entries<L> {
    /// Lanes that have an entry.
    pub lanes: u32,
    /// Output row.
    pub rows: L,
    /// Top-k slot.
    pub slots: L,
    /// Source rank.
    pub sources: L,
    /// Token of the source.
    pub tokens: L,
    /// Local expert; not below the number of local experts if there is none.
    pub experts: L,
    /// The router's weight, as f32 bits.
    pub weights: L,
}

impl<M: Machine> Receiver<'_, M> {
    /// Describes the rows of arrived items without inline flags, those of the lanes `arrived`: several at a
    /// time, as the loads of one depend on each other.
    #[inline(always)]
    pub(super) fn describe_arrived(&self, batch: Batch, arrived: u32, rows: M::Lanes<u32>) {
        let (machine, common) = (self.dispatch.machine, self.dispatch.common);
        self.in_groups(batch, arrived, |group| {
            let row = |lane| {
                let source = Rank(machine.own(group.sources, lane));
                let row = common
                    .window
                    .dispatch_row(source, machine.own(group.tokens, lane));
                row.plus(common.row.header)
            };
            let slot = |lane| machine.own(group.slots, lane);
            let words = machine
                .lanes(|lane| machine.read_window(row(lane).plus(Header::assignment(slot(lane)))));
            let weights = machine.lanes(|lane| {
                let weight = Header::weight(common.shape.top_k, slot(lane));
                machine.read_window(row(lane).plus(weight))
            });
            let rows = machine.shuffle(rows, group.rows);
            self.write_entries(Entries {
                rows,
                experts: self.local_experts(words),
                weights,
                ..group
            });
        });
    }

    /// Describes rows without a token, those of the lanes `absent`, which are in their places.
    #[inline(always)]
    pub(super) fn describe_absent(&self, batch: Batch, absent: u32) {
        let (machine, common) = (self.dispatch.machine, self.dispatch.common);
        self.in_groups(batch, absent, |group| {
            let rows = machine.lanes(|lane| {
                let source = Rank(machine.own(group.sources, lane));
                let token = machine.own(group.tokens, lane);
                common.shape.strided_row(source, token)
            });
            let none = machine.lanes(|_| ABSENT);
            self.write_entries(Entries {
                rows,
                sources: none,
                tokens: none,
                experts: none,
                weights: none,
                ..group
            });
        });
        if self.clears() {
            let mut left = absent;
            while left != 0 {
                let Item { source, token, .. } =
                    batch.item(left.trailing_zeros(), 1, &common.shape, common.rank());
                self.clear_row(common.shape.strided_row(source, token));
                left &= left - 1;
            }
        }
    }

    /// Calls `describe` with the items of the lanes `owners`, as many at a time as there are sub-warps. The
    /// rows of its argument are the owners' lanes.
    #[inline(always)]
    fn in_groups(&self, batch: Batch, mut owners: u32, describe: impl Fn(Entries<M::Lanes<u32>>)) {
        let (machine, common) = (self.dispatch.machine, self.dispatch.common);
        let (shape, sub_warps) = (&common.shape, SubWarps::of(&common.shape));
        while owners != 0 {
            let (mut lanes, mut owner, mut sub_warp) = (0, machine.lanes(|_| 0), 0);
            while sub_warp < sub_warps.most() && owners != 0 {
                let next = owners.trailing_zeros();
                owners &= owners - 1;
                owner = machine.lanes(|lane| match sub_warps.item(lane) == sub_warp {
                    true => next,
                    false => machine.own(owner, lane),
                });
                lanes |= sub_warps.lanes(sub_warp);
                sub_warp += 1;
            }
            // Lanes without an item repeat another one's; the last lanes of an item repeat a slot.
            let first = lanes.trailing_zeros();
            let of_first = machine.broadcast(owner, first);
            let owner = machine.lanes(|lane| match lanes >> lane & 1 != 0 {
                true => machine.own(owner, lane),
                false => of_first,
            });
            let item = |lane| batch.item(machine.own(owner, lane), 1, shape, common.rank());
            let has_slot = machine.ballot(machine.lanes(|lane| sub_warps.slot(lane) < shape.top_k));
            let none = machine.lanes(|_| ABSENT);
            describe(Entries {
                lanes: lanes & has_slot,
                rows: owner,
                slots: machine.lanes(|lane| sub_warps.slot(lane).min(shape.top_k - 1)),
                sources: machine.lanes(|lane| item(lane).source.0),
                tokens: machine.lanes(|lane| item(lane).token),
                experts: none,
                weights: none,
            });
        }
    }

    /// Describes the row of an item with inline flags, from the words of its header, a slot a lane.
    #[inline(always)]
    pub(super) fn describe_item(
        &self,
        item: Item,
        row: u32,
        words: M::Lanes<u32>,
        weights: M::Lanes<u32>,
    ) {
        let (machine, shape) = (self.dispatch.machine, &self.dispatch.common.shape);
        let all = |value: u32| machine.lanes(|_| value);
        self.write_entries(Entries {
            lanes: machine.ballot(machine.lanes(|lane| lane < shape.top_k)),
            rows: all(row),
            slots: machine.lanes(|lane| lane),
            sources: all(item.source.0),
            tokens: all(item.token),
            experts: self.local_experts(words),
            weights,
        });
    }

    /// Experts of a header's words, counted from this rank's first.
    #[inline(always)]
    fn local_experts(&self, words: M::Lanes<u32>) -> M::Lanes<u32> {
        let (machine, common) = (self.dispatch.machine, self.dispatch.common);
        let shape = &common.shape;
        let first = common.rank().0 * shape.local_experts();
        machine.lanes(|lane| {
            let assignment = shape.assignment_words().decode(machine.own(words, lane));
            assignment.expert.wrapping_sub(first)
        })
    }

    /// Writes entries of rows that fit in the outputs.
    #[inline(always)]
    fn write_entries(&self, entries: Entries<M::Lanes<u32>>) {
        let (machine, shape) = (self.dispatch.machine, &self.dispatch.common.shape);
        machine.lanes(|lane| {
            let row = machine.own(entries.rows, lane) as u64;
            if entries.lanes >> lane & 1 == 0 || row >= self.dispatch.args.row_capacity {
                return;
            }
            let (slot, expert) = (
                machine.own(entries.slots, lane),
                machine.own(entries.experts, lane),
            );
            let is_here = expert < shape.local_experts();
            let (id, weight) = match is_here {
                true => (expert, machine.own(entries.weights, lane)),
                false => (NOT_ROUTED, 0),
            };
            let at = row * shape.top_k as u64 + slot as u64;
            match self.is_wide {
                true => {
                    machine.write(Table::ReceivedIds, 2 * at, id);
                    let high = (id as i32 >> 31) as u32;
                    machine.write(Table::ReceivedIds, 2 * at + 1, high);
                }
                false => machine.write(Table::ReceivedIds, at, id),
            }
            machine.write(Table::ReceivedWeights, at, weight);
            if slot == 0 {
                machine.write(Table::SrcInfo, 2 * row, machine.own(entries.sources, lane));
                machine.write(
                    Table::SrcInfo,
                    2 * row + 1,
                    machine.own(entries.tokens, lane),
                );
            }
            if self.overflows && is_here {
                machine.increment(Table::ExpertRows, expert as u64);
            }
        });
    }

    /// Describes, as rows without a token, those that no item stands for: this warp's share.
    #[inline(always)]
    pub(super) fn describe_rest(&self, extent: Extent, partition: Partition) {
        let (machine, shape) = (self.dispatch.machine, &self.dispatch.common.shape);
        if self.layout == ReceiveLayout::Compact {
            let rows = machine.lanes(|_| machine.read(Table::RowBases, shape.row_bases()));
            let rows = machine.broadcast(rows, 0) as u64;
            return self.fill(
                rows.min(self.dispatch.args.row_capacity),
                self.dispatch.args.row_capacity,
                partition,
            );
        }
        if extent.tokens == shape.max_tokens_per_rank {
            return;
        }
        for source in 0..shape.ranks {
            let first = shape.strided_row(Rank(source), extent.tokens);
            let end = shape.strided_row(Rank(source + 1), 0);
            self.fill(first as u64, end as u64, partition);
            if self.clears() {
                for task in partition.tasks(end - first) {
                    self.clear_row(first + task);
                }
            }
        }
    }

    /// Writes the entries of rows `first..end` without a token: this warp's share.
    #[inline(always)]
    fn fill(&self, first: u64, end: u64, partition: Partition) {
        let top_k = self.dispatch.common.shape.top_k as u64;
        let id_words = match self.is_wide {
            true => 2 * top_k,
            false => top_k,
        };
        let words = |each: u64| first * each..end * each;
        let machine = self.dispatch.machine;
        let fill = |table, words, value| fill_words(machine, table, words, value, partition);
        fill(Table::ReceivedIds, words(id_words), ABSENT);
        fill(Table::ReceivedWeights, words(top_k), 0);
        fill(Table::SrcInfo, words(2), ABSENT);
    }
}
