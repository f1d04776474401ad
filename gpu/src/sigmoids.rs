//! The sigmoids of all BF16s in a block's shared memory: see `ferry_layout::sigmoids`.

use ferry_layout::{sigmoids, silu};

use crate::ptx::number::{self, Instructions};
use crate::ptx::table::{Place, Table};

/// The table.
#[derive(Clone, Copy)]
pub struct Sigmoids(Table);

impl Sigmoids {
    /// Computes them. Called once in a launch, by all threads of the block.
    #[inline(always)]
    pub fn fill(place: Place) -> Self {
        let of = |index| silu::sigmoid(sigmoids::argument(index), Instructions);
        Self(place.fill::<{ sigmoids::PLACES }>(of))
    }

    /// Of the BF16s in the low and the high half.
    #[inline(always)]
    pub fn of_pair(self, pair: u32) -> (f32, f32) {
        let offsets = sigmoids::offsets(pair, number::clamped_places);
        let (low, high) = number::halves(offsets);
        // SAFETY: offsets of places.
        unsafe { (self.0.at(low), self.0.at(high)) }
    }
}
