//! Numbers of received rows: one warp turns the presence of all sources' tokens into the first row of each 32
//! tokens, and counts the rows of each source and the assignments to each expert.

use ferry_layout::{Counter, Rank, ReceiveLayout, Region, Table};

use super::Receiver;
use crate::dispatch::place::overflow::offsets_word;
use crate::dispatch::receive::counts::{wait_for_experts, wait_for_token_counts};
use crate::machine::{LANES, Machine};
use crate::sync::launch::{Aborted, Awaited};

impl<M: Machine> Receiver<'_, M> {
    /// Writes [`Table::RowBases`] and the user's numbers of rows. One warp.
    #[inline(always)]
    pub(super) fn count_rows(&self) -> Result<(), Aborted> {
        let (machine, epoch) = (self.dispatch.machine, self.dispatch.epoch);
        let rows = self.write_bases()?;
        // Each lane reads words that other lanes wrote.
        machine.converge();
        self.count_sources();
        let is_compact = self.layout == ReceiveLayout::Compact;
        let overflows = is_compact && rows as u64 > self.dispatch.args.row_capacity;
        if overflows {
            self.dispatch
                .report_overflow(Region::Output, self.dispatch.args.row_capacity, rows);
            // Receivers count the assignments of the rows that fit.
            self.each_expert(|expert| machine.write(Table::ExpertRows, expert as u64, 0));
        }
        machine.store(Counter::OffsetsReady, offsets_word(epoch, overflows));
        self.count_experts(!overflows)
    }

    /// Writes the first row of each 32 tokens of each source, after waiting for their presence. Returns the
    /// number of all rows.
    #[inline(always)]
    fn write_bases(&self) -> Result<u32, Aborted> {
        let (machine, common) = (self.dispatch.machine, self.dispatch.common);
        let (shape, epoch) = (&common.shape, self.dispatch.epoch);
        let extent = wait_for_token_counts(self.dispatch)?;
        let words = extent.tokens.div_ceil(LANES).max(1);
        let entries = shape.ranks * words;
        let (mut rows, mut first) = (0, 0);
        while first < entries {
            let place = |lane: u32| {
                let entry = (first + lane).min(entries - 1);
                (Rank(entry / words), entry % words)
            };
            let presence = |lane| {
                let (source, word) = place(lane);
                machine.load_tagged(common.window.presence(source, word))
            };
            let counts = self.dispatch.wait_lanes(
                |lane| {
                    let (source, word) = place(lane);
                    // Both words are loaded before either is used.
                    let bits = presence(lane);
                    let tokens = machine.load_tagged(common.window.token_count(source));
                    match word * LANES < tokens.value(epoch)? {
                        true => bits.value(epoch).map(u32::count_ones),
                        false => Some(0),
                    }
                },
                |lane| Awaited {
                    peer: place(lane).0,
                    region: Region::Presence,
                    index: place(lane).1 as u64,
                    saw: presence(lane).0 >> 32,
                },
            )?;
            let is_entry = |lane| first + lane < entries;
            let counts = machine.lanes(|lane| match is_entry(lane) {
                true => machine.own(counts, lane).unwrap_or(0),
                false => 0,
            });
            let (before, more) = machine.exclusive_sum(counts);
            machine.lanes(|lane| {
                if is_entry(lane) {
                    let (source, word) = place(lane);
                    let base = rows + machine.own(before, lane);
                    machine.write(Table::RowBases, shape.row_base_index(source, word), base);
                }
            });
            rows += more;
            first += LANES;
        }
        machine.lanes(|lane| {
            if lane == 0 {
                machine.write(Table::RowBases, shape.row_bases(), rows);
            }
        });
        Ok(rows)
    }

    /// Writes the number of each source's rows that fit in the outputs.
    #[inline(always)]
    fn count_sources(&self) {
        let (machine, shape) = (self.dispatch.machine, &self.dispatch.common.shape);
        // The base after the last source is the number of all rows.
        let base = |source: u32| {
            let base = machine.read(Table::RowBases, shape.row_base_index(Rank(source), 0));
            base.min(self.dispatch.args.row_capacity as u32)
        };
        for first in (0..shape.ranks).step_by(LANES as usize) {
            machine.lanes(|lane| {
                let source = first + lane;
                if source < shape.ranks {
                    let count = base(source + 1) - base(source);
                    machine.write(Table::SourceRows, source as u64, count);
                }
            });
        }
    }

    /// Waits for the counts of all sources, as a round waits for everything that it is sent, and writes the
    /// number of assignments to each expert, if `writes`.
    #[inline(always)]
    fn count_experts(&self, writes: bool) -> Result<(), Aborted> {
        let (machine, experts) = (
            self.dispatch.machine,
            self.dispatch.common.shape.local_experts(),
        );
        for first in (0..experts).step_by(LANES as usize) {
            let sums = wait_for_experts(self.dispatch, first)?;
            machine.lanes(|lane| {
                if writes && first + lane < experts {
                    let sum = machine.own(sums, lane).unwrap_or(0);
                    machine.write(Table::ExpertRows, (first + lane) as u64, sum);
                }
            });
        }
        Ok(())
    }

    /// Calls `each` with every local expert, each on a lane.
    #[inline(always)]
    fn each_expert(&self, each: impl Fn(u32)) {
        let experts = self.dispatch.common.shape.local_experts();
        for first in (0..experts).step_by(LANES as usize) {
            self.dispatch.machine.lanes(|lane| {
                if first + lane < experts {
                    each(first + lane);
                }
            });
        }
    }
}
