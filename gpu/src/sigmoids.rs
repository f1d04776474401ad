//! The sigmoids of all BF16 gates in a block's shared memory: see `ferry_layout::sigmoids`.

use ferry_layout::sigmoids::{GateRange, PLACES};
use ferry_layout::silu::Activation;

use crate::ptx::lookup::{LookupTable, Storage};
use crate::ptx::number::{self, Instructions};

/// The table.
#[derive(Clone, Copy)]
pub struct Sigmoids {
    table: LookupTable,
    places: GateRange,
}

impl Sigmoids {
    /// Computes the table. Called once in a launch, by all threads of the block.
    #[inline(always)]
    pub fn fill(place: Storage, activation: Activation) -> Self {
        let places = GateRange::of(activation);
        let of = |index| places.sigmoid(index, activation, Instructions);
        Self {
            table: place.fill::<PLACES>(of),
            places,
        }
    }

    /// The sigmoids of the BF16s in the low and the high half.
    #[inline(always)]
    pub fn of_pair(self, pair: u32) -> (f32, f32) {
        let offsets = self.places.offsets(pair, number::distances);
        let (low, high) = number::halves(offsets);
        // SAFETY: offsets of places of the table.
        unsafe { (self.table.at(low), self.table.at(high)) }
    }
}
