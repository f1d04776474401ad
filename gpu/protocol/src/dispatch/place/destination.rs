//! Destinations of received rows in the outputs: the source base plus the rank within the expert from the
//! header.

use ferry_layout::{Header, NOT_ROUTED, Rank, SENTINEL, Tagged, scale_placement};

use crate::dispatch::launch::Dispatch;
use crate::dispatch::place::overflow;
use crate::machine::Machine;
use crate::machine::miss::{Miss, TimedOut};
use crate::sync::wait::wait_for;
use crate::work::item::{Item, RowLocation};

impl<M: Machine> Dispatch<'_, M> {
    /// Waits until the header of an item with inline flags is there, and re-arms it. `words` are the words of
    /// its assignments, complete afterwards. Copies those of an item's first part to the place from which
    /// combine reads them, with the weights. Returns the weights' words, complete in the first part alone.
    #[inline(always)]
    pub fn take_header(
        &self,
        item: Item,
        from: RowLocation,
        words: &mut M::Lanes<u32>,
    ) -> Result<M::Lanes<u32>, TimedOut> {
        let (machine, common) = (self.machine, self.common);
        let top_k = common.shape.top_k;
        let header = from.row.plus(from.header);
        let weight = |lane: u32| Header::weight(top_k, lane.min(top_k - 1));
        let read_weights = || machine.lanes(|lane| machine.read_window(header.plus(weight(lane))));
        let is_sentinel = |word| word == SENTINEL;
        // Both are loaded before either is waited for.
        let mut weights = read_weights();
        let read = || self.read_assignments(from);
        wait_for(machine, words, read, is_sentinel)?;
        if item.part == 0 {
            wait_for(machine, &mut weights, read_weights, is_sentinel)?;
        }
        let words = *words;
        let kept = common.window.dispatch_row(item.source, item.token);
        let kept = kept.plus(common.row.header);
        machine.lanes(|lane| {
            if lane < top_k {
                let assignment = Header::assignment(lane);
                machine.write_window(header.plus(assignment), SENTINEL);
                if item.part == 0 {
                    machine.write_window(header.plus(weight(lane)), SENTINEL);
                    machine.write_window(kept.plus(assignment), machine.own(words, lane));
                    machine.write_window(kept.plus(weight(lane)), machine.own(weights, lane));
                }
            }
        });
        Ok(weights)
    }

    /// The words of the assignments in an item's header. The last lanes repeat an assignment rather than
    /// branch.
    #[inline(always)]
    pub fn read_assignments(&self, from: RowLocation) -> M::Lanes<u32> {
        let (machine, last) = (self.machine, self.common.shape.top_k - 1);
        let header = from.row.plus(from.header);
        machine.lanes(|lane| machine.read_window(header.plus(Header::assignment(lane.min(last)))))
    }
}

/// Destinations of a row in the outputs.
#[derive(Clone, Copy)]
pub struct Destinations<L: Copy> {
    /// Output row of each top-k slot, or a [marked one](overflow::mark) that does not fit, or `NOT_ROUTED`.
    pub positions: L,
    /// First word of each top-k slot's scales.
    pub scales: L,
    /// Slots whose rows fit in the outputs.
    pub here: u32,
}

/// Bases of a source's assignments for an expert.
#[derive(Clone, Copy)]
struct SourceBase {
    /// Whether all words have arrived in this round.
    is_known: bool,
    /// First output row of these assignments.
    row: u32,
    /// The same row counted in the rows of all blocks of tiled scales, if scales are tiled; the first word of
    /// its scales, if the expert has a block and scales have no layout of their own.
    scales: u32,
}

impl SourceBase {
    #[inline(always)]
    fn read<M: Machine>(dispatch: &Dispatch<M>, source: Rank, expert: u32) -> Self {
        let (machine, common, epoch) = (dispatch.machine, dispatch.common, dispatch.epoch);
        let window = &common.window;
        let row = machine.load_tagged(window.source_base(source, expert));
        let (mut first, mut block) = (row, row);
        if common.shape.has_tiled_scales() {
            first = machine.load_tagged(window.expert_base(expert));
            block = machine.load_tagged(window.expert_block_base(expert));
        }
        let is_known = |word: Tagged| word.value(epoch).is_some();
        Self {
            is_known: is_known(row) && is_known(first) && is_known(block),
            row: row.0 as u32,
            scales: match dispatch.places_words() {
                true => dispatch.first_scale_word_in_block(row.0 as u32, expert),
                false => (block.0 as u32)
                    .wrapping_mul(scale_placement::BLOCK_ROWS)
                    .wrapping_add((row.0 as u32).wrapping_sub(first.0 as u32)),
            },
        }
    }

