//! Elements of a token that are about to be encoded.

use ferry_protocol::LANES;

use crate::ptx::memory::{self, Vector};

/// Elements that a lane encodes at a time.
pub const LANE_ELEMENTS: u32 = 16;
/// Elements that a warp encodes at a time.
pub const TILE_ELEMENTS: u32 = LANES * LANE_ELEMENTS;

/// A token's elements, tile by tile.
pub trait Elements {
    /// Prepares for the first tile, which begins at element `tile`. All lanes.
    ///
    /// # Safety
    /// The token has `end` elements.
    unsafe fn begin(&mut self, tile: u32, end: u32);
    /// Returns this lane's elements of the tile that begins at element `tile`, the next one; arbitrary values
    /// from element `end` on. Ranges end at the end of groups and of words of scales, so nothing that is
    /// stored depends on those. All lanes.
    ///
    /// # Safety
    /// The token has `end` elements.
    unsafe fn take(&mut self, tile: u32, end: u32) -> [Vector; 2];
}

/// Elements in the input.
pub struct Input {
    /// The token: BF16.
    pub source: u64,
    /// Whether the next elements are loaded while these are encoded, which takes registers.
    pub loads_ahead: bool,
    /// This lane.
    pub lane: u32,
    /// Elements that are being loaded.
    pub ahead: [Vector; 2],
}

impl Elements for Input {
    #[inline(always)]
    unsafe fn begin(&mut self, tile: u32, end: u32) {
        if self.loads_ahead {
            // SAFETY: the token has `end` elements: documented on `Elements::begin`.
            self.ahead = unsafe { load_elements(self.source, self.lane, tile, end) };
        }
    }

    #[inline(always)]
    unsafe fn take(&mut self, tile: u32, end: u32) -> [Vector; 2] {
        // SAFETY: the token has `end` elements: documented on `Elements::take`.
        let load = |tile| unsafe { load_elements(self.source, self.lane, tile, end) };
        if !self.loads_ahead {
            return load(tile);
        }
        core::mem::replace(&mut self.ahead, load(tile + TILE_ELEMENTS))
    }
}

/// A lane's elements of the tile that begins at `tile` of the token at `source`, zeros from element `end` on.
///
/// # Safety
/// The token has `end` elements.
#[inline(always)]
pub unsafe fn load_elements(source: u64, lane: u32, tile: u32, end: u32) -> [Vector; 2] {
    let start = tile + lane * LANE_ELEMENTS;
    let from = source + 2 * start as u64;
    // SAFETY: active only inside the token.
    unsafe {
        [
            memory::load_or_zeros(from, start < end),
            memory::load_or_zeros(from + size_of::<Vector>() as u64, start < end),
        ]
    }
}
