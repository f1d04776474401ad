//! Sub-warps: groups of lanes that read headers of different items at the same time. The loads of one item
//! depend on each other, and take no longer for several items.

use ferry_layout::Shape;

use crate::machine::LANES;

/// Fewest lanes of a sub-warp, hence at most four items at a time.
/// measured: T-065, H200
const LEAST_LANES: u32 = 8;

/// Division of a warp's lanes among items: each item has as many lanes as a token has top-k slots, rounded up
/// to a power of two.
#[derive(Clone, Copy)]
pub struct SubWarps {
    width: u32,
}

impl SubWarps {
    #[inline(always)]
    pub fn of(shape: &Shape) -> Self {
        debug_assert!(shape.top_k <= LANES, "top-k {}", shape.top_k);
        Self {
            width: shape.top_k.next_power_of_two().max(LEAST_LANES),
        }
    }

    /// Items at a time: 1, 2 or 4.
    #[inline(always)]
    pub fn most(self) -> u32 {
        LANES >> self.width.trailing_zeros()
    }

    /// The item of a lane.
    #[inline(always)]
    pub fn item(self, lane: u32) -> u32 {
        lane >> self.width.trailing_zeros()
    }

    /// The top-k slot of a lane, which may be past a token's last.
    #[inline(always)]
    pub fn slot(self, lane: u32) -> u32 {
        lane & (self.width - 1)
    }

    /// The first lane of an item.
    #[inline(always)]
    pub fn first(self, item: u32) -> u32 {
        item << self.width.trailing_zeros()
    }

    /// The lanes of an item, as bits.
    #[inline(always)]
    pub fn lanes(self, item: u32) -> u32 {
        u32::MAX >> (LANES - self.width) << self.first(item)
    }
}
