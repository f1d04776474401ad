//! What a sender of combine works on.

use crate::tactics::Wire;
use crate::work::item::Item;
use crate::work::partition::Partition;

/// One item to be sent back, of all that may be.
#[derive(Clone, Copy)]
pub struct Work {
    /// How its row travels.
    pub wire: Wire,
    /// The sender's partition of all items.
    pub partition: Partition,
    /// All items that may be.
    pub items: u32,
    /// The item, if it came.
    pub item: Option<Item>,
}
