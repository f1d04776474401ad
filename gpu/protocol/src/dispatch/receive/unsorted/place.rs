//! Places of received rows: where they lie, or in the outputs.

use ferry_layout::{ReceiveLayout, SENTINEL, Table, Tensor, TokenFormat};

use super::Receiver;
use crate::dispatch::place::destination::Destinations;
use crate::machine::Machine;
use crate::machine::miss::TimedOut;
use crate::machine::rows::Row;
use crate::work::item::{Item, RowLocation};

impl<M: Machine> Receiver<'_, M> {
    /// Puts an item that has arrived, or has inline flags, into its place in `row`. Describes the row if it
    /// has inline flags.
    #[inline(always)]
    pub(super) fn place(&self, item: Item, row: u32) -> Result<(), TimedOut> {
        let (machine, common) = (self.dispatch.machine, self.dispatch.common);
        let from = item.location(common);
        let is_view = self.layout == ReceiveLayout::View;
        if is_view && !from.is_inline && !self.rewrites_scales() {
            return Ok(());
        }
        // All loads are issued before any is waited for.
        let ahead = self.dispatch.read_scales_ahead(from);
        if is_view && !from.is_inline {
            return self.place_scales(item, from, ahead, row);
        }
        let is_inside = (row as u64) < self.dispatch.args.row_capacity;
        let source = from.of(common.rank());
        let payload = machine.read_ahead(from.range, source);
        if from.is_inline {
            let mut words = self.dispatch.read_assignments(from);
            let weights = self.dispatch.take_header(item, from, &mut words)?;
            // Before the payload is moved, which takes the registers.
            if item.part == 0 {
                self.describe_item(item, row, words, weights);
            }
        }
        let kept = common.window.dispatch_row(item.source, item.token);
        let to = |_| match is_view {
            true => Row::Window(common.rank(), kept),
            false => Row::Tensor(Tensor::Output, row),
        };
        machine.copy_row(from.range, source, payload, is_inside as u32, to)?;
        self.place_scales(item, from, ahead, row)?;
        if item.part == 0 && !is_view {
            let destinations = Destinations {
                positions: machine.lanes(|_| row),
                scales: machine.lanes(|_| 0),
                here: is_inside as u32,
            };
            self.dispatch.place_row_scale(from.row, destinations);
        }
        Ok(())
    }

    /// Whether scales of rows in a view are read: to be restored, or to be transposed.
    #[inline(always)]
    fn rewrites_scales(&self) -> bool {
        self.rows.transposes_scales != 0
            || matches!(
                self.dispatch.common.shape.format(),
                TokenFormat::Mxfp8(_) | TokenFormat::Mxfp4(_)
            )
    }

    /// Puts the scales of an item into their places, after waiting for them: in a view, words that travelled
    /// as one less become what they were. `ahead`: the result of `scales::read_ahead`.
    #[inline(always)]
    fn place_scales(
        &self,
        item: Item,
        from: RowLocation,
        ahead: M::Lanes<u32>,
        row: u32,
    ) -> Result<(), TimedOut> {
        let (machine, common) = (self.dispatch.machine, self.dispatch.common);
        let stays = self.layout == ReceiveLayout::View && self.rows.transposes_scales == 0;
        let kept = common
            .row
            .scales(common.window.dispatch_row(item.source, item.token));
        let is_inside = (row as u64) < self.dispatch.args.row_capacity;
        let (start, stride) = self.scales_of(row);
        self.dispatch
            .take_scales(from, ahead, |first, end, values| {
                machine.lanes(|lane| {
                    let (word, value) = (first + lane, machine.own(values, lane));
                    if word >= end || !is_inside {
                        return;
                    }
                    if !stays {
                        let index = start + word as u64 * stride;
                        machine.write(Table::Scales, index, value);
                    } else if from.is_inline || value == SENTINEL {
                        machine.write_window(kept.word(word), value);
                    }
                });
            })
    }

    /// First word of a row's scales in the outputs, and the words from one to the next.
    #[inline(always)]
    fn scales_of(&self, row: u32) -> (u64, u64) {
        match self.rows.transposes_scales {
            0 => (row as u64 * self.dispatch.common.row.scale_words as u64, 1),
            _ => (row as u64, self.dispatch.args.row_capacity),
        }
    }

    /// Whether rows without a token are cleared.
    #[inline(always)]
    pub(super) fn clears(&self) -> bool {
        self.layout == ReceiveLayout::Strided && self.rows.clears_absent != 0
    }

    /// Writes zeros to a row of the outputs: payload and scales.
    #[inline(always)]
    pub(super) fn clear_row(&self, row: u32) {
        let (scales, stride) = self.scales_of(row);
        self.dispatch.clear_row(row, scales, stride);
    }
}
