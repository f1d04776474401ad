//! Units that a warp reads about together: what says where they go comes by loads that wait for each other, and
//! takes no longer for several.

use ferry_layout::Shape;

use crate::machine::LANES;

/// Fewest lanes of a unit, hence at most four units.
/// measured: T-065, H200
const LEAST_LANES: u32 = 8;

/// How a warp's lanes are shared among units: each has as many as a token has top-k slots, rounded up to a power
/// of two.
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

    /// Most units of a group: 1, 2 or 4.
    #[inline(always)]
    pub fn most(self) -> u32 {
        LANES >> self.width.trailing_zeros()
    }

    /// The unit of a lane.
    #[inline(always)]
    pub fn item(self, lane: u32) -> u32 {
        lane >> self.width.trailing_zeros()
    }

    /// The top-k slot of a lane, which may be one that no token has.
    #[inline(always)]
    pub fn slot(self, lane: u32) -> u32 {
        lane & (self.width - 1)
    }

    /// The first lane of a unit.
    #[inline(always)]
    pub fn first(self, item: u32) -> u32 {
        item << self.width.trailing_zeros()
    }

    /// The lanes of a unit, as bits.
    #[inline(always)]
    pub fn lanes(self, item: u32) -> u32 {
        u32::MAX >> (LANES - self.width) << self.first(item)
    }
}