    /// [`scales`](Self::scales) of an assignment of this source, from its rank within the expert.
    #[inline(always)]
    fn scales_row<M: Machine>(self, dispatch: &Dispatch<M>, rank: u32) -> u32 {
        match dispatch.places_words() {
            true => {
                let words = dispatch.machine.late(dispatch.options.groups.scale_row);
                self.scales.wrapping_add(rank.wrapping_mul(words))
            }
            false => self.scales.wrapping_add(rank),
        }
    }
}

impl<M: Machine> Dispatch<'_, M> {
    /// Whether experts have blocks, and scales have no layout of their own: their words are placed by the
    /// block.
    #[inline(always)]
    fn places_words(&self) -> bool {
        self.options.groups.block != 0 && self.common.shape.format().scale_layout().is_none()
    }

    /// Reads a row's header and computes its places, after waiting for the bases of its experts. Places
    /// outside the outputs: see [`locate`](Self::locate).
    #[inline(always)]
    pub fn find_destinations(
        &self,
        item: Item,
        from: RowLocation,
    ) -> Result<Destinations<M::Lanes<u32>>, Miss> {
        let (machine, common) = (self.machine, self.common);
        let shape = &common.shape;
        let first_expert = common.rank().0 * shape.local_experts();
        let mut words = self.read_assignments(from);
        if from.is_inline {
            self.take_header(item, from, &mut words)?;
        }
        let assignment = |lane| shape.assignment_words().decode(machine.own(words, lane));
        let local = machine.lanes(|lane| assignment(lane).expert.wrapping_sub(first_expert));
        let ranks_in_expert = machine.lanes(|lane| assignment(lane).rank_in_expert);
        self.locate(item.source, local, ranks_in_expert)
    }

    /// Finds the places of a row of `source` from its assignments, one a top-k slot: experts counted from
    /// this rank's first, and ranks within them. A number that is none of this rank's experts has no place.
    /// Waits until the experts' bases are known. A place outside the outputs is marked if more rows arrive
    /// than these hold; else it is a miss.
    #[inline(always)]
    fn locate(
        &self,
        source: Rank,
        local: M::Lanes<u32>,
        ranks_in_expert: M::Lanes<u32>,
    ) -> Result<Destinations<M::Lanes<u32>>, Miss> {
        let (machine, common) = (self.machine, self.common);
        let shape = &common.shape;
        let (top_k, experts) = (shape.top_k, shape.local_experts());
        let is_here = |lane| lane < top_k && machine.own(local, lane) < experts;
        // Lanes of other ranks' experts read those of some expert rather than branch.
        let read = || {
            machine.lanes(|lane| {
                let expert = machine.own(local, lane).min(experts - 1);
                SourceBase::read(self, source, expert)
            })
        };
        let mut bases = read();
        wait_for(machine, &mut bases, read, |start: SourceBase| {
            !start.is_known
        })?;
        let mut positions = machine.lanes(|lane| match is_here(lane) {
            true => {
                let row = machine.own(bases, lane).row;
                row.wrapping_add(machine.own(ranks_in_expert, lane))
            }
            false => NOT_ROUTED,
        });
        let rows = machine.lanes(|lane| {
            let base = machine.own(bases, lane);
            base.scales_row(self, machine.own(ranks_in_expert, lane))
        });
        let is_inside = |lane| {
            let block = machine.own(rows, lane) / scale_placement::BLOCK_ROWS;
            let has_block = !shape.has_tiled_scales() || block < self.args.block_capacity as u32;
            let position = machine.own(positions, lane);
            let is_in_block = match self.options.groups.block != 0 {
                true => {
                    let block = machine.late(self.options.groups.block);
                    is_in_block(block, position, machine.own(local, lane))
                }
                false => true,
            };
            is_here(lane) && has_block && is_in_block && (position as u64) < self.args.row_capacity
        };
        let here = machine.ballot(machine.lanes(is_inside));
        let outside = machine.ballot(machine.lanes(is_here)) & !here;
        if outside != 0 {
            if !self.overflows() {
                let position = machine.broadcast(positions, outside.trailing_zeros());
                return Err(Miss::OutOfBounds { position });
            }
            positions = machine.lanes(|lane| {
                let position = machine.own(positions, lane);
                match outside >> lane & 1 != 0 {
                    true => overflow::mark(position),
                    false => position,
                }
            });
        }
        let scales = machine.lanes(|lane| match here >> lane & 1 != 0 {
            true => {
                let (position, row) = (machine.own(positions, lane), machine.own(rows, lane));
                match self.places_words() {
                    true => row,
                    false => common.row.first_scale_word(shape.format(), position, row),
                }
            }
            false => 0,
        });
        Ok(Destinations {
            positions,
            scales,
            here,
        })
    }
}

/// Whether row `position` is in the padded block of local expert `expert`, of `block` rows.
#[inline(always)]
const fn is_in_block(block: u32, position: u32, expert: u32) -> bool {
    position.wrapping_sub(expert.wrapping_mul(block)) < block
}
