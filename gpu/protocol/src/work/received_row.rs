//! Numbers of received rows that stay as they came.

use ferry_layout::{Rank, ReceiveLayout, Table};

use crate::machine::{LANES, Machine};
use crate::sync::launch::Launch;

/// Row of a token of `source` that came to this rank. If rows are moved together, after their bases are
/// written, and until this rank returns its credit. For one lane.
#[inline(always)]
pub fn received_row<M: Machine>(
    launch: &Launch<M>,
    layout: ReceiveLayout,
    source: Rank,
    token: u32,
) -> u32 {
    let (machine, common) = (launch.machine, launch.common);
    match layout {
        ReceiveLayout::Compact => {
            // Both words are loaded before either is used.
            let present = machine.load_tagged(common.window.presence(source, token / LANES));
            let base = machine.read(
                Table::RowBases,
                common.shape.row_base_index(source, token / LANES),
            );
            let before = present.0 as u32 & ((1 << (token % LANES)) - 1);
            base + before.count_ones()
        }
        _ => common.shape.strided_row(source, token),
    }
}
