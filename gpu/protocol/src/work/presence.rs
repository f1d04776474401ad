//! Whether a work item comes to this rank, as its source has told.

use crate::machine::{LANES, Machine};
use crate::sync::launch::Launch;
use crate::work::extent::Extent;

/// The parts that the source of item `index` has, if the item comes here, else 0; `None` while that is not known. For
/// one lane.
#[inline(always)]
pub fn presence<M: Machine>(launch: &Launch<M>, extent: Extent, index: u32) -> Option<u32> {
    let (machine, common, epoch) = (launch.machine, launch.common, launch.epoch);
    let item = extent.item(&common.shape, common.rank(), index, 1);
    // Both words are read before either is looked at.
    let count = machine.load_tagged(common.window.token_count(item.source));
    let word = machine.load_tagged(common.window.presence(item.source, item.token / LANES));
    let tokens = count.value(epoch)?;
    let parts = common.row.parts(tokens);
    if item.token >= tokens || item.part >= parts {
        return Some(0);
    }
    let present = word.value(epoch)? >> (item.token % LANES) & 1 != 0;
    Some(if present { parts } else { 0 })
}
