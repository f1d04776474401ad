//! The rows that a rank sends: a warp's items, one after another.
//!
//! The payload of a row goes out first: its header needs ranks within experts, which notifiers may still be
//! computing. Rows with inline flags need nothing else. All other rows, or parts of them, are released and
//! flagged.

use ferry_layout::{Counter, Rank, StagedEpoch, Tensor, TokenFormat};

use crate::dispatch::launch::Dispatch;
use crate::dispatch::send::route::Route;
use crate::machine::Machine;
use crate::machine::rows::{ByteRange, Row, TokenPart};
use crate::sync::launch::Aborted;
use crate::tactics::dispatch::DispatchTactics;
use crate::tactics::{Numbering, Wire};
use crate::wire::remote::RowPuts;
use crate::wire::{flagged, remote};
use crate::work::item::{Item, RowLocation};
use crate::work::lanes::on_each_rank;
use crate::work::partition::Partition;
use crate::work::queue::WorkQueue;
use crate::work::rank_set::RankSet;

impl<M: Machine> Dispatch<'_, M> {
    /// Sends this warp's items.
    #[inline(always)]
    pub fn send_items(
        &self,
        tactics: DispatchTactics,
        partition: Partition,
    ) -> Result<(), Aborted> {
        let (machine, common) = (self.machine, self.common);
        let parts = tactics.parts;
        let items = self.tokens * parts;
        let wire = tactics.wire(partition.of);
        let mut puts = RowPuts::none(machine);
        let mut queue = WorkQueue::new(machine, partition, items, Counter::DispatchTickets);
        while let Some(index) = queue.next_item() {
            let (token, part) = (index >> parts.trailing_zeros(), index & (parts - 1));
            if self.is_encoded() {
                // While few registers are in use. The scales are in the cache then.
                let range = ByteRange::part(common.row.payload_bytes, part, parts);
                self.report_lost(TokenPart { token, range });
            }
            let route = self.read_route(tactics.numbering, token);
            // Before the payload goes out: loads that queue behind its stores take many times as long.
            let counted = match tactics.numbers_rows {
                true => self.count_assignments(tactics.numbering, route),
                false => self.unnumbered_assignments(route),
            };
            let item = Item {
                source: common.rank(),
                token,
                part,
                parts,
            };
            let location = item.location(common);
            self.write_payload(route, location);
            queue.take_ticket();
            let words = match tactics.numbering {
                Numbering::Tiles if tactics.numbers_rows => {
                    if index < partition.of {
                        self.wait_until_numbered()?;
                    }
                    self.numbered_assignments(route)
                }
                _ => counted,
            };
            self.write_header(route, location, item.part, words);
            match wire {
                Wire::Inline => {}
                Wire::FlaggedByBlock => self.publish_by_block(partition, items, route.ranks),
                Wire::Flagged | Wire::Remote => {
                    self.publish(route, index);
                    if machine.spans_nodes() {
                        puts = self.put_remote(puts, route, index)?;
                    }
                }
            }
        }
        match machine.spans_nodes() {
            true => puts.flush(self, StagedEpoch::Dispatch).map(|_| ()),
            false => Ok(()),
        }
    }

    /// Copies a part of a token to every rank that holds one of its experts.
    #[inline(always)]
    fn write_payload(&self, route: Route<M::Lanes<u32>>, location: RowLocation) {
        let (machine, common) = (self.machine, self.common);
        let (shape, window, me) = (&common.shape, &common.window, common.rank());
        let Route { token, ranks, .. } = route;
        let range = location.range;
        // A bit for each rank of the node; for the staging area, from which rows go to remote ranks, that of
        // a remote rank. Each rank begins with another one, and with another one for each token: otherwise
        // all of them would store to the same rank at the same time.
        let p2p = remote::p2p_ranks(machine, common, ranks);
        let is_remote = p2p != ranks;
        let staging = match is_remote {
            true => remote::staging_number(shape, me),
            false => 0,
        };
        let targets = p2p.word() | (is_remote as u64) << staging;
        let rotation = (me.0 + token) % shape.ranks;
        let is_staged = |rank| is_remote && rank == staging;
        let to = |target| match (target + rotation) % u64::BITS {
            rank if is_staged(rank) => Row::Window(me, window.dispatch_staging(token)),
            rank => location.of(Rank(rank)),
        };
        let targets = targets.rotate_right(rotation);
        let is_encoded = self.is_encoded();
        if is_encoded {
            // First, as loads that queue behind the stores of the payload take many times as long.
            let place = |target| match (target + rotation) % u64::BITS {
                rank if is_staged(rank) => (me, window.dispatch_staging(token)),
                rank => (Rank(rank), location.row),
            };
            self.send_scales(token, location, targets, place);
        }
        match shape.format() {
            format if is_encoded || matches!(format, TokenFormat::Bf16) => {
                let from = Row::Tensor(Tensor::Input, token);
                machine.copy_arrived(range, from, targets, to);
            }
            _ => machine.encode_row(range, token, targets, to),
        }
    }

    /// Flags this warp's only item, of `items`, if no warp has more. `ranks` are those of the item's token.
    #[inline(always)]
    fn publish_by_block(&self, partition: Partition, items: u32, ranks: RankSet) {
        let (machine, common, epoch) = (self.machine, self.common, self.epoch);
        flagged::publish_by_block(machine, partition, items, ranks.word(), |item, ranks| {
            RankSet::of_word(ranks).for_each(|rank| {
                let flag = common.window.dispatch_flag(common.rank(), item);
                flagged::publish(machine, rank, flag, epoch);
            });
        });
    }

    /// Releases an item, after its payload and header were written, and flags it on this node.
    #[inline(always)]
    fn publish(&self, route: Route<M::Lanes<u32>>, item: u32) {
        let (machine, common, epoch) = (self.machine, self.common, self.epoch);
        let p2p = remote::p2p_ranks(machine, common, route.ranks);
        machine.release();
        let flag = common.window.dispatch_flag(common.rank(), item);
        on_each_rank(machine, common.shape.ranks, |rank| {
            if p2p.contains(rank) {
                flagged::publish(machine, rank, flag, epoch);
            }
        });
    }

    /// Puts an item that was released to the ranks of other nodes.
    #[inline(always)]
    fn put_remote(
        &self,
        puts: RowPuts<M>,
        route: Route<M::Lanes<u32>>,
        item: u32,
    ) -> Result<RowPuts<M>, Aborted> {
        let Route { token, ranks, .. } = route;
        let p2p = remote::p2p_ranks(self.machine, self.common, ranks);
        remote::put_dispatched(self, puts, ranks.without(p2p), token, item)
    }
}
