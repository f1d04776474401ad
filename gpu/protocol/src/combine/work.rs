//! Work of a sender of combine.

use crate::tactics::Wire;
use crate::work::item::Item;
use crate::work::partition::Partition;

/// One item to be sent back, of all possible ones.
#[derive(Clone, Copy)]
pub struct Work {
    /// Way in which its row travels.
    pub wire: Wire,
    /// The sender's partition of all items.
    pub partition: Partition,
    /// Number of all possible items.
    pub items: u32,
    /// The item, if it arrived.
    pub item: Option<Item>,
}
