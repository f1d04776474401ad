//! First rows of experts and sources in the outputs: one warp turns the counts of all sources into row
//! offsets while payload is still in flight.
//!
//! Counts come over the wire. Their sums wrap around: positions are checked against the outputs' capacity at
//! their use, whatever the counts are.

use ferry_layout::{Counter, Rank, Region, Table, Tagged, scale_placement};

use crate::dispatch::launch::Dispatch;
use crate::dispatch::place::overflow::offsets_word;
use crate::dispatch::place::shared::SharedGroup;
use crate::machine::{LANES, Machine};
use crate::sync::launch::{Aborted, Awaited, Launch};

/// Count words that a lane has in flight.
/// measured: T-079, H200
const DEPTH: usize = 8;
/// Most experts of a lane: their bases are kept in registers.
/// measured: T-079, H200
const MOST_EXPERTS: usize = 4;

impl<M: Machine> Dispatch<'_, M> {
    /// Waits until the offsets are written, by [`compute_offsets`] or, with `skip_a2a`, by `local/tables.rs`.
    #[inline(always)]
    pub fn wait_for_offsets(&self) -> Result<(), Aborted> {
        let (machine, epoch) = (self.machine, self.epoch);
        self.wait_local(Counter::OffsetsReady, Region::Offsets, || {
            machine.load(Counter::OffsetsReady) >= offsets_word(epoch, false)
        })
    }

    /// Turns all counts into the first row of every expert, `row_offsets`, and of every source within it. All
    /// receivers wait for this, so a lane takes as many experts as its loads in flight allow.
    #[inline(always)]
    pub fn compute_offsets(&self, shared: SharedGroup) -> Result<(), Aborted> {
        let (machine, common, epoch) = (self.machine, self.common, self.epoch);
        let shape = &common.shape;
        let experts = shape.local_experts();
        let each = (DEPTH as u32 / shape.ranks).clamp(1, MOST_EXPERTS as u32);
        // The shared expert's rows come first.
        let (mut rows, mut blocks) = (shared.rows, scale_placement::blocks(shared.rows));
        let mut first = 0;
        while first < experts {
            let of_lane = |lane: u32| {
                let first = (first + lane * each).min(experts);
                Experts {
                    first,
                    end: (first + each).min(experts),
                }
            };
            let sums = self.wait_for_counts(of_lane)?;
            let sums = |lane| machine.own(sums, lane).unwrap_or_default();
            let (rows_before, more_rows) =
                machine.exclusive_sum(machine.lanes(|lane| sums(lane).rows));
            let (blocks_before, more_blocks) = match shape.has_tiled_scales() {
                true => machine.exclusive_sum(machine.lanes(|lane| sums(lane).blocks)),
                false => (machine.lanes(|_| 0), 0),
            };
            let ends = machine.lanes(|lane| {
                let row = machine.own(rows_before, lane).wrapping_add(rows);
                self.publish_bases(shared.groups, of_lane(lane), row, sums(lane).counts)
            });
            machine.lanes(|lane| {
                let block = machine.own(blocks_before, lane).wrapping_add(blocks);
                let end = machine.own(ends, lane);
                self.describe_experts(shared.groups, of_lane(lane), block, end);
            });
            rows = more_rows.wrapping_add(rows);
            blocks = more_blocks.wrapping_add(blocks);
            first += LANES * each;
        }
        machine.lanes(|lane| {
            if lane == 0 {
                machine.write(Table::RowOffsets, (shared.groups + experts) as u64, rows);
                shared.describe(self);
            }
        });
        let overflows = match self.options.groups.block {
            0 => self.settle_overflow(shared.groups + experts, rows, blocks),
            block => self.overflows_blocks(block)?,
        };
        machine.store(Counter::OffsetsReady, offsets_word(epoch, overflows));
        Ok(())
    }
}

/// Local experts of a lane.
#[derive(Clone, Copy)]
struct Experts {
    first: u32,
    end: u32,
}

impl Experts {
    /// Calls `each` with every expert, every source for it, and the number of assignments from that source:
    /// `counts` returns that of a source and the [`DEPTH`] - 1 after it.
    #[inline(always)]
    fn walk(
        self,
        ranks: u32,
        mut counts: impl FnMut(Self, u32) -> [u32; DEPTH],
        mut each: impl FnMut(u32, u32, u32),
    ) {
        let (mut left, mut source) = (self, 0);
        while left.first < left.end {
            let counts = counts(left, source);
            let mut take = |step: usize| {
                if left.first < left.end {
                    each(left.first, source, counts[step]);
                    (left, source) = left.after(source, ranks);
                }
            };
            // Spelled out, so that the counts stay in registers.
            const { assert!(DEPTH == 8) };
            take(0);
            take(1);
            take(2);
            take(3);
            take(4);
            take(5);
            take(6);
            take(7);
        }
    }

    /// The source after `source`, of the first expert or, after its last source, of the next.
    #[inline(always)]
    fn after(self, source: u32, ranks: u32) -> (Self, u32) {
        match source + 1 == ranks {
            true => {
                let first = self.first + 1;
                (Self { first, ..self }, 0)
            }
            false => (self, source + 1),
        }
    }

    /// The words of a source of the first expert, and of the [`DEPTH`] - 1 after it; the last word again if
    /// there are fewer.
    #[inline(always)]
    fn words<M: Machine>(self, launch: &Launch<M>, source: u32) -> [Tagged; DEPTH] {
        let (machine, common) = (launch.machine, launch.common);
        let (mut at, mut next) = ((self, source), (self, source));
        core::array::from_fn(|_| {
            if next.0.first < self.end {
                at = next;
            }
            next = at.0.after(at.1, common.shape.ranks);
            machine.load_tagged(common.window.count(Rank(at.1), at.0.first))
        })
    }
}

