//! Received rows by expert, also in padded blocks.
//!
//! One warp turns the counts into row offsets while payload is still in flight; all warps then wait for rows,
//! each for its own, and copy them to the outputs as they arrive.
//!
//! Only one warp reads a part of a row with inline flags, with a header of its own, and re-arms each word
//! after it has read it. All words are re-armed when the launch ends, hence before this rank returns its
//! credit in combine, and before a peer writes there again.

use ferry_layout::{Counter, Fault, FaultKind, Header, Region, Table, Tensor};

use crate::dispatch::launch::Dispatch;
use crate::dispatch::place::destination::Destinations;
use crate::dispatch::place::padding::Groups;
use crate::dispatch::place::shared::SharedGroup;
use crate::dispatch::receive::batch::Batch;
use crate::dispatch::receive::counts::wait_for_token_counts;
use crate::machine::Machine;
use crate::machine::miss::Miss;
use crate::machine::rows::Row;
use crate::sync::launch::{Aborted, Awaited};
use crate::tactics::roles::computes_offsets;
use crate::wire::flagged;
use crate::work::item::Item;
use crate::work::partition::Partition;

impl<M: Machine> Dispatch<'_, M> {
    #[inline(always)]
    pub fn receive_by_expert(&self, partition: Partition) -> Result<(), Aborted> {
        let (machine, common) = (self.machine, self.common);
        let shared = self.shared_group(self.tokens);
        if computes_offsets(&common.shape, partition) {
            self.compute_offsets(shared)?;
            self.groups_of(shared).describe();
        }
        // While the peers' rows are on their way.
        shared.write(self, partition);
        let extent = wait_for_token_counts(self)?;
        // A warp that receives nothing, if there is one.
        if partition.index == partition.of - 1 {
            machine.store(Counter::Extent, extent.word());
        }
        let shape = &common.shape;
        let mut batch = Batch::first(shape, extent, partition);
        while batch.is_some() {
            let present = self.wait_lanes(
                |lane: u32| batch.present(self, lane),
                |lane| batch.awaited(self, lane),
            )?;
            let parts = machine.lanes(|lane| machine.own(present, lane).unwrap_or(0));
            let coming = machine.ballot(machine.lanes(|lane| machine.own(parts, lane) != 0));
            self.receive_batch(batch, parts, coming)?;
            batch = batch.next();
        }
        if shape.has_tiled_scales() {
            self.wait_for_offsets()?;
            self.clear_unused_scales(shared.groups, batch.partition());
        }
        if self.options.groups.writes_padding() {
            if self.options.groups.describes_rows() {
                self.describe_received(batch.again());
            }
            self.wait_for_offsets()?;
            let shared = self.shared_group(self.own_tokens());
            self.groups_of(shared).pad(batch.partition());
        }
        Ok(())
    }

    /// Tokens of this rank, if there is a shared expert, from the count that it sent to itself: a kept number
    /// would occupy a register meanwhile.
    #[inline(always)]
    fn own_tokens(&self) -> u32 {
        let common = self.common;
        match self.options.has_shared_expert() {
            true => {
                let word = common.window.token_count(common.rank());
                self.machine.load_tagged(word).0 as u32
            }
            false => 0,
        }
    }

    /// Groups of a launch whose rows have travelled.
    #[inline(always)]
    fn groups_of(&self, shared: SharedGroup) -> Groups<'_, M, impl Fn(u32) -> u32> {
        let count = |expert| self.assignments(expert);
        Groups {
            dispatch: self,
            shared,
            count,
        }
    }

    /// Receives the items of a batch that come to this rank, as they arrive.
    #[inline(always)]
    fn receive_batch(
        &self,
        batch: Batch,
        parts: M::Lanes<u32>,
        coming: u32,
    ) -> Result<(), Aborted> {
        let (machine, common, epoch) = (self.machine, self.common, self.epoch);
        let (shape, window, me) = (&common.shape, &common.window, common.rank());
        let item = |lane: u32, parts| batch.item(lane, parts, shape, me);
        let flags = machine.lanes(|lane| {
            let Item { source, .. } = item(lane, 1);
            let parts = machine.own(parts, lane);
            window.dispatch_flag(source, item(lane, parts).flag())
        });
        let mut left = coming;
        while left != 0 {
            let arrived = self.wait_any(
                left,
                |lane| {
                    // A row with inline flags has no flag of its own: its words are polled.
                    common.dispatches_inline(machine.own(parts, lane))
                        || flagged::is_full(machine, machine.own(flags, lane), epoch)
                },
                |lane| Awaited {
                    peer: item(lane, 1).source,
                    region: Region::DispatchRow,
                    index: item(lane, 1).token as u64,
                    saw: machine.load_signal(machine.own(flags, lane)),
                },
            )?;
            left &= !arrived;
            let mut arrived = arrived;
            while arrived != 0 {
                let lane = arrived.trailing_zeros();
                let parts = machine.broadcast(parts, lane);
                self.receive_item(item(lane, parts))?;
                arrived &= arrived - 1;
            }
        }
        Ok(())
    }

    /// Copies an item to each of its rows in the output. The item has arrived, or has inline flags.
    #[inline(always)]
    fn receive_item(&self, item: Item) -> Result<(), Aborted> {
        let destinations = match self.place_item(item) {
            Ok(destinations) => destinations,
            Err(miss) => return self.refuse_item(item, miss),
        };
        if item.part == 0 {
            self.describe_rows(item, destinations);
        }
        Ok(())
    }

    /// Writes the sources of the rows of an item's token, for the user, and their positions, for combine.
    #[inline(always)]
    fn describe_rows(&self, item: Item, destinations: Destinations<M::Lanes<u32>>) {
        let (machine, shape) = (self.machine, &self.common.shape);
        let Destinations {
            positions, here, ..
        } = destinations;
        let Item { source, token, .. } = item;
        machine.lanes(|lane| {
            let position = machine.own(positions, lane);
            if here >> lane & 1 != 0 {
                debug_assert!((position as u64) < self.args.row_capacity, "row {position}");
                if self.options.groups.weights == 0 {
                    machine.write(Table::SrcInfo, 2 * position as u64, token);
                    machine.write(Table::SrcInfo, 2 * position as u64 + 1, lane);
                }
            }
            if lane < shape.top_k {
                machine.write(
                    Table::RowMap,
                    shape.row_map_index(source, token, lane),
                    position,
                );
            }
        });
    }

    /// Writes the entries of the rows of all of a warp's items that came, from `batch` on: after the rows, as
    /// their positions and headers would occupy registers meanwhile.
    #[inline(always)]
    pub fn describe_received(&self, mut batch: Batch) {
        let (machine, common) = (self.machine, self.common);
        let shape = &common.shape;
        let first_expert = common.rank().0 * shape.local_experts();
        // Each lane reads words that other lanes wrote.
        machine.converge();
        while batch.is_some() {
            let item = |lane, parts| batch.item(lane, parts, shape, common.rank());
            // They have arrived, and the first part of a row describes it.
            let parts = machine.lanes(|lane| batch.present(self, lane).unwrap_or(0));
            let described = machine.lanes(|lane| {
                let parts = machine.own(parts, lane);
                parts != 0 && item(lane, parts).part == 0
            });
            for slot in 0..shape.top_k {
                machine.lanes(|lane| {
                    if !machine.own(described, lane) {
                        return;
                    }
                    let Item { source, token, .. } = item(lane, 1);
                    let index = shape.row_map_index(source, token, slot);
                    let header = common.window.dispatch_row(source, token);
                    let header = header.plus(common.row.header);
                    // All are loaded before any is used.
                    let position = machine.read(Table::RowMap, index) as u64;
                    let word = machine.read_window(header.plus(Header::assignment(slot)));
                    let weight =
                        machine.read_window(header.plus(Header::weight(shape.top_k, slot)));
                    // Neither other ranks' experts nor rows that do not fit.
                    if position < self.args.row_capacity {
                        let expert = shape.assignment_words().decode(word).expert;
                        let group = expert.wrapping_sub(first_expert);
                        let group = group.wrapping_add(self.options.has_shared_expert() as u32);
                        let source = [source.0, token, slot];
                        self.write_entries(position, group, weight, source);
                    }
                });
            }
            batch = batch.next();
        }
    }

    /// Puts payload and scales of an item into their places.
    #[inline(always)]
    fn place_item(&self, item: Item) -> Result<Destinations<M::Lanes<u32>>, Miss> {
        let (machine, common) = (self.machine, self.common);
        let from = item.location(common);
        let row = from.of(common.rank());
        // All loads are issued before any is waited for. The header of a row with inline flags, which has the
        // row's destinations and is kept for combine, its payload and its scales are then awaited and
        // re-armed in turn. Other rows have arrived already.
        let scales = self.read_scales_ahead(from);
        let ahead = machine.read_ahead(from.range, row);
        let destinations = self.find_destinations(item, from)?;
        let to = |k| Row::Tensor(Tensor::Output, machine.broadcast(destinations.positions, k));
        machine.copy_row(from.range, row, ahead, destinations.here, to)?;
        self.place_scales(from, scales, destinations)?;
        if item.part == 0 {
            self.place_row_scale(from.row, destinations);
        }
        Ok(destinations)
    }

    /// Records the reason why an item was not placed.
    #[inline(always)]
    fn refuse_item(&self, item: Item, miss: Miss) -> Result<(), Aborted> {
        // A timeout of the counts is recorded there.
        self.wait_for_offsets()?;
        let position = match miss {
            Miss::OutOfBounds { position } => position,
            Miss::TimedOut(_) => {
                return self.time_out_on(Awaited {
                    peer: item.source,
                    region: Region::DispatchRow,
                    index: item.token as u64,
                    saw: 0,
                });
            }
        };
        // If only its scales are outside, the position is inside.
        let saw = match position as u64 {
            inside if inside < self.args.row_capacity => u64::MAX,
            outside => outside,
        };
        self.machine.lanes(|lane| {
            if lane == 0 {
                let fault = Fault {
                    peer: item.source,
                    region: Region::DispatchRow,
                    index: item.token as u64,
                    wanted: self.args.row_capacity,
                    saw,
                    ..self.fault()
                };
                self.record(FaultKind::RowOutOfBounds, fault);
            }
        });
        self.abort()
    }
}
