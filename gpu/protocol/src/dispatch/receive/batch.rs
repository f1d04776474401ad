//! Items that a warp receives: 32 work items at a time, one a lane, so that the lanes check 32 presence bits
//! at once. Sources are interleaved.

use ferry_layout::{Rank, Region, Shape};

use crate::machine::{LANES, Machine};
use crate::sync::launch::{Awaited, Launch};
use crate::work::extent::Extent;
use crate::work::item::Item;
use crate::work::partition::Partition;

/// 32 items of a warp, one a lane.
#[derive(Clone, Copy)]
pub struct Batch {
    extent: Extent,
    first: u32,
    items: u32,
    warps: u32,
}

impl Batch {
    /// The first batch of a warp's partition.
    #[inline(always)]
    pub fn first(shape: &Shape, extent: Extent, partition: Partition) -> Self {
        partition.debug_assert_is_one();
        Self {
            extent,
            first: partition.index,
            items: extent.items(shape),
            warps: partition.of,
        }
    }

    /// The warp's next batch.
    #[inline(always)]
    pub fn next(self) -> Self {
        Self {
            first: self.first + LANES * self.warps,
            ..self
        }
    }

    /// The first batch of the warp's partition, once more.
    #[inline(always)]
    pub fn again(&self) -> Self {
        Self {
            first: self.partition().index,
            ..*self
        }
    }

    /// Whether there are any items.
    #[inline(always)]
    pub fn is_some(&self) -> bool {
        self.first < self.items
    }

    /// The warp's partition, computed again, as a kept value would occupy registers meanwhile.
    #[inline(always)]
    pub fn partition(&self) -> Partition {
        Partition {
            index: self.first % self.warps,
            of: self.warps,
        }
    }

    /// Whether a lane has an item.
    #[inline(always)]
    pub fn has(&self, lane: u32) -> bool {
        self.index(lane) < self.items
    }

    #[inline(always)]
    fn index(&self, lane: u32) -> u32 {
        self.first + lane * self.warps
    }

    /// A lane's item, if its source's rows have `parts` parts.
    #[inline(always)]
    pub fn item(&self, lane: u32, parts: u32, shape: &Shape, me: Rank) -> Item {
        self.extent.item(shape, me, self.index(lane), parts)
    }

    /// Parts of the rows of the item's source if the item comes to this rank, else 0; `None` while its
    /// presence word has not arrived.
    #[inline(always)]
    pub fn present<M: Machine>(&self, launch: &Launch<M>, lane: u32) -> Option<u32> {
        if !self.has(lane) {
            return Some(0);
        }
        self.extent.parts_here(launch, self.index(lane))
    }

    /// The object of a lane's wait in [`present`](Self::present).
    #[inline(always)]
    pub fn awaited<M: Machine>(&self, launch: &Launch<M>, lane: u32) -> Awaited {
        let (machine, common) = (launch.machine, launch.common);
        let Item { source, token, .. } = self.item(lane, 1, &common.shape, common.rank());
        let word = token / LANES;
        let saw = machine.load_tagged(common.window.presence(source, word)).0 >> 32;
        Awaited {
            peer: source,
            region: Region::Presence,
            index: word as u64,
            saw,
        }
    }
}