/// Sums of the counts of a lane's experts.
#[derive(Clone, Copy, Default)]
struct Sums {
    /// Rows of the outputs.
    rows: u32,
    /// Blocks of tiled scales.
    blocks: u32,
    /// The counts themselves, if there are no more than these.
    counts: [u32; DEPTH],
}

impl<M: Machine> Dispatch<'_, M> {
    /// Waits for the counts of all lanes' experts.
    #[inline(always)]
    fn wait_for_counts(
        &self,
        of_lane: impl Fn(u32) -> Experts,
    ) -> Result<M::Lanes<Option<Sums>>, Aborted> {
        let (machine, common, epoch) = (self.machine, self.common, self.epoch);
        let (shape, window) = (&common.shape, &common.window);
        self.wait_lanes(
            |lane| {
                let (mut sums, mut rows, mut is_missing) = (Sums::default(), 0u32, false);
                let read = |experts: Experts, source| {
                    let words = experts.words(self, source);
                    sums.counts = core::array::from_fn(|step| {
                        let count = words[step].value(epoch);
                        is_missing |= count.is_none();
                        count.unwrap_or(0)
                    });
                    sums.counts
                };
                of_lane(lane).walk(shape.ranks, read, |_, source, count| {
                    rows = rows.wrapping_add(count);
                    if source + 1 == shape.ranks {
                        rows = match self.options.groups.block {
                            0 => common.row.padded(rows),
                            block => block,
                        };
                        sums.rows = sums.rows.wrapping_add(rows);
                        sums.blocks = sums.blocks.wrapping_add(scale_placement::blocks(rows));
                        rows = 0;
                    }
                });
                (!is_missing).then_some(sums)
            },
            |lane| {
                let Experts { first, end } = of_lane(lane);
                let word = |source, expert| machine.load_tagged(window.count(Rank(source), expert));
                // If all have arrived by now, only this rank is to blame.
                let (mut missing, mut saw) = ((common.rank().0, first), Tagged(0));
                for expert in first..end {
                    for source in 0..shape.ranks {
                        let word = word(source, expert);
                        if word.value(epoch).is_none() {
                            (missing, saw) = ((source, expert), word);
                        }
                    }
                }
                Awaited {
                    peer: Rank(missing.0),
                    region: Region::Counts,
                    index: missing.1 as u64,
                    saw: saw.0 >> 32,
                }
            },
        )
    }

    /// Publishes the source bases of a lane's experts, and writes their row offsets after those of `groups`
    /// groups. The first expert's rows begin at `row`. `counts` are the experts' counts, if there are no more
    /// than these. Returns the row after the last. For one lane.
    #[inline(always)]
    fn publish_bases(
        &self,
        groups: u32,
        experts: Experts,
        mut row: u32,
        counts: [u32; DEPTH],
    ) -> u32 {
        let (machine, common, epoch) = (self.machine, self.common, self.epoch);
        let shape = &common.shape;
        let read = |experts: Experts, source| match shape.ranks <= DEPTH as u32 {
            true => counts,
            false => experts.words(self, source).map(|word| word.0 as u32),
        };
        experts.walk(shape.ranks, read, |expert, source, count| {
            let word = common.window.source_base(Rank(source), expert);
            machine.signal(common.rank(), word, Tagged::new(epoch, row).0);
            if source == 0 {
                machine.write(Table::RowOffsets, (groups + expert) as u64, row);
            }
            row = row.wrapping_add(count);
            if source + 1 == shape.ranks {
                // The first row of every expert is aligned.
                row = match self.options.groups.block {
                    0 => common.row.padded(row),
                    block => (expert + 1).wrapping_mul(block),
                };
            }
        });
        row
    }

    /// Writes the ids of a lane's experts, after `groups` groups, and, if scales are tiled, publishes their
    /// expert bases and writes their scale offsets. The scales begin at `block`, the rows end at `end`. For
    /// one lane, after [`publish_bases`].
    #[inline(always)]
    fn describe_experts(&self, groups: u32, experts: Experts, mut block: u32, end: u32) {
        let (machine, common, epoch) = (self.machine, self.common, self.epoch);
        let has = |index: usize| experts.first + (index as u32) < experts.end;
        // All are loaded before any is waited for.
        let starts: [u32; MOST_EXPERTS] = core::array::from_fn(|index| {
            let expert = (groups + experts.first) as u64 + index as u64;
            match has(index) && common.shape.has_tiled_scales() {
                true => machine.read(Table::RowOffsets, expert),
                false => end,
            }
        });
        let say = |at, value| machine.signal(common.rank(), at, Tagged::new(epoch, value).0);
        let mut take = |index: usize, next: u32| {
            if !has(index) {
                return;
            }
            let expert = experts.first + index as u32;
            let group = groups + expert;
            machine.write(Table::ExpertIds, group as u64, group);
            if common.shape.has_tiled_scales() {
                say(common.window.expert_base(expert), starts[index]);
                say(common.window.expert_block_base(expert), block);
                let offset = scale_placement::scales_offset(block, starts[index]);
                machine.write(Table::ScalesOffsets, group as u64, offset);
                let rows = next.wrapping_sub(starts[index]);
                block = block.wrapping_add(scale_placement::blocks(rows));
            }
        };
        // Spelled out, so that the bases stay in registers.
        const { assert!(MOST_EXPERTS == 4) };
        take(0, starts[1]);
        take(1, starts[2]);
        take(2, starts[3]);
        take(3, end);
    }
}
