//! Rows of zeros, and words that are all alike.

use core::ops::Range;

use ferry_layout::{Table, Tensor};

use crate::dispatch::launch::Dispatch;
use crate::machine::rows::{ByteRange, Row};
use crate::machine::{LANES, Machine};
use crate::work::partition::Partition;

impl<M: Machine> Dispatch<'_, M> {
    /// Writes zeros to a row of the outputs: payload, scales, which begin at word `scales` and are `stride`
    /// words apart, and the row's own scale.
    #[inline(always)]
    pub fn clear_row(&self, row: u32, scales: u64, stride: u64) {
        let (machine, common) = (self.machine, self.common);
        let range = ByteRange::part(common.row.payload_bytes, 0, 1);
        let to = machine.row(Row::Tensor(Tensor::Output, row));
        let mut start = range.start;
        while start < range.end {
            machine.store_tile(to, start, range.end, &[M::Vector::default()]);
            start += M::WARP_BYTES;
        }
        for first in (0..common.row.scale_words).step_by(LANES as usize) {
            machine.lanes(|lane| {
                if first + lane < common.row.scale_words {
                    let index = scales + (first + lane) as u64 * stride;
                    machine.write(Table::Scales, index, 0);
                }
            });
        }
        if common.shape.sizes().has_row_scale {
            machine.lanes(|lane| {
                if lane == 0 {
                    machine.write_half(Table::RowScales, row as u64, 0);
                }
            });
        }
    }
}

/// Writes `value` to a range of words of a table: this warp's share.
#[inline(always)]
pub fn fill_words<M: Machine>(
    machine: &M,
    table: Table,
    words: Range<u64>,
    value: u32,
    partition: Partition,
) {
    let mut first = words.start + (partition.index * LANES) as u64;
    while first < words.end {
        machine.lanes(|lane| {
            if first + (lane as u64) < words.end {
                machine.write(table, first + lane as u64, value);
            }
        });
        first += (partition.of * LANES) as u64;
    }
}
